"""Simulators and file readers. Data sets know no model: they return tensors and the truth behind them."""

from vaerdict.datasets.folder import data_folder, find_data
from vaerdict.datasets.genes import SIMULATORS, CountData, appendix, donors, released, section5
from vaerdict.datasets.images import Mnist, MnistSplit, mnist, mnist_split
from vaerdict.datasets.linear import LOADINGS, LinearGaussianData, linear_gaussian

__all__ = [
    "LOADINGS",
    "SIMULATORS",
    "CountData",
    "LinearGaussianData",
    "Mnist",
    "MnistSplit",
    "appendix",
    "data_folder",
    "donors",
    "find_data",
    "linear_gaussian",
    "mnist",
    "mnist_split",
    "released",
    "section5",
]
