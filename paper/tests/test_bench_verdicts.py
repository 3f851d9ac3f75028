"""Questions with known answers: the truths are checked by other means, the counts on planted answers.

Samplers are checked by Stein's identity E[g(z) d log p / dz + dg / dz] = 0, which does not see the weights of separated
modes; these are checked by quadrature in one and two dimensions.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import vaerdict as vd
from checks import assert_within
from vaerdict.inference.search import Scope
from vaerdict.noise import global_state_from
from vaerdict_paper import benchmarks
from vaerdict_paper.benchmarks import verdicts
from vaerdict_paper.benchmarks.verdicts import benign, curved, realistic, rivals, separated, truth
from vaerdict_paper.benchmarks.verdicts.questions import Target, generator_of, log_joint
from vaerdict_paper.benchmarks.verdicts.reference import reference
from vaerdict_paper.pages import bench as report

RATE = 1e-6
ANALYTIC = ("benign", "curved", "separated")


TARGETS = {t.name: t for t in verdicts.targets(0, ANALYTIC)}
target, NAMES = TARGETS.__getitem__, list(TARGETS)
SAMPLED = [name for name in NAMES if target(name).sample is not None and name != "box, 4-d"]  # the box has walls
BY_QUADRATURE = [name for name in NAMES if target(name).box]


def prior_draws(case: Target, *shape: int) -> Tensor:
    with global_state_from(vd.seeded(0)):
        return case.model.prior.sample(torch.Size(shape)).double()


# ------------------------------------------------------------------------------------------------------ truths
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("Gaussian")])
def test_means_of_conjugate_normals_are_those_of_the_closed_form(name):
    case = target(name)
    a, noise = case.model.parameters["a"], case.model.parameters["noise"]
    cov = torch.linalg.inv(torch.eye(a.shape[-1], dtype=a.dtype) + a.mT @ a / noise**2)
    loc = case.x @ a @ cov / noise**2
    mean, product, *_ = truth.questions(case)
    assert_within(mean.truth, loc[:, 0], mean.gold_error, rate=RATE)
    second = min(1, a.shape[-1] - 1)
    assert_within(product.truth, loc[:, 0] * loc[:, second] + cov[0, second], product.gold_error, rate=RATE)
    with pytest.raises(AssertionError, match="standard errors"):  # a tenth of the tolerance would be seen
        assert_within(mean.truth + mean.tolerance / 5, loc[:, 0], mean.gold_error, rate=RATE)


def stein_scores(case: Target, z: Tensor) -> Tensor:
    """Standard scores of Stein's identity for a smooth step along each latent. Shapes: ``-> (n_obs, d)``."""
    z = z.requires_grad_()
    (slope,) = torch.autograd.grad(case.model.log_joint(case.x, z).sum(), z)
    with torch.no_grad():
        step = torch.tanh((z - z.median(0).values) / (z - z.median(0).values).abs().median(0).values)
        width = (z - z.median(0).values).abs().median(0).values
        terms = slope * step + (1 - step.square()) / width
        return terms.mean(0) / (terms.std(0) / len(z) ** 0.5)


@pytest.mark.parametrize("name", SAMPLED)
def test_samplers_draw_from_the_density(name):
    case = target(name)
    assert case.sample is not None
    with torch.no_grad():
        z = case.sample(20_000, generator_of(1, name))
    scores = stein_scores(case, z)
    assert_within(scores, torch.zeros_like(scores), torch.ones_like(scores), rate=RATE)


def test_steins_identity_sees_a_scale_that_is_wrong_by_a_tenth():
    case = target("Gaussian, 5-d")
    assert case.sample is not None
    z = case.sample(20_000, generator_of(1, case.name))
    scores = stein_scores(case, z.mean(0) + 1.1 * (z - z.mean(0)))
    with pytest.raises(AssertionError, match="standard errors"):
        assert_within(scores, torch.zeros_like(scores), torch.ones_like(scores), rate=RATE)


SMALL = {
    "two modes, 1-d": (lambda: target("two modes, 1-d"), ((-9, 9),)),
    "spike on a slab, 1-d": (lambda: target("spike on a slab, 1-d"), ((-8, 8),)),
    "three modes, 2-d": (lambda: target("three modes, 2-d"), ((-9, 9),) * 2),
    "modes by sign": (lambda: separated.signs("modes by sign", 0, 2), ((-8, 8),) * 2),
    "hierarchical scale": (lambda: curved.hierarchy("hierarchical scale", 0, 1), ((-12, 12), (-12, 12))),
}


@pytest.mark.parametrize("name", SMALL)
def test_samplers_agree_with_quadrature(name):
    make, box = SMALL[name]
    case = make()
    questions = truth.questions(case)
    for i in range(2):
        z, log_w = truth.grid(replace(case, sample=None, box=box), i, 1500 if len(box) == 2 else 100_000)
        exact = torch.stack([log_w.softmax(0) @ q.f(z) for q in questions])
        drawn, error = (torch.stack([t[i] for t in column]) for column in list(zip(*questions, strict=True))[3:])
        resolution = torch.tensor([0, 0, 2e-4, 2e-4], dtype=torch.float64)  # of indicators on the grid
        assert_within(drawn, exact, error + resolution, rate=RATE)


@pytest.mark.parametrize(
    "name", ["ring, 2-d", "half-space, 2-d", "ReLU, 2-d", "banana, 2-d", "conflicting measurements, 1-d"]
)
def test_quadrature_agrees_with_brute_force(name):
    case, i = target(name), 1
    z = prior_draws(case, 2_000_000)
    log_w = log_joint(case.model, case.x[i : i + 1], z) - case.model.prior.log_prob(z)
    weights = log_w.softmax(0)
    for question in truth.questions(case):
        values = question.f(z)
        mean = weights @ values
        error = (weights.square() @ (values - mean).square()).sqrt()
        assert_within(mean, question.truth[i], error + question.gold_error[i], rate=RATE)
        assert error < question.tolerance / 4  # the check can fail


def test_draws_in_a_box_have_the_moments_of_truncated_normals():
    stats = pytest.importorskip("scipy.stats")
    case = target("box, 4-d")
    mean = truth.questions(case)[0]
    x, noise = case.x[:, 0].numpy(), case.model.parameters["noise"]
    exact = torch.from_numpy(stats.truncnorm((-1 - x) / noise, (1 - x) / noise, x, noise).mean())
    assert_within(mean.truth, exact, mean.gold_error, rate=RATE)
    assert case.model.log_joint(case.x, torch.full((1, 6, 4), 1.5).double()).isneginf().all()


def check_reference(case: Target, exact: Tensor) -> None:
    def log_density(z: Tensor) -> Tensor:
        return log_joint(case.model, case.x[:1], z)

    z, log_w = reference(log_density, len(exact), generator_of(0, "test"), 50_000)
    weights = log_w.softmax(0)
    mean = weights @ z
    error = (weights.square() @ (z - mean).square()).sqrt()
    assert_within(mean, exact, error, rate=RATE)
    assert 1 / weights.square().sum() > 0.3 * len(z)
    assert vd.diagnostics.khat(log_w[:, None]).item() < 0.5


def test_the_reference_sampler_finds_a_conjugate_normal():
    case = target("Gaussian, 5-d")
    assert case.sample is not None
    check_reference(case, case.sample(1_000_000, generator_of(3, "test"))[:, 0].mean(0))


def test_the_reference_sampler_finds_all_modes_with_their_weights():
    model = benign.Likelihood(benign.normal_prior(3), benign.moduli, {"noise": 0.2})
    check_reference(Target("", "", model, torch.full((1, 3), 1.3).double()), torch.zeros(3).double())


@pytest.mark.parametrize("name", ["Gaussian, 1-d", "four-fold symmetry, 2-d", "warped normal, 8-d", "five modes, 5-d"])
def test_truths_are_precise_and_depend_on_the_observation(name):
    for question in truth.questions(target(name)):
        assert (question.gold_error < question.tolerance / 10).all()
        if name != "four-fold symmetry, 2-d" or question.name != "mean":  # that mean is zero
            assert question.truth.max() - question.truth.min() > 3 * question.gold_error.max()
        if question.name == "probability":
            assert question.truth.mean() == pytest.approx(truth.PROBABILITY, abs=0.01)
        if question.name == "tail":
            assert question.truth.mean() == pytest.approx(truth.TAIL, abs=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_all_truths_are_precise(seed):
    for case in verdicts.targets(seed):
        for question in truth.questions(case):
            assert (question.gold_error < question.tolerance / 10).all(), (case.name, question.name)


def test_seeds_draw_other_targets_with_the_same_names():
    first, second = verdicts.targets(0, ANALYTIC), verdicts.targets(1, ANALYTIC)
    assert [t.name for t in first] == [t.name for t in second]
    assert len(NAMES) == len(set(NAMES)) >= 24
    assert not any(torch.equal(a.x, b.x) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a.x, b.x) for a, b in zip(first, verdicts.targets(0, ANALYTIC), strict=True))
    dims = {t.model.prior.event_shape[0] for t in first}
    assert min(dims) == 1
    assert max(dims) == 30


def test_a_trained_model_is_asked_about_in_double_precision(monkeypatch):
    monkeypatch.setattr(realistic, "_N_TRAIN", 200)
    case = realistic.trained("small", 0, "bernoulli", 2, 10, torch.tanh, encoder=True)
    assert case.x.dtype == torch.float64
    assert case.proposals is not None
    (z, log_w), (rough, log_v) = truth.grid(case, 0, 500), truth.grid(case, 0, 350)
    assert (log_w.softmax(0) @ z).sub(log_v.softmax(0) @ rough).abs().max() < 1e-6


# ------------------------------------------------------------------------------------------------------ counts
def answers_of(monkeypatch, error: float, verdict: int = 0) -> list[verdicts.Record]:
    """The records if every answer is `error` times its tolerance off and states a third of the tolerance as error."""
    asked = {q.f: q for q in truth.questions(target("box, 4-d"))}
    monkeypatch.setattr(verdicts, "questions", lambda case: list(asked.values()))

    def expect(model, x, f, proposals, *, n, tolerance, seed):
        off = asked[f].truth + error * tolerance
        ess, n_obs = torch.ones(len(x)), len(x)
        verdict_of = torch.full((n_obs,), verdict)
        return vd.Answer(
            value=off,
            mcse=torch.full_like(off, tolerance / 3),
            ess=ess,
            khat=ess,
            verdict=verdict_of,
            stage=["Q"] * n_obs,
            cost=7 * ess,
            reason=["r"] * n_obs,
            draws=ess.long(),
            inside=ess,
            scope=Scope(*torch.zeros(5, n_obs)),
        )

    monkeypatch.setattr(vd, "expect", expect)
    return verdicts.answers(0, ["benign"], ["box, 4-d"])


@pytest.mark.parametrize(("error", "beyond", "wrong"), [(0.9, 0, 0), (1.1, 24, 0), (1.5, 24, 24)])
def test_false_answers_are_counted(monkeypatch, error, beyond, wrong):
    row = verdicts.summary(answers_of(monkeypatch, error))
    assert (row["questions"], row["answered"], row["beyond"], row["wrong"]) == (24, 24, beyond, wrong)
    assert row["rms_z"] == pytest.approx(3 * error, rel=0.05)
    assert row["evaluations"] == 7


def test_refusals_and_cautions_are_not_answers(monkeypatch):
    for verdict, name in ((1, "caution"), (2, "refused")):
        row = verdicts.summary(answers_of(monkeypatch, 5.0, verdict))
        assert (row["answered"], row["wrong"], row["beyond"], row[name]) == (0, 0, 0, 24)
        assert row["rms_z"] is None


def test_an_answer_that_is_not_a_number_is_wrong(monkeypatch):
    row = verdicts.summary(answers_of(monkeypatch, float("nan")))
    assert (row["wrong"], row["beyond"]) == (24, 24)


def test_the_library_answers_a_target_and_the_page_shows_it(tmp_path):
    result = benchmarks.run("verdicts", quick=True)
    rows = {(row["group"], row["target"]): row for row in result["rows"]}
    assert set(rows) == {
        ("benign", "Gaussian, 1-d"),
        ("benign", "box, 4-d"),
        ("benign", "all"),
        ("defaults", "conjugate normal, 1-d"),
        ("defaults", "all"),
    }
    assert rows["benign", "all"]["questions"] == 48
    assert rows["benign", "all"]["answered"] > 0
    shown = report.document([result])
    assert any("benign posteriors" in sentence and "of 48 questions" in sentence for sentence in shown.summary)
    assert "box, 4-d" in report.text(result)


# ------------------------------------------------------------------------------------------------------ rivals
def test_densities_in_jax_are_those_in_torch():
    jax = pytest.importorskip("jax")
    cases = [target(name) for name in rivals.COMPARED if name in NAMES]
    decoder = realistic.SmallVAE("bernoulli", 7, 4, torch.tanh, generator=vd.seeded(0)).double().requires_grad_(False)
    cases.append(Target("", "VAE", decoder, torch.ones(6, 7).double()))
    for case in cases:
        z = prior_draws(case, 20, 6)
        ours = case.model.log_joint(case.x, z)
        with rivals._double_precision():
            theirs = jax.vmap(jax.vmap(rivals.jax_log_joint(case), (0, 0)), (None, 0))(case.x.numpy(), z.numpy())
            prior = jax.vmap(jax.vmap(rivals.jax_log_prior(case.model.prior)))(z.numpy())
        for a, b in ((ours, theirs), (case.model.prior.log_prob(z), prior)):
            difference = a - torch.tensor(b.tolist(), dtype=torch.float64)
            assert (difference - difference[0, 0]).abs().max() < 1e-9, case.name


def test_uniform_numbers_become_draws_from_the_prior():
    stats = pytest.importorskip("scipy.stats")
    for name in ("funnel, 5-d", "Student-t, 3 df, 3-d", "banana, 2-d"):
        prior = target(name).model.prior
        d = prior.event_shape[0]
        u = torch.rand(2000, d, dtype=torch.float64, generator=vd.seeded(2))
        ours = torch.tensor([rivals.prior_transform(prior, row).tolist() for row in u.numpy()])
        direct = prior_draws(target(name), 2000)
        for j in range(d):
            assert stats.ks_2samp(ours[:, j].numpy(), direct[:, j].numpy()).pvalue > RATE


def test_the_verdict_of_chains_is_by_rhat_ess_and_divergences():
    pytest.importorskip("arviz")
    z = torch.randn(4000, 2, generator=vd.seeded(0), dtype=torch.float64)

    def mean(z: Tensor) -> Tensor:
        return z[..., 0]

    value, error, reason = rivals.judged(rivals.Draws(z, None, 1), mean)
    assert abs(value) < 5 * error
    assert error == pytest.approx(4000**-0.5, rel=0.2)
    assert not reason
    assert rivals.judged(rivals.Draws(z, None, 1, divergences=3), mean)[2] == "3 divergences"
    apart = z + torch.arange(4).repeat_interleave(1000)[:, None]
    assert "R-hat" in rivals.judged(rivals.Draws(apart, None, 1), mean)[2]
    never = rivals.judged(rivals.Draws(z, None, 1), lambda z: (z[..., 0] > 100).double())
    assert never[0] == 0 < never[1]


def test_weighted_draws_have_an_error_and_no_verdict():
    z = torch.randn(50_000, 1, generator=vd.seeded(0), dtype=torch.float64)
    value, error, reason = rivals.judged(rivals.Draws(z, 0.5 * z[:, 0], 1), lambda z: z[..., 0])
    assert abs(value - 0.5) < 5 * error < 0.05
    assert not reason


def test_a_run_without_an_end_is_refused():
    with pytest.raises(TimeoutError), rivals._limited(0.05):
        sum(1 for _ in itertools.count())
    value, _, reason = rivals.judged(rivals.Draws(torch.zeros(0, 3), None, 10), lambda z: z[..., 0])
    assert value != value
    assert reason == "no result in 300 s"


@pytest.mark.slow
def test_rivals_answer_a_benign_target():
    pytest.importorskip("numpyro")
    pytest.importorskip("dynesty")
    found = verdicts.rival_answers(0, ["ring, 2-d"])
    for method in ("vaerdict", *rivals.METHODS):
        row = verdicts.summary([r for r in found if r["method"] == method])
        assert row["questions"] == 4 * rivals.N_COMPARED
        assert row["evaluations"] > 100
        assert row["wrong"] <= row["answered"] / 4
