"""The options of `vaerdict.differential_expression` and of `vaerdict de`, each said once."""

from __future__ import annotations

from dataclasses import dataclass

from vaerdict.options import normalise, option

SCALES = ("centred", "proportion", "pair")
"""Names of the scales of a fold change; `vaerdict.de.effects` defines them."""

PRIORS = ("none", "profile", "model")
"""What fold changes are predicted from, without the counts of the gene itself."""

OBJECTIVES = ("VAE", "IWAE", "WW", "CHI")
"""Objectives that a model can be trained by."""

DRAWS, QUICK_DRAWS = 500, 250
"""Draws of every fold change, and with `quick`."""

FEWEST_MODEL_DRAWS = 20
"""A mixture with a share of 5 % for the prior needs as many draws."""

LARGEST_SEED = 2**31

ENOUGH_CELLS, SHARE_SEEN, FEWEST_SEEN = 10, 0.3, 3
"""A gene is tested if seen in so many of the cells compared, or for small groups in this share, at least so many."""

MODEL_GENES = 2000
"""The most variable genes that a model is trained on, where no other number is asked for."""

FEWEST_GENES = 2
"""A fold change of a single gene has nothing to be relative to."""

MIXED_SPLITS, UNDONE_SPLITS = 10, 10
"""Splits of mixed populations, and comparisons with changes undone, where a prior is learned from other cells."""

MODEL = "A model, where one is asked for"
"""The heading of the options that train or use a model."""

Pair = tuple[str, str | None]
"""A group and the group it is compared with; None for all other cells."""


@dataclass(frozen=True, kw_only=True)
class DEOptions:
    """What is asked of a differential expression; the fields with a meaning are options of the command too."""

    groupby: str
    pairs: tuple[Pair, ...] = ()
    within: str | None = option(None, "Column of obs with cell types: compare within each of them.")
    sample_key: str | None = option(
        None, "Column of obs with samples, which then are the replicates in place of cells."
    )
    batch_key: str | None = option(None, "Column of obs with batches: counts are compared within each of them.")
    layer: str | None = option(None, "Layer of raw counts; X by default.")
    clustered: bool = option(
        False, "The groups are clusters, found in one part of the counts (vd.split_counts): compare the other part."
    )
    delta: float = option(0.5, "Least absolute log2 fold change of a differentially expressed gene.")
    covariates: tuple[str, ...] = option(
        (),
        "Columns of obs to adjust for, numbers or categories, of cells or of samples where these are the replicates.",
    )
    pair_by: str | None = option(
        None,
        "Column of obs, such as the patient, that pairs the sides: fold changes within each of its values are the "
        "replicates.",
    )
    level: float = option(0.05, "Expected share of false discoveries in each contrast.", flag="--fdr")
    joint_fdr: bool = option(False, "Let the FDR hold for the genes called in all contrasts together, not in each.")
    shrinkage: bool = option(
        True,
        "Whether fold changes and intervals are shrunken towards those of all genes; probabilities and calls always "
        "are.",
        flag="--shrinkage/--no-shrinkage",
    )
    scale: str = option(
        "centred",
        "Scale of the fold change: centred (relative to the genes that do not change), proportion, or pair (single "
        "cells, as in scvi-tools; by a model).",
    )
    prior: str = option(
        "profile",
        "What else tells a gene's fold change: profile (the other genes, by clusters of cells that are not compared; "
        "where there are such cells), model (likewise, by a model trained on these cells) or none (its counts and "
        "adaptive shrinkage alone).",
    )
    min_cells: int | None = option(
        None,
        f"Least number of the cells compared, of either side, in which a gene must be seen: by default {ENOUGH_CELLS}, "
        f"or {SHARE_SEEN:.0%} of the smaller side's number of cells where that is less, and at least {FEWEST_SEEN}.",
        minimum=1,
    )
    n_top_genes: int | None = option(
        None,
        f"Number of most variable genes to test; all that are expressed by default, {MODEL_GENES} with a model.",
        flag="--genes",
        minimum=0,
    )
    keep_genes: tuple[str, ...] = option((), "Genes to test whether or not they are among the most variable.")
    gene_symbols: str | None = option(None, "Column of var with the names that genes have in the table.")
    check_model: bool = option(
        False,
        "Train a model and compare it with the counts: latents, model_* columns and predictive checks.",
        panel=MODEL,
    )
    objectives: tuple[str, ...] = option(
        (), "Objectives that models are trained by: VAE and IWAE by default; also WW and CHI.", panel=MODEL
    )
    refits: int | None = option(
        None, "Bootstrap refits of a model that decides genes: 3 by default, 0 with quick.", minimum=0, panel=MODEL
    )
    n_draws: int | None = option(
        None, f"Draws of every fold change: {DRAWS} by default, {QUICK_DRAWS} with quick.", flag="--draws", minimum=2
    )
    quick: bool = option(False, "A first look: fewer draws; of a model one objective, few epochs and no refits.")
    seed: int = option(
        0,
        "Seed of everything random; the same seed gives the same table, up to rounding in columns of a model.",
        minimum=0,
    )

    def __post_init__(self) -> None:
        from vaerdict.core import SettingError

        normalise(self)
        object.__setattr__(self, "n_top_genes", self.n_top_genes or None)
        if self.prior not in PRIORS:
            raise SettingError(f"prior={self.prior!r} is not one of {', '.join(PRIORS)}.")
        if self.scale not in SCALES:
            raise SettingError(f"scale={self.scale!r} is not one of {', '.join(SCALES)}.")
        if self.scale == "pair" and self.sample_key is not None:
            raise SettingError("scale='pair' compares single cells, sample_key whole samples; choose one of them.")
        if self.pair_by is not None and self.batch_key is not None:
            raise SettingError("pair_by compares within each pair, which takes care of batches; leave batch_key out.")
        if self.pair_by is not None and self.covariates:
            raise SettingError("pair_by leaves nothing to adjust that is the same in a pair; leave covariates out.")
        if (self.covariates or self.pair_by is not None) and (self.trains_model or self.scale == "pair"):
            raise SettingError("covariates and pair_by are for the counts; leave them out where a model is asked for.")
        if not self.delta > 0 or not 0 < self.level < 1:
            raise SettingError(f"delta={self.delta} must be positive and level={self.level} strictly between 0 and 1.")
        unknown = [name for name in self.objectives if name not in OBJECTIVES]
        if unknown:
            raise SettingError(f"objectives {unknown} are none of {', '.join(OBJECTIVES)}.")
        if self.seed >= LARGEST_SEED:
            raise SettingError(f"seed={self.seed} must be below {LARGEST_SEED}.")
        if self.n_top_genes is not None and self.n_top_genes < FEWEST_GENES:
            raise SettingError(
                f"n_top_genes={self.n_top_genes}: at least {FEWEST_GENES} genes are needed to compare; 0 for all."
            )
        if self.refits == 1:
            raise SettingError(f"refits={self.refits}: one shows no spread; give at least two, or 0 for none.")

    def check_training(self, *, has_model: bool) -> None:
        """Refuse options about a model that would have no effect; `has_model` says that a fitted one is given."""
        from vaerdict.core import SettingError

        if self.clustered and has_model:
            raise SettingError(
                "clustered=True with a fitted model: the model has seen the counts that the clusters were found in; "
                "leave the model out."
            )
        trained = self.trains_model and not has_model
        if self.objectives and not trained:
            raise SettingError(
                "objectives are about training a model, and none is trained; add check_model=True or leave them out."
            )
        if self.refits is not None and not (trained and self.model_decides):
            raise SettingError(
                "refits are of a model that is trained and decides genes, and there is none; add scale='pair' or leave "
                "them out."
            )
        if (self.trains_model or has_model) and self.draws < FEWEST_MODEL_DRAWS:
            raise SettingError(f"n_draws={self.draws}: with a model at least {FEWEST_MODEL_DRAWS} draws are needed.")

    @property
    def draws(self) -> int:
        """Draws of every fold change."""
        return self.n_draws if self.n_draws is not None else QUICK_DRAWS if self.quick else DRAWS

    @property
    def trains_model(self) -> bool:
        """Whether anything asked for needs a model that is trained on the cells compared."""
        return self.check_model or self.scale == "pair"

    @property
    def model_decides(self) -> bool:
        """Whether a model decides the genes; otherwise it is compared with the counts alone."""
        return self.scale == "pair"


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """What a calibration adds to the options of a differential expression."""

    splits: int = option(20, "Random splits of each group in which nothing changed.", minimum=0)
    spikes: int = option(10, "Random splits of each group between whose halves changes are planted.", minimum=0)
    mixed: int | None = option(
        None,
        "Random splits of two of the groups pooled, in which nothing changed but the mix of cells by chance: "
        f"{MIXED_SPLITS} by default for two groups or more with a prior from other cells, otherwise 0.",
        minimum=0,
    )
    undone: int | None = option(
        None,
        "Comparisons of two of the groups in which the change of some genes is undone while related genes still "
        f"change: {UNDONE_SPLITS} by default for two groups or more with a prior from other cells, otherwise 0.",
        minimum=0,
    )
    share: float = option(0.5, "Share of the cells in the first half: 0.1 for groups of unequal size.")
    balance: str | None = option(None, "Column of obs, such as the condition, that both halves have in equal parts.")
    rivals: tuple[str, ...] = option(
        (),
        "Other tests on the same cells and genes, for comparison: wilcoxon, ttest, deseq2 and edger; with a filter on "
        "the fold change wilcoxon+lfc, ttest+lfc, deseq2+lfc and edger+lfc; against delta deseq2-threshold and "
        "edger-treat. They need the extra `rivals`.",
    )

    def __post_init__(self) -> None:
        from vaerdict.core import SettingError

        normalise(self)
        if not self.splits + self.spikes + (self.mixed or 0) + (self.undone or 0):
            raise SettingError(
                f"splits={self.splits} and spikes={self.spikes}: at least one split must be made, or name a number of "
                "mixed or undone."
            )
        if not 0 < self.share < 1:
            raise SettingError(f"share={self.share} of the cells for the first half must lie between 0 and 1.")
