"""The rivals: each finds planted changes, states what it is documented to state, and leaves no trace."""

from __future__ import annotations

import logging
import warnings

import numpy as np
import pytest
import torch
from scipy import stats

from vaerdict.core import SettingError
from vaerdict.datasets.genes import CountData, appendix, donors
from vaerdict.optional import isolated
from vaerdict_paper.benchmarks import de
from vaerdict_paper.experiments import rivals
from vaerdict_paper.experiments.genes_contrasts import sample_cells
from vaerdict_paper.experiments.rivals import RIVALS, RivalAnswer, RivalContrast, pseudobulk, rival_rows, wilcoxon

for package in ("scvi", "scanpy", "pydeseq2"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra `rivals`)")

METRICS = {"fdr_mae", "auprc", "fdp", "tpr", "fdp_05", "fdp_10", "fdp_20", "tpr_05", "tpr_10", "tpr_20"}


@pytest.fixture(scope="module")
def data() -> CountData:
    return appendix(0, n_cells=200, n_genes=30)


def contrast_of(data: CountData, n: int | None = None, delta: float = 0.5) -> RivalContrast:
    a, b = (sample_cells(data.labels, group, n, seed=0) for group in (0, 1))
    return RivalContrast(data.counts, a, b, delta, data.donors)


def test_one_row_per_rival_number_of_cells_and_truth(data):
    rows = rival_rows(data, n_cells=(None, 20), max_epochs=2)
    names = [name for name in RIVALS if name != "pseudobulk"]  # there are no donors
    keys = [(row["n_cells"], row["model"], row["estimand"]) for row in rows]
    assert keys == [(n, name, e) for n in ("all", 20) for name in names for e in ("centred", "proportion")]
    for row in rows:
        assert row.keys() >= METRICS
        assert row["proposal"] is None
        assert row["seconds"] > 0
        assert (row["seconds_train"] > 0) == row["model"].startswith("scvi")
    centred, proportion = rows[4:6]
    assert centred["n_true"] == int((data.lfc(0, 1).abs() >= 0.5).sum())
    assert proportion["n_true"] == int((data.lfc(0, 1, proportions=True).abs() >= 0.5).sum())


def test_the_same_seed_gives_the_same_answer(data):
    def answers(seed: int) -> list[dict]:
        rows = rival_rows(data, names=["scvi-uniform"], seed=seed, n_cells=(20,), max_epochs=1)
        return [{key: value for key, value in row.items() if not key.startswith("seconds")} for row in rows]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_wilcoxon_is_the_rank_sum_test_on_log_normalised_counts(data):
    with isolated(0):
        answer = wilcoxon(contrast := contrast_of(data))
    scaled = data.counts / data.counts.sum(1, keepdim=True)
    p = stats.ranksums(scaled[contrast.a].numpy(), scaled[contrast.b].numpy()).pvalue
    q = torch.as_tensor(stats.false_discovery_control(p))
    called = answer.lfc.abs() >= 0.5
    assert 0 < called.sum() < len(q)
    assert answer.q is not None
    torch.testing.assert_close(answer.q[called], q[called], rtol=0.05, atol=1e-12)
    assert (answer.q[~called] == 1).all()


def test_the_tests_find_large_changes_and_agree_in_direction():
    data = donors(0, n_cells=600, n_genes=40, donor_sd=0.05)
    truth = data.lfc(0, 1)
    with isolated(0):
        for answer in (wilcoxon(contrast_of(data)), pseudobulk(contrast_of(data))):
            assert torch.corrcoef(torch.stack([answer.lfc, truth.double()]))[0, 1] > 0.9
            assert answer.measure(truth, 0.5)["auprc"] > 0.85
    assert "pseudobulk" in {row["model"] for row in rival_rows(data, names=["pseudobulk"])}


def test_pseudobulk_sums_the_cells_of_each_donor_in_the_contrast():
    data = donors(0, n_cells=100, n_genes=5, n_donors=(2, 3))
    contrast = contrast_of(data, 10)
    counts, group = rivals._sums(contrast)
    assert group == ["a"] * group.count("a") + ["b"] * group.count("b")
    assert len(group) == len(set(data.donors[torch.cat([contrast.a, contrast.b])].tolist()))
    np.testing.assert_array_equal(counts.sum(0), data.counts[torch.cat([contrast.a, contrast.b])].sum(0).numpy())
    with pytest.raises(SettingError, match="pseudobulk needs replicates"):
        rivals._sums(contrast._replace(donors=torch.zeros(100)))


def test_an_adjusted_p_value_is_the_fdr_stated_of_the_genes_up_to_it():
    answer = RivalAnswer(torch.tensor([3.0, 2.0, 0.1, 1.0]), q=torch.tensor([0.01, 0.02, 0.9, 0.04]))
    row = answer.measure(torch.tensor([1.0, 1.0, 0.0, 0.0]), 0.5)
    assert row["n_called_05"] == 3
    assert row["fdp_05"] == pytest.approx(1 / 3)
    assert row["fdr_mae"] == pytest.approx(100 * (0.01 + 0.02 + (1 / 3 - 0.04) + (0.9 - 0.5)) / 4)


def test_probabilities_are_measured_as_probabilities():
    answer = RivalAnswer(torch.tensor([3.0, 1.0]), prob=torch.tensor([0.9, 0.5]))
    assert answer.measure(torch.tensor([1.0, 1.0]), 0.5)["fdr_mae"] == pytest.approx(100 * (0.1 + 0.3) / 2)


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
        rival_rows(data, names=["edgeR"])
    monkeypatch.setitem(RIVALS, "wilcoxon", RIVALS["wilcoxon"]._replace(packages=("no_such_package.sub",)))
    with pytest.raises(SettingError, match=r"needs no_such_package; install .*'vaerdict-paper\[rivals\]'"):
        rival_rows(data, names=["wilcoxon"])


def test_the_benchmark_compares_ours_with_the_importance_mode():
    rows = de.run(quick=True)
    theirs = ["scvi-uniform", "scvi-importance", "scvi-importance, 100 anchors"]
    assert [row["method"] for row in rows] == [*theirs, *["refined"] * 4]
    cases = [("centred", 25), ("centred", 100), ("proportion", 25), ("pair", 100)]
    assert [(row["estimand"], row["lfc_draws"]) for row in rows[3:]] == cases
    peer = rows[1]
    assert peer["ratio"] == 1
    for row in rows:
        assert row["ratio"] == pytest.approx(peer["cpu_s"] / row["cpu_s"])
        assert 0 <= row["fdr_mae"] <= 100
    assert peer["latents"] == 5100  # a hundred cells per group, 51 latents each
    assert [row["latents"] for row in rows[3:]] == [2500, 10_000, 2500, 10_000]
    assert rows[3]["khat"] < peer["khat"]
    assert rows[3]["ess_share"] > 2 * peer["ess_share"]
