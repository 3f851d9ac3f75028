"""Other tests of differential expression: direction, questions, replicates, genes without counts, and errors."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse, stats

from vaerdict.core import DataError, SettingError
from vaerdict.de import rivals
from vaerdict.de.rivals import ANY_CHANGE, BEYOND_DELTA, RIVALS, Comparison, RivalAnswer, rival_answers

for package in ("scanpy", "pydeseq2", "edgepython"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra `rivals`)")

TRUTH = np.concatenate([[2.0] * 5, [-2.0] * 5, np.zeros(90)])
FIRST = np.arange(80) < 40


def drawn(lfc: np.ndarray, first: np.ndarray, mean: float = 8.0, *, shape: float = 5.0, seed: int = 0) -> np.ndarray:
    """Negative binomial counts ``(cells, genes)`` with log2 fold changes `lfc` in the cells that are `first`."""
    rng = np.random.default_rng(seed)
    rate = mean * np.exp2(np.outer(first, lfc)) * rng.gamma(shape, 1 / shape, (len(first), len(lfc)))
    return rng.poisson(rate)


@pytest.fixture(scope="module")
def answers() -> dict[str, RivalAnswer]:
    return rival_answers(Comparison(sparse.csr_matrix(drawn(TRUTH, FIRST)), FIRST))


@pytest.mark.parametrize("name", RIVALS)
def test_large_changes_are_called_with_their_direction(answers, name):
    # a true change is about ten standard errors, so that a miss has a probability below 1e-9
    answer = answers[name]
    called = answer.called(0.05)
    assert called[:10].all()
    assert called[10:].sum() <= 8  # nine of 90 unchanged genes with p < 0.05 * 19 / 100: a probability below 1e-6
    assert (np.sign(answer.lfc[:10]) == np.sign(TRUTH[:10])).all()
    assert np.abs(answer.lfc - TRUTH)[:10].mean() < 0.6
    assert set(answer.ranking()[:10]) == set(range(10))
    assert answer.seconds > 0


def test_overwhelming_evidence_has_a_p_value():
    """edgepython's threshold test is NaN where its p-values underflow: the surest genes would never be called."""
    lfc, first = np.linspace(-2.5, 2.5, 60), np.arange(1000) < 500
    counts = drawn(lfc, first, mean=50.0, shape=20.0)
    answer = rival_answers(Comparison(counts, first), ["edger-treat"])["edger-treat"]
    assert np.isfinite(answer.p).all()
    # more than ten standard errors from delta, whose size is at most .025, and from an error of normalisation
    assert answer.called(0.05)[np.abs(lfc) > 0.9].all()
    assert not answer.called(0.05)[np.abs(lfc) < 0.1].any()


def test_swapped_groups_swap_the_sign_and_nothing_else(answers):
    names = ["wilcoxon", "ttest", "deseq2", "edger", "edger-treat"]
    swapped = rival_answers(Comparison(drawn(TRUTH, FIRST), ~FIRST), names)
    for name in names:
        np.testing.assert_allclose(swapped[name].lfc, -answers[name].lfc, atol=0.02)
        np.testing.assert_allclose(swapped[name].p, answers[name].p, rtol=0.05, atol=1e-6)


@pytest.mark.parametrize("zeroed", [0.0, 0.7])
def test_the_tests_of_scanpy_are_those_of_scipy(zeroed):
    """Of sparse counts too, most of whose ranks are tied."""
    counts = drawn(TRUTH, FIRST) * (np.random.default_rng(2).uniform(size=(len(FIRST), len(TRUTH))) >= zeroed)
    answers = rival_answers(Comparison(counts, FIRST), ["wilcoxon", "ttest"])
    totals = counts.sum(1, keepdims=True)
    scaled = np.log1p(counts * np.median(totals) / totals)
    ranks = stats.mannwhitneyu(scaled[FIRST], scaled[~FIRST], method="asymptotic", use_continuity=False).pvalue
    welch = stats.ttest_ind(scaled[FIRST], scaled[~FIRST], equal_var=False).pvalue
    np.testing.assert_allclose(answers["wilcoxon"].p, ranks, rtol=1e-3)
    np.testing.assert_allclose(answers["ttest"].p, welch, rtol=1e-3)
    np.testing.assert_allclose(answers["ttest"].q, stats.false_discovery_control(welch), rtol=1e-3)


@pytest.mark.parametrize("zeroed", [0.0, 0.5])
def test_fold_changes_of_cells_are_those_of_means_also_where_counts_are_missing(zeroed):
    counts = drawn(TRUTH, FIRST) * (np.random.default_rng(1).uniform(size=(len(FIRST), len(TRUTH))) >= zeroed)
    totals = counts.sum(1, keepdims=True)
    shares = np.divide(counts, totals, where=totals > 0, out=np.zeros(counts.shape))[totals.ravel() > 0]
    first = FIRST[totals.ravel() > 0]
    lfc = rival_answers(Comparison(counts, FIRST), ["wilcoxon"])["wilcoxon"].lfc
    both = (shares[first].mean(0) > 0) & (shares[~first].mean(0) > 0)
    expected = np.log2(shares[first].mean(0)[both] / shares[~first].mean(0)[both])
    np.testing.assert_allclose(lfc[both], expected, atol=1e-4)


def test_a_small_certain_change_is_a_change_but_not_one_beyond_delta():
    lfc = np.concatenate([[0.3] * 10, [-0.3] * 10, np.zeros(80)])
    first = np.arange(600) < 300
    answers = rival_answers(Comparison(drawn(lfc, first, 20.0, shape=20.0), first, delta=0.6))
    for name, answer in answers.items():
        found = answer.called(0.05)[:20].sum()
        assert found == (20 if RIVALS[name].question == ANY_CHANGE else 0), name
    assert {RIVALS[name].question for name in answers} == {ANY_CHANGE, BEYOND_DELTA}


def test_a_filter_on_the_fold_change_leaves_genes_out_and_keeps_their_order(answers):
    plain, filtered = answers["edger"], answers["edger+lfc"]
    np.testing.assert_array_equal(np.isnan(filtered.q), np.abs(plain.lfc) < 0.5)
    np.testing.assert_array_equal(filtered.p, plain.p)
    answer = RivalAnswer(
        np.array([0.1, 1.0, 2.0, np.nan]), np.array([0.0, 0.2, 0.2, np.nan]), np.array([np.nan, 0.2, 0.2, np.nan])
    )
    assert answer.ranking().tolist() == [2, 1, 0, 3]
    assert answer.called(0.2).tolist() == [False, True, True, False]


def test_genes_and_cells_without_counts_are_not_tested(answers):
    counts = drawn(TRUTH, FIRST)
    wider = np.insert(np.vstack([counts, np.zeros((1, 100), int)]), 50, 0, axis=1)
    for name, answer in rival_answers(Comparison(wider, np.append(FIRST, True))).items():
        assert np.isnan([answer.lfc[50], answer.p[50], answer.q[50]]).all()
        np.testing.assert_allclose(np.delete(answer.p, 50), answers[name].p)


def test_samples_are_summed_and_are_the_replicates():
    counts = drawn(TRUTH, FIRST)
    samples = np.array([f"s{i % 4 + 4 * int(first)}" for i, first in enumerate(FIRST)])
    made = rivals.replicates(Comparison(counts, FIRST, samples=samples, totals=2 * counts.sum(1)))
    assert made.first.tolist() == [False] * 4 + [True] * 4
    np.testing.assert_array_equal(made.counts.toarray()[5], counts[samples == "s5"].sum(0))
    np.testing.assert_array_equal(made.totals, 2 * made.counts.toarray().sum(1))
    assert made.block is None
    for name, answer in rival_answers(Comparison(counts, FIRST, samples=samples)).items():
        called = answer.called(0.05)
        assert called[:10].all() == (not name.startswith("wilcoxon"))  # its least p of 4 against 4 is 0.03
        assert (np.sign(answer.lfc[:10]) == np.sign(TRUTH[:10])).all()


def test_pairs_are_in_the_design():
    rng = np.random.default_rng(1)
    patient = np.repeat(np.arange(5), 40)
    first = np.arange(200) % 2 == 0
    lfc = np.concatenate([[1.5, -1.5] * 4, np.zeros(92)])
    patients = rng.lognormal(0, 1.5, (5, 100))  # far more variety between patients than the change
    counts = rng.poisson(5 * np.exp2(np.outer(first, lfc)) * patients[patient])
    names = ["deseq2", "edger", "edger-treat"]
    apart = np.char.add(patient.astype(str), first.astype(str))
    paired, crossed, unpaired = (
        rival_answers(Comparison(counts, first, samples=samples, pairs=pairs), names)
        for samples, pairs in ((apart, patient), (patient, None), (apart, None))
    )
    for name in names:
        assert paired[name].called(0.05)[:8].all()
        assert not unpaired[name].called(0.05)[:8].any()
        np.testing.assert_allclose(crossed[name].p, paired[name].p, atol=1e-12)  # samples of both groups are pairs


def test_errors_are_one_line_that_says_what_to_do(monkeypatch):
    counts, names = drawn(TRUTH, FIRST), np.where(FIRST, "one", np.arange(80).astype(str))
    with pytest.raises(SettingError, match=r"no rival limma; there are wilcoxon, ttest, deseq2, edger, "):
        rival_answers(Comparison(counts, FIRST), ["edger", "limma"])
    with pytest.raises(SettingError, match="the groups have 1 and 40 samples with counts; at least 2 each"):
        rival_answers(Comparison(counts, FIRST, samples=names), ["edger"])
    with pytest.raises(DataError, match="the pairs leave nothing to compare cells by"):
        rival_answers(Comparison(counts, FIRST, pairs=FIRST), ["edger"])
    monkeypatch.setitem(RIVALS, "edger", RIVALS["edger"]._replace(package="no_such_package"))
    with pytest.raises(
        SettingError, match=r"needs no_such_package; install it with `pip install 'vaerdict\[rivals\]'`"
    ):
        rivals.check_rivals(["edger"])
