"""M1+M2 of counts against scipy's distributions and quadrature, with batches, in stacks, and as a classifier."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from checks import assert_within
from vaerdict import SelectiveClassifier
from vaerdict.core import DataError, SettingError, ShapeError
from vaerdict.diagnostics import Verdict
from vaerdict.inference.class_probabilities import class_posterior, refined
from vaerdict.likelihoods import CountParameters, NegativeBinomial
from vaerdict.models import M1M2, NegativeBinomialLikelihood, Recognition, recognition
from vaerdict.networks import stack
from vaerdict.noise import seeded
from vaerdict.selective import auroc
from vaerdict.training import SemiMember, SemiSettings, semi_recipe, train_semisupervised
from vaerdict.training.optimiser import FlatParameters

N, GENES, C, BATCHES = 6, 5, 2, 2


def make(seed: int = 0, d: int = 1, n_batches: int = BATCHES) -> tuple[M1M2, Recognition]:
    g = seeded(seed)
    counts = NegativeBinomialLikelihood()
    model = M1M2(GENES, C, d_z=d, d_u=1, hidden=(8,), likelihood=counts, n_batches=n_batches, generator=g)
    q = recognition(model, hidden=(8,), generator=g)
    with torch.no_grad():  # dispersions and classes that differ
        model.log_dispersion.copy_(torch.linspace(-1, 2, GENES))  # type: ignore[union-attr]
        model.between.of_class.weight.mul_(12)
        model.decoder.layers[-1].get_parameter("weight").mul_(4)
    return model.double(), q.double()


def cells(n: int = N, n_batches: int = BATCHES) -> Tensor:
    rate = torch.randn(n, GENES, dtype=torch.double, generator=seeded(2)).exp()
    counts = torch.poisson(4 * rate, generator=seeded(3)) + 1
    return torch.cat([counts, torch.eye(n_batches).double()[torch.arange(n) % 2]], -1) if n_batches else counts


def log_likelihood_by_scipy(model: M1M2, x: Tensor, z: Tensor) -> np.ndarray:
    """Log p(x | z) of counts and batches. Shapes: ``(n, p + n_batches), (K, n, d) -> (K, n)``."""
    counts, batch = x.tensor_split([GENES], -1)
    logits = model.decoder(torch.cat([z, batch.expand(len(z), -1, -1)], -1)).detach().numpy()
    mean = special.softmax(logits, -1) * counts.sum(-1, keepdim=True).numpy()
    r = np.exp(model.get_parameter("log_dispersion").detach().numpy())
    return stats.nbinom.logpmf(counts.numpy(), r, r / (r + mean)).sum(-1)


# ---------------------------------------------------------------------------------------------------- likelihood
def test_the_likelihood_is_negative_binomial_given_library_and_batch(generator):
    model, _ = make()
    x, z = cells(), torch.randn(7, N, 1, generator=generator, dtype=torch.double)
    expected = log_likelihood_by_scipy(model, x, z)
    np.testing.assert_allclose(model.log_likelihood(x, z).detach(), expected, rtol=1e-10)
    other = torch.cat([x[:, :GENES], x[:, GENES:].flip(-1)], -1)
    assert not np.isclose(model.log_likelihood(other, z).detach(), expected).any()  # batches swapped
    deeper = torch.cat([2 * x[:, :GENES], x[:, GENES:]], -1)
    np.testing.assert_allclose(model.log_likelihood(deeper, z).detach(), log_likelihood_by_scipy(model, deeper, z))


def test_a_cell_without_counts_says_nothing_about_its_latents(generator):
    model, _ = make(n_batches=0)
    z = torch.randn(7, N, 1, generator=generator, dtype=torch.double)
    torch.testing.assert_close(model.log_likelihood(torch.zeros(N, GENES).double(), z).abs().amax().item(), 0.0)


def test_the_encoder_sees_log_counts_and_batches():
    model, q = make()
    x = cells()
    seen = torch.cat([x[:, :GENES].log1p(), x[:, GENES:]], -1)
    torch.testing.assert_close(q.encoder.network(seen), q.encoder(x))  # type: ignore[operator]
    dropped = q.encoder(x, lambda h: 0.5 * h)
    assert not torch.allclose(dropped, q.encoder(x))
    assert q.z_given(x).loc.shape == (N, model.d_z)


def test_columns_must_be_those_of_the_model():
    model, _ = make()
    with pytest.raises(ShapeError, match="x has 5 columns, the model 5 pixels, 2 batches"):
        model.log_likelihood(cells()[:, :GENES], torch.zeros(1, N, 1).double())
    with pytest.raises(SettingError, match=r"image_shape=\(1, 5\) does not hold the model's 7 pixels"):
        recognition(model, image_shape=(1, 5), generator=seeded(0))


def test_batches_of_images_enter_their_decoder_too(generator):
    model = M1M2(GENES, C, d_z=1, d_u=1, hidden=(8,), n_batches=BATCHES, generator=generator)
    x, z = torch.cat([torch.zeros(2, GENES), torch.eye(2)], -1), torch.zeros(1, 2, 1)
    first, second = model.log_likelihood(x, z)[0]
    assert first != second


def test_stacks_agree_with_their_members(generator):
    pairs = [make(s) for s in range(2)]
    with torch.no_grad():
        pairs[1][0].get_parameter("log_dispersion").add_(1)
    model, q = stack([m for m, _ in pairs]), stack([r for _, r in pairs])
    x = torch.stack([cells(), cells().flip(0)])
    z = torch.randn(4, 2, N, 1, generator=generator, dtype=torch.double)
    for i, (one, r) in enumerate(pairs):
        torch.testing.assert_close(model.log_likelihood(x, z)[:, i], one.log_likelihood(x[i], z[:, i]))
        torch.testing.assert_close(q.z_given(x).loc[i], r.z_given(x[i]).loc)


# ------------------------------------------------------------------------------------------------------ training
def test_a_model_starts_at_moments_and_learns_dispersions_faster():
    counts = torch.poisson(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]).double().expand(4000, -1), generator=seeded(1))
    model, q = make(n_batches=0)
    model.start(counts)
    bias = model.decoder.layers[-1].get_parameter("bias")
    np.testing.assert_allclose(bias.detach().exp(), np.array([1, 2, 4, 8, 16]) / 31, rtol=0.05)
    assert bool((model.get_parameter("log_dispersion") > 1).all())  # Poisson counts are hardly dispersed
    gaussian = M1M2(GENES, C, hidden=(8,), generator=seeded(0))
    before = [p.clone() for p in gaussian.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, gaussian.start(counts).parameters(), strict=True))
    flat = FlatParameters(nn.ModuleList([model, q]), 1)
    assert flat.rates is not None
    assert (flat.rates == M1M2.rates["log_dispersion"]).sum() == GENES
    assert (flat.rates == 1).sum() == sum(p.numel() for p in flat.parameters) - GENES  # others only fill up


def test_training_learns_what_differs_between_batches():
    """Genes shift threefold between batches; swapped batches then cost evidence in nearly every cell."""
    X, y = simulated()
    batch = np.eye(2)[np.arange(len(X)) // 3 % 2]
    X = np.random.default_rng(1).poisson(X * np.where(batch[:, :1] == np.arange(X.shape[1]) % 2, 3.0, 1.0))
    x = torch.from_numpy(np.concatenate([X, batch], 1)).float()
    counts = NegativeBinomialLikelihood()
    model = M1M2(30, 3, d_z=2, d_u=1, hidden=(16,), likelihood=counts, n_batches=2, generator=seeded(0)).start(x)
    member = SemiMember(model, recognition(model, hidden=(16,), generator=seeded(1)), semi_recipe("VAE"), seed=0)
    labelled, settings = torch.arange(60), SemiSettings(n_particles=2, epochs=40, batch_size=40, lr=1e-2)
    (fit,) = train_semisupervised([member], x, labelled, torch.from_numpy(y[:60]), settings)
    assert fit.losses[-1] < fit.losses[0] - 10
    swapped = torch.cat([x[:, :30], x[:, 30:].flip(-1)], -1)
    with torch.no_grad():
        z = fit.recognition.z_given(x).loc.unsqueeze(0)
        gain = fit.model.log_likelihood(x, z) - fit.model.log_likelihood(swapped, z)
    assert (gain > 0).double().mean() > 0.95
    assert not torch.equal(fit.model.get_parameter("log_dispersion"), model.get_parameter("log_dispersion"))


# ------------------------------------------------------------------------------------------ p(class | counts)
def evidence_by_quadrature(model: M1M2, x: Tensor) -> np.ndarray:
    """Log p(x, c), with p(x | z) by scipy, by the trapezoidal rule over z and u. Shapes: ``-> (n, classes)``."""
    grid = torch.linspace(-7, 7, 401, dtype=torch.double)
    step = float(grid[1] - grid[0])
    wide = 3 * grid  # of z, whose prior is wider
    log_p_x = log_likelihood_by_scipy(model, x, wide.reshape(-1, 1, 1).expand(-1, len(x), 1))
    out = []
    for c in torch.eye(C, dtype=torch.double):
        log_prior = model.log_prior(wide.reshape(-1, 1, 1), c, grid.reshape(-1, 1)).detach().numpy()
        log_p_z = special.logsumexp(log_prior, 1) + np.log(step)
        out.append(special.logsumexp(log_p_x + log_p_z[:, None], 0) + np.log(3 * step))
    return np.stack(out, -1)


def simulated_by(model: M1M2, n: int) -> Tensor:
    """Counts of a library of 300, and batches, drawn from the model."""
    g, batch = seeded(4), cells(n)[:, GENES:]
    c, u, eps = torch.eye(C).double()[torch.arange(n) // 2 % C], *torch.randn(2, n, 1, generator=g).double()
    q = model.conditional(c, u)
    logits = model.decoder(torch.cat([q.loc + q.root.apply(eps), batch], -1)).detach()
    parameters = CountParameters(logits.log_softmax(-1) + np.log(300), model.get_parameter("log_dispersion").detach())
    return torch.cat([NegativeBinomial().sample(parameters, generator=g), batch], -1)


def test_class_evidence_and_probabilities_are_those_of_quadrature():
    """At a false-alarm rate of 1e-4; an error of 0.05 in the probabilities is found."""
    model, q = make()
    x, noise = simulated_by(model, 30), seeded(5)
    stages = {"REFINED": refined(model, q, improve=False, generator=noise)}
    answer = class_posterior(model, x, stages, 4000, generator=noise)
    log_p = evidence_by_quadrature(model, x)
    exact = torch.from_numpy(special.softmax(log_p, -1))
    assert answer.certified.double().mean() > 0.9
    assert float(exact[:, 0].std()) > 0.2  # classes differ
    assert_within(answer.prob[:, 0], exact[:, 0], answer.mcse[:, 0], rate=1e-4)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_within(answer.prob[:, 0] + 0.05, exact[:, 0], answer.mcse[:, 0], rate=1e-4)
    error = (1 / answer.ess).sqrt()
    assert_within(answer.log_evidence, torch.from_numpy(special.logsumexp(log_p, -1)), error, rate=1e-4)


# ---------------------------------------------------------------------------------------------------- classifier
def simulated(n: int = 240, n_genes: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """Overdispersed counts of three classes, at library sizes that differ tenfold."""
    draws, y = np.random.default_rng(0), np.arange(n) % 3
    profile = draws.gamma(2.0, 1.0, (3, n_genes))
    rate = profile[y] / profile.sum(1)[y, None] * np.exp(draws.uniform(np.log(30), np.log(300), (n, 1)))
    return draws.poisson(rate * draws.gamma(2.0, 0.5, (n, n_genes))).astype(float), y


def test_the_classifier_of_counts_is_as_good_as_logistic_regression(tmp_path):
    X, y = simulated()
    partly = np.where(np.arange(len(y)) < 60, y, -1)
    settings = {"objectives": ("VAE",), "epochs": 60, "latents": (3, 1), "hidden": (16,), "n_draws": 100}
    classifier = SelectiveClassifier(likelihood="counts", random_state=0, **settings).fit(X[:180], partly[:180])
    logistic = LogisticRegression(max_iter=1000).fit(np.log1p(X[:60]), y[:60])
    assert classifier.score(X[180:], y[180:]) >= logistic.score(np.log1p(X[180:]), y[180:]) - 0.05
    evidence = classifier.decide(X[180:200], evidence=True).evidence
    assert (evidence.verdict == Verdict.OK).mean() > 0.5
    copy = SelectiveClassifier.load(classifier.save(tmp_path / "counts"))
    np.testing.assert_array_equal(copy.predict_proba(X[180:]), classifier.predict_proba(X[180:]))


def test_novel_rows_of_counts_are_found_whatever_their_totals():
    X, y = simulated(300)
    labels = np.where((np.arange(300) < 150) & (y < 2), y, -1)  # no label of the third class
    settings = {"objectives": ("VAE",), "epochs": 5, "latents": (3, 1), "hidden": (16,), "n_draws": 10}
    classifier = SelectiveClassifier(likelihood="counts", random_state=0, **settings).fit(X[:200], labels[:200])
    found = classifier.novel(X[200:], fdr=0.2)
    assert auroc(torch.from_numpy(found.score), torch.from_numpy(y[200:] == 2)) > 0.9


@pytest.mark.parametrize("wrong", [-1.0, 0.5])
def test_counts_must_be_whole_and_not_negative(wrong):
    X, y = simulated(30)
    X[0, 0] = wrong
    with pytest.raises(DataError, match="negative or no whole numbers"):
        SelectiveClassifier(likelihood="counts").fit(X, y)
