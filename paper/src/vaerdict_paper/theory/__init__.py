"""The paper's theory: every result corrected and, with ``printed=True``, as printed in the paper."""

from vaerdict_paper.theory.categorical import (
    CategoricalDivergences,
    categorical_divergences,
    divergences_under_certainty,
    reverse_kl_limit,
)
from vaerdict_paper.theory.concentration import (
    concentration_bound,
    large_deviation_bound,
    large_deviation_threshold,
    sub_exponential_parameters,
)
from vaerdict_paper.theory.error_bounds import (
    deviation_bound,
    plugin_mse_bound,
    snis_mse_bound,
    sufficient_sample_size,
)
from vaerdict_paper.theory.gaussians import (
    Gaussian,
    QuadraticForm,
    a_matrix,
    a_norm,
    gaussian_chi_square,
    gaussian_forward_kl,
    gaussian_reverse_kl,
    log_ratio_form,
    normal_total_variation,
)
from vaerdict_paper.theory.mean_field import (
    mean_field_chi_square,
    mean_field_chi_square_newton,
    mean_field_forward_kl,
    mean_field_iwelbo,
    mean_field_reverse_kl,
)

__all__ = [
    "CategoricalDivergences",
    "Gaussian",
    "QuadraticForm",
    "a_matrix",
    "a_norm",
    "categorical_divergences",
    "concentration_bound",
    "deviation_bound",
    "divergences_under_certainty",
    "gaussian_chi_square",
    "gaussian_forward_kl",
    "gaussian_reverse_kl",
    "large_deviation_bound",
    "large_deviation_threshold",
    "log_ratio_form",
    "mean_field_chi_square",
    "mean_field_chi_square_newton",
    "mean_field_forward_kl",
    "mean_field_iwelbo",
    "mean_field_reverse_kl",
    "normal_total_variation",
    "plugin_mse_bound",
    "reverse_kl_limit",
    "snis_mse_bound",
    "sub_exponential_parameters",
    "sufficient_sample_size",
]
