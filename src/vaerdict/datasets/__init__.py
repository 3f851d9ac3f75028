"""Simulated data sets with the parameters they were drawn from."""

from vaerdict.datasets.genes import SIMULATORS, CountData, appendix, donors, graded, released, section5
from vaerdict.datasets.linear import LOADINGS, LinearGaussianData, linear_gaussian

__all__ = [
    "LOADINGS",
    "SIMULATORS",
    "CountData",
    "LinearGaussianData",
    "appendix",
    "donors",
    "graded",
    "linear_gaussian",
    "released",
    "section5",
]
