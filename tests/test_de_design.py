"""Covariates beside the groups: their effects on cells, what they leave, and what is refused in one line."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, sparse
from torch import Tensor

from checks import assert_mean
from de_toys import LIBRARY, counts, group_sums, libraries, rates
from vaerdict.core import DataError, SettingError, VaerdictError
from vaerdict.de import differential_expression
from vaerdict.de.design import (
    CellEffects,
    Covariates,
    adjusted,
    fit_cell_effects,
    scaled_by_effects,
)
from vaerdict.noise import seeded

ad = pytest.importorskip("anndata")
pd = pytest.importorskip("pandas")

CELLS, GENES = 200, 300


class Simulated:
    """Cells of two groups with a score that is higher in the first, and that acts on every other gene."""

    def __init__(self, seed: int, effect: float = 0.7, lfc: float = 0.0, n: int = CELLS, apart: float = 1.0) -> None:
        generator = seeded(seed)
        self.first = torch.arange(n) % 2 == 0
        self.score = torch.randn(n, generator=generator, dtype=torch.float64) + apart * self.first
        self.effect = torch.where(torch.arange(GENES) % 2 == 1, effect, 0.0).double()
        self.lfc = torch.where(torch.arange(GENES) % 3 == 0, lfc, 0.0).double()
        rate = rates(generator, GENES, 3.0)
        own = torch.exp(self.score.unsqueeze(-1) * self.effect) * torch.exp2(self.first.unsqueeze(-1) * self.lfc)
        self.library = libraries(generator, n)
        self.x = counts(generator, rate * own, self.library, torch.full((GENES,), 0.1).double())

    def adata(self, **columns: Any) -> Any:
        """With a gene that fills up the libraries, so that they are known."""
        rest = (3 * self.library - self.x.sum(1)).clamp_min(1).round().unsqueeze(-1)
        obs = {"group": np.where(self.first.numpy(), "A", "B"), "score": self.score.numpy()} | columns
        genes = pd.DataFrame(index=[*(f"g{i}" for i in range(GENES)), "rest"])
        frame = pd.DataFrame(obs, index=[f"c{i}" for i in range(len(self.x))])
        return ad.AnnData(sparse.csr_matrix(torch.cat([self.x, rest], 1).numpy()), obs=frame, var=genes)


# --------------------------------------------------------------------------------------------- effects on cells
def strata_of(data: Simulated) -> tuple[Tensor, Tensor]:
    """The sums of both sides ``(2, genes)`` and the side of each cell ``(cells,)``."""
    stratum = (~data.first).long()
    return torch.stack([data.x[stratum == s].sum(0) for s in (0, 1)]), stratum


def fitted(data: Simulated, z: Tensor) -> CellEffects:
    totals, stratum = strata_of(data)
    return fit_cell_effects(totals, data.x.T @ z, z, data.library, stratum)


def test_effects_are_those_of_highest_likelihood_given_the_sums():
    data = Simulated(1)
    z = torch.stack([data.score, data.score.flip(0).square()], -1)
    effects, stratum = fitted(data, z), (~data.first).long()
    for gene in (0, 1, 7):
        x = data.x[:, gene]

        def negative(gamma: np.ndarray, x: Tensor = x) -> float:
            log = data.library.log() + z @ torch.from_numpy(gamma)
            parts = [(x[stratum == s] * torch.log_softmax(log[stratum == s], 0)).sum() for s in (0, 1)]
            return -float(sum(parts)) + 0.25 * float(np.square(gamma).sum())  # half a count holds back

        best = optimize.minimize(negative, np.zeros(2), method="BFGS", options={"gtol": 1e-6})
        np.testing.assert_allclose(effects.gamma[gene].numpy(), best.x, atol=2e-4)


def test_effects_of_a_confounded_score_are_recovered():
    """False alarms at a rate of 1e-6, for genes that do change with it and for those that do not."""
    data = Simulated(2, n=600, lfc=1.0)
    error = (fitted(data, data.score.unsqueeze(-1)).gamma[:, 0] - data.effect)[data.x.sum(0) > 500]
    assert_mean(error, 0.0, rate=1e-6)
    assert float(error.square().mean().sqrt()) < 0.1


def test_a_gene_hardly_seen_has_no_large_effect():
    data = Simulated(3)
    data.x[:, 0] = 0.0
    data.x[:, 1] = 0.0
    data.x[5, 1] = 1.0
    gamma = fitted(data, data.score.unsqueeze(-1)).gamma[:2, 0]
    assert float(gamma[0]) == 0.0
    assert abs(float(gamma[1])) < 2.0


def test_blocks_of_genes_give_the_same_effects(monkeypatch):
    data = Simulated(4)
    z = data.score.unsqueeze(-1)
    expected = fitted(data, z).gamma
    monkeypatch.setattr("vaerdict.de.design._AT_A_TIME", 7 * CELLS)
    torch.testing.assert_close(fitted(data, z).gamma, expected)


def test_adjusted_sums_are_those_of_adjusted_libraries():
    data = Simulated(5)
    effects = CellEffects(data.effect.unsqueeze(-1), data.score.unsqueeze(-1))
    rows = data.first.nonzero().squeeze(-1)
    size = data.library.unsqueeze(-1) * torch.exp(data.score.unsqueeze(-1) * data.effect)
    expected = [(data.x[rows] * size[rows]).sum(0), size[rows].sum(0), size[rows].square().sum(0)]
    blocks = (sparse.csr_matrix(data.x[start : start + 30].numpy()) for start in range(0, CELLS, 30))
    scaled = sparse.vstack(list(scaled_by_effects(blocks, np.arange(GENES), effects))).toarray()
    cross = torch.from_numpy(scaled[rows]).T @ data.library[rows]
    plain = group_sums(data.x[rows], data.library[rows])
    sums = adjusted(plain, effects, rows, data.library, cross)
    for found, value in zip((sums.cross, sums.library, sums.library_squares), expected, strict=True):
        torch.testing.assert_close(found, value)
    direct = (data.x[rows] - sums.rate * size[rows]).square().sum(0) * len(rows) / (len(rows) - 1)
    torch.testing.assert_close(sums.deviations, direct, rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------------------------------------- end to end
def table(adata: Any, **options: Any) -> Any:
    options = {"scale": "proportion", "shrinkage": False} | options
    return differential_expression(adata, "group", "A", "B", **options).table.set_index("gene")


def test_a_score_that_differs_between_the_groups_does_not_bias_the_fold_change():
    """Of 150 genes that follow the score; without it they would change by about one. False alarms: 1e-6."""
    data = Simulated(6, effect=math.log(2), n=400)
    adata = data.adata()
    follows = [f"g{i}" for i in range(1, GENES, 2)]
    with_score, without = table(adata, covariates=("score",)), table(adata)
    assert_mean(torch.tensor(with_score.lfc_mean[follows].to_numpy()), 0.0, rate=1e-6)
    assert float(without.lfc_mean[follows].median()) > 0.7
    covers = (with_score.lfc_low <= 0) & (with_score.lfc_high >= 0)
    assert float(covers.drop("rest").mean()) == pytest.approx(0.9, abs=0.07)  # 4 standard errors of 300 genes
    assert with_score.is_de.sum() <= 2
    assert without.is_de.sum() > 50


def test_changes_beside_a_score_are_found():
    data = Simulated(7, lfc=1.5)
    found = table(data.adata(), covariates=("score",)).drop("rest")
    changed = torch.from_numpy(found.lfc_mean.to_numpy(copy=True)) > 1
    assert_mean(torch.from_numpy(found.lfc_mean.to_numpy(copy=True))[::3] - 1.5, 0.0, rate=1e-6)
    assert (changed == (torch.arange(GENES) % 3 == 0)).double().mean() > 0.95


def test_a_score_that_says_nothing_changes_little():
    data = Simulated(8, effect=0.0, apart=0.0)
    plain, scored = table(data.adata()), table(data.adata(), covariates=("score",))
    assert (plain.lfc_mean - scored.lfc_mean).abs().median() < 0.05


def test_a_category_is_adjusted_for_like_a_number_and_in_batches():
    data = Simulated(9, effect=1.0)
    kind = (data.score > 0.5).numpy()
    columns = {"kind": np.where(kind, "high", "low"), "number": kind.astype(int), "batch": ["x", "x", "y", "y"] * 50}
    adata = data.adata(**columns)
    one, other = (table(adata, covariates=(name,)).lfc_mean for name in ("kind", "number"))
    assert (one - other).abs().median() < 0.005  # the half count is in other units
    assert (one - other).abs().max() < 0.1
    within = table(adata, covariates=("kind",), batch_key="batch").lfc_mean
    assert (one - within).abs().median() < 0.1


def test_cells_of_a_batch_without_the_other_side_are_not_compared():
    """The answer is that without them."""
    data = Simulated(10, effect=0.0)
    first = data.first.numpy()
    batch = np.where(first & (np.arange(CELLS) < 100), "only A", np.where(np.arange(CELLS) % 4 < 2, "x", "y"))
    adata = data.adata(batch=batch)
    both, without = table(adata, batch_key="batch"), table(adata[batch != "only A"].copy(), batch_key="batch")
    pd.testing.assert_series_equal(both.lfc_mean, without.lfc_mean)
    pd.testing.assert_series_equal(both.q_value, without.q_value)


def test_swapping_groups_renaming_and_moving_genes_and_cells_changes_no_call():
    data = Simulated(11, lfc=1.0)
    adata = data.adata()
    first = table(adata, covariates=("score",))
    rng = np.random.default_rng(0)
    moved = adata[rng.permutation(CELLS), rng.permutation(GENES + 1)].copy()
    moved.obs["group"] = moved.obs["group"].map({"A": "z", "B": "a"})
    empty = ad.AnnData(np.zeros((CELLS, 3), np.float32), obs=moved.obs, var=pd.DataFrame(index=["e1", "e2", "e3"]))
    moved = ad.concat([moved, empty], axis=1, merge="first")
    options = {"scale": "proportion", "shrinkage": False, "covariates": ("score",)}
    second = differential_expression(moved, "group", "a", "z", **options).table.set_index("gene").loc[first.index]
    np.testing.assert_allclose(second.lfc_mean, -first.lfc_mean, atol=1e-6)
    np.testing.assert_allclose(second.lfc_low, -first.lfc_high, atol=1e-6)
    np.testing.assert_allclose(second.q_value, first.q_value, rtol=1e-4)
    assert (second.is_de == first.is_de).all()
    assert first.is_de.sum() > 20


# --------------------------------------------------------------------------------------------------- refusals
def test_columns_are_numbers_in_standard_deviations_or_categories():
    data = Simulated(12)
    adata = data.adata(kind=np.array(["a", "b", "c", "b"] * 50), flag=[True, False] * 100)
    covariates = Covariates.read(adata, ("score", "kind", "flag", "score"))
    assert covariates.names == ["score", "kind", "kind", "flag"]
    np.testing.assert_allclose(covariates.values.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(covariates.values[:, 0].std(), 1)
    assert set(covariates.values[:, 1].round(2)) == {0.5, -0.5}
    assert Covariates.read(adata, ()).values.shape == (CELLS, 0)


def test_the_share_left_is_that_of_weighted_regression():
    data = Simulated(13)
    weight, z = data.library / LIBRARY, data.score.unsqueeze(-1)
    ones, side = torch.ones(CELLS, 1).double(), data.first.double().unsqueeze(-1)
    batch = torch.zeros(CELLS, dtype=torch.long)
    columns, found = Covariates(["score"], z.numpy()).check("A vs B", z, data.first, batch, weight)
    assert torch.equal(columns, z)

    def variance(*columns: Tensor) -> float:
        x = torch.cat(columns, -1)
        return float(torch.linalg.inv(x.T @ (weight.unsqueeze(-1) * x))[0, 0])

    assert found == pytest.approx(variance(side, ones) / variance(side, ones, z))
    assert 0.6 < found < 0.95


REFUSED = {
    "absent": (("scroe",), {}, SettingError, "covariates='scroe' is no column of obs .did you mean 'score'"),
    "missing": (("part",), {}, DataError, "covariate 'part' is missing in 1 of 200 cells; fill it in"),
    "not finite": (("huge",), {}, DataError, "covariate 'huge' holds values that are not finite"),
    "constant": (("one",), {}, SettingError, "covariate 'one' is constant in the units of A vs B"),
    "a constant that rounds": (("tenth",), {}, SettingError, "covariate 'tenth' is constant"),
    "one category": (("same",), {}, SettingError, "'same' has one value"),
    "collinear": (("score", "twice"), {}, SettingError, "covariate 'twice' is constant .* or explained by"),
    "the groups": (("is_a",), {}, SettingError, "covariates is_a explain the groups of A vs B completely"),
    "the batch": (("batch_number",), {"batch_key": "batch"}, SettingError, "'batch_number' is constant .*batches"),
    "many categories": (("cell",), {}, SettingError, "covariate 'cell' has 200 categories, more than 20; pair_by"),
    "too few samples": (("s1", "s2"), {"sample_key": "sample"}, SettingError, "4 units for 4 coefficients"),
    "pairs": (("score",), {"sample_key": "pair"}, SettingError, "are pairs.* leave covariates out"),
}


@pytest.fixture(scope="module")
def awkward() -> Any:
    data = Simulated(14)
    number = np.arange(CELLS)
    sample = np.array([f"{'A' if first else 'B'}{i // 2 % 2}" for i, first in enumerate(data.first.tolist())])
    of_sample = {"A0": (0.1, 2.0), "A1": (0.9, -1.0), "B0": (0.5, 0.3), "B1": (-1.0, 0.8)}
    return data.adata(
        part=np.where(number == 3, np.nan, 1.0 * number),
        huge=np.where(number == 3, np.inf, 1.0 * number),
        one=np.ones(CELLS),
        tenth=np.full(CELLS, 0.1),
        same=np.array(["x"] * CELLS),
        twice=2 * data.score.numpy() + 1,
        is_a=data.first.numpy().astype(float),
        batch=np.where(number < 100, "x", "y"),
        batch_number=np.where(number < 100, 1.0, 5.0),
        cell=number.astype(str),
        sample=sample,
        s1=[of_sample[s][0] for s in sample],
        s2=[of_sample[s][1] for s in sample],
        pair=[f"p{i // 2 % 3}" for i in range(CELLS)],
    )


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_adjusted_for_is_refused_in_one_line(case, awkward):
    covariates, options, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message) as refused:
        table(awkward, covariates=covariates, **options)
    assert isinstance(refused.value, VaerdictError)
    assert "\n" not in str(refused.value)


def test_samples_with_a_covariate_are_compared(awkward):
    assert len(table(awkward, covariates=("s1",), sample_key="sample")) == GENES + 1
