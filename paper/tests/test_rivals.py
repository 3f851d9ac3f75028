"""The rivals: each finds planted changes, states what it is documented to state, and leaves no trace."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pytest
import torch

from vaerdict.core import SettingError
from vaerdict.datasets.genes import CountData, appendix, donors
from vaerdict.de import rivals as tests
from vaerdict.optional import isolated
from vaerdict_paper.benchmarks import de
from vaerdict_paper.experiments import rivals
from vaerdict_paper.experiments.genes_contrasts import Sides, contrasts, sample_cells
from vaerdict_paper.experiments.rivals import COUNTS, SCVI, TESTS, ScviContrast, rival_rows, scvi_means

for package in ("scvi", "scanpy", "pydeseq2", "edgepython"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra `rivals`)")

METRICS = {"auprc", "fdp", "tpr", "fdp_05", "fdp_10", "fdp_20", "tpr_05", "tpr_10", "tpr_20"}


@pytest.fixture(scope="module")
def data() -> CountData:
    return appendix(0, n_cells=200, n_genes=30)


def test_one_row_per_rival_and_number_of_cells_by_its_own_truth(data):
    asked = [("all", 0, Sides.of(data, None, seed=0)), (20, 1, Sides.of(data, 20, seed=0, subset=1))]
    rows = rival_rows(asked, max_epochs=2)
    names = (*SCVI, *TESTS, COUNTS)
    few = [name for name in names if name != "scvi-importance"]
    assert [(row["n_cells"], row["model"]) for row in rows] == [*(("all", m) for m in names), *((20, m) for m in few)]
    for row in rows:
        assert row.keys() >= METRICS
        assert row["proposal"] is None
        assert row["seconds"] > 0
        by_probability = row["model"].startswith("scvi") or row["model"] == COUNTS
        assert ("fdr_mae" in row) == ("brier" in row) == by_probability
        assert ("n_draws" in row) == (row["seconds_train"] > 0) == row["model"].startswith("scvi")
        assert ("coverage" in row) == (row["model"] == COUNTS)
    estimands = {row["model"]: row["estimand"] for row in rows}
    assert {m for m, e in estimands.items() if e == "centred"} == {
        *("scvi-means-centred", "deseq2+lfc", "deseq2-threshold", "edger+lfc", "edger-treat", COUNTS)
    }
    for row in rows:
        truth = data.lfc(0, 1, proportions=row["estimand"] == "proportion")
        assert row["n_true"] == int((truth.abs() >= 0.5).sum())


def test_the_same_seed_gives_the_same_answer(data):
    def answers(seed: int) -> list[dict]:
        names = ["scvi-uniform", "scvi-means"]
        rows = rival_rows([(20, 0, Sides.of(data, 20, seed=seed))], names=names, seed=seed, max_epochs=1)
        return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_group_means_of_normalised_expression_are_resampled(data):
    """With expression that is known, draws have the mean and the spread of a bootstrap of the cells."""
    expression = data.counts.double() / data.counts.sum(1, keepdim=True)

    class Known:
        @staticmethod
        def get_normalized_expression(indices, n_samples, **settings):
            return expression[indices].expand(n_samples, -1, -1).numpy()

    a, b = (sample_cells(data.labels, group, None, seed=0) for group in (0, 1))
    with isolated(0):
        drawn = rivals._log2_means(Known, a.numpy())
    with isolated(0):
        answer = scvi_means(ScviContrast(Known, a, b, 0.5))
    with isolated(0):
        centred = scvi_means(ScviContrast(Known, a, b, 0.5), centred=True)
    mean, sd = expression[a].mean(0), expression[a].std(0) / len(a) ** 0.5
    assert drawn.shape == (rivals.BOOTSTRAP, 30)
    z = (drawn.exp2().mean(0) - mean) / (sd / rivals.BOOTSTRAP**0.5)
    assert z.abs().max() < 6  # 30 genes beyond six standard errors: below 1e-7
    torch.testing.assert_close(drawn.exp2().std(0), sd, rtol=0.25, atol=0)  # five relative errors of 1 / sqrt(1000)
    shift = answer.lfc - centred.lfc
    torch.testing.assert_close(shift, shift.mean().expand(30))
    assert ((answer.prob >= 0) & (answer.prob <= 1)).all()


def test_donors_are_the_replicates_of_tests_unless_their_name_says_cells():
    data = donors(0, n_cells=600, n_genes=40, donor_sd=0.05)
    names = ["edger-treat", "edger-treat, cells", "deseq2+lfc"]
    rows = rival_rows(contrasts(data, 0, 0)[:1], names=names)
    assert [row["model"] for row in rows] == names
    assert all(row["auprc"] > 0.85 for row in rows)
    cells = torch.cat([(data.labels == group).nonzero().flatten() for group in (0, 1)])
    assert data.donors is not None
    made = tests.Comparison(
        data.counts[cells].numpy(), data.labels[cells].numpy() == 0, 0.5, data.donors[cells].numpy()
    )
    answer = tests.rival_answers(made, ["edger-treat"])["edger-treat"]
    assert rows[0]["n_called_05"] == answer.called(0.05).sum()
    with pytest.raises(SettingError, match="at least 2 each are needed"):
        rival_rows(contrasts(donors(0, n_cells=100, n_genes=5, n_donors=(1, 2)), 0, 0), names=["edger-treat"])


def test_vaerdict_de_is_that_of_users_with_donors_as_its_samples():
    data = donors(0, n_cells=600, n_genes=40)
    sides = Sides.of(data, None, seed=0)
    answer = rivals.counts_answer(sides, 0.5)
    by_cells = rivals.counts_answer(Sides(data._replace(donors=None), sides.a, sides.b), 0.5)
    width, narrower = ((a["lfc_high"] - a["lfc_low"]).mean() for a in (answer, by_cells))
    assert width > 1.2 * narrower
    truth = data.lfc(0, 1)
    assert torch.corrcoef(torch.stack([answer["lfc_mean"], truth.double()]))[0, 1] > 0.9
    assert answer["seconds"] > 0


def test_sampled_cells_are_of_the_group():
    labels = torch.tensor([0, 1, 0, 1, 0, 0])
    assert sample_cells(labels, 0, None, seed=0).tolist() == [0, 2, 4, 5]
    sample = sample_cells(labels, 0, 2, seed=0)
    assert len(set(sample.tolist())) == 2
    assert set(sample.tolist()) <= {0, 2, 4, 5}
    with pytest.raises(SettingError, match="n_cells=3 exceeds the 2 cells of group 1"):
        sample_cells(labels, 1, 3, seed=0)


def test_isolated_code_leaves_no_trace():
    noisy = logging.getLogger("scvi")
    before, level = np.random.get_state(), noisy.level  # noqa: NPY002
    drawn, threads = [], torch.get_num_threads()
    for seed in (3, 3, 4):
        with isolated(seed):
            warnings.warn("unheard", stacklevel=1)
            torch.set_num_threads(threads + 1)
            assert noisy.level == logging.ERROR
            drawn.append((torch.rand(1).item(), np.random.rand()))  # noqa: NPY002
    assert drawn[0] == drawn[1] != drawn[2]
    after = np.random.get_state()  # noqa: NPY002
    assert before[2] == after[2]
    assert (before[1] == after[1]).all()
    assert noisy.level == level
    assert torch.get_num_threads() == threads
    with pytest.raises(UserWarning, match="heard again"):
        warnings.warn("heard again", stacklevel=1)


def test_unknown_rivals_and_missing_packages_are_named(data, monkeypatch):
    with pytest.raises(SettingError, match="no rival edgeR; there are scvi-uniform"):
        rival_rows(contrasts(data, 0, 0), names=["edgeR"])
    monkeypatch.setitem(tests.RIVALS, "edger+lfc", tests.RIVALS["edger+lfc"]._replace(package="no_such_package"))
    with pytest.raises(SettingError, match=r"needs no_such_package; install .*'vaerdict-paper\[rivals\]'"):
        rival_rows(contrasts(data, 0, 0), names=["edger+lfc"])


def test_the_benchmark_has_every_mode_the_model_stage_and_the_default_path():
    rows = de.run(quick=True)
    assert [row["method"] for row in rows] == [*de.MODES, *[de.MODEL_STAGE] * 4, de.COUNTS]
    ours = rows[len(de.MODES) : -1]
    assert [(row["between"], row["lfc_draws"], row["n_latents"]) for row in ours] == [
        (de.CENTRED_MEANS, 25, 2500),
        (de.CENTRED_MEANS, 100, 10_000),
        (de.MEANS, 25, 2500),
        (de.PAIRS, 100, 10_000),
    ]
    by_method = {row["method"]: row for row in rows[: len(de.MODES)]}
    importance = by_method["scvi-tools, importance"]
    assert importance["n_latents"] == 5100  # a hundred cells per group, 51 latents each
    assert ours[0]["khat"] < importance["khat"]
    assert ours[0]["ess_share"] > 2 * importance["ess_share"]
    assert all(row["seconds"] > 0 and 0 <= row["fdr_mae"] <= 100 for row in rows)
    assert rows[-1]["khat"] is None
