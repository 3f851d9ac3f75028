"""The options of an annotation, said once for the function, the command and the documentation."""

from __future__ import annotations

from dataclasses import dataclass

from vaerdict.options import normalise, option

DATA, METHOD = "Data", "Method"
"""Headings of the options in the help of the command."""


@dataclass(frozen=True, kw_only=True)
class AnnotateOptions:
    """What a user may choose of an annotation; `labels` is the column of the reference that holds the types."""

    labels: str
    fdr: float = option(0.1, "Largest expected share of false calls among the cells called novel.")
    max_error: float = option(0.2, "A label is given where the probability that it is wrong is at most this.")
    batch_key: str | None = option(
        None,
        "Column of obs, in both files, of batches: each batch of the query is judged by itself, with reference cells "
        "of the same batch where there are enough.",
        panel=DATA,
    )
    calibration: str | None = option(
        None,
        "Column of obs of the query with the known types of some of its cells (sorted, spiked in or genotyped), empty "
        "elsewhere. Novel calls are calibrated on them, which needs no agreement between reference and query.",
        panel=DATA,
    )
    layer: str | None = option(None, "Layer of both files that holds raw counts, in place of X.", panel=DATA)
    gene_symbols: str | None = option(
        None, "Column of var that names the genes, in whichever file has it, in place of var_names.", panel=DATA
    )
    level: float = option(
        0.1, "Probability with which the test of exchangeability refuses cells that are alike.", panel=METHOD
    )
    n_top_genes: int = option(2000, "Number of most variable genes used.", minimum=10, panel=METHOD)
    n_components: int = option(30, "Number of principal components.", minimum=2, panel=METHOD)
    audit: bool = option(
        True,
        "Leave out every type of the reference in turn, and report whether it would have been found.",
        flag="--audit/--no-audit",
        panel=METHOD,
    )
    markers: bool = option(
        True, "Find the marker genes of novel groups by `vaerdict de`.", flag="--markers/--no-markers", panel=METHOD
    )
    seed: int = option(0, "Seed of everything random; the same seed gives the same answer.", minimum=0)

    def __post_init__(self) -> None:
        from vaerdict.core import SettingError

        normalise(self)
        for name in ("fdr", "max_error", "level"):
            if not 0 < getattr(self, name) < 1:
                raise SettingError(f"{name}={getattr(self, name)} must lie strictly between 0 and 1.")
        if self.seed >= 2**32:
            raise SettingError(f"seed={self.seed} must be less than {2**32}.")
