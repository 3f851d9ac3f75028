"""Models of all shapes against exact answers: conditions, conditional priors, several latents, discrete latents."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Gamma, Independent, MultivariateNormal, Normal, OneHotCategorical, Uniform

import vaerdict as vd
from checks import assert_within
from vaerdict.core import DataError, SettingError, ShapeError
from vaerdict.inference.target import Target
from vaerdict.models import Enumerated
from vaerdict.noise import KeyedNoise, row_keys

DOUBLE = torch.double
RATE = 1e-6  # false-alarm rate of each comparison


def normals(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=vd.seeded(seed), dtype=DOUBLE)


class Pair(NamedTuple):
    image: Tensor
    condition: Tensor


class Conditional:
    """z ~ N(c, 1), y ~ N(z, 0.5^2 I) seen as an image of 2 x 2 pixels: a conditional prior, in closed form."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def parts(self, x) -> tuple[Tensor, Tensor]:
        return (x["image"], x["condition"]) if self.kind is dict else tuple(x)

    def prior(self, x) -> Independent:
        return Independent(Normal(self.parts(x)[1].unsqueeze(-1), torch.ones(1, dtype=DOUBLE)), 1)

    def log_joint(self, x, z: Tensor) -> Tensor:
        image, _ = self.parts(x)
        assert image.dim() == 4
        residual = (image - z[..., None, None]) / 0.5
        return -0.5 * residual.square().sum((-3, -2, -1)) + self.prior(x).log_prob(z)

    def exact(self, x) -> tuple[Tensor, Tensor]:
        image, condition = self.parts(x)
        precision = 1 + image[0].numel() / 0.25
        return (condition + image.sum((1, 2, 3)) / 0.25) / precision, torch.tensor(precision).rsqrt()


def observed(kind: type, n: int = 40):
    condition = normals(n, seed=0)
    image = (condition + normals(n, seed=1))[:, None, None, None] + 0.5 * normals(n, 1, 2, 2, seed=2)
    return (
        {"image": image, "condition": condition}
        if kind is dict
        else kind((image, condition))
        if kind is tuple
        else Pair(image, condition)
    )


@pytest.mark.parametrize("kind", [tuple, dict, Pair])
def test_observations_may_be_structures_and_priors_conditional(kind):
    model, x = Conditional(kind), observed(kind)
    mean, sd = model.exact(x)
    answer = vd.expect(model, x, lambda z: z[..., 0], n=500, tolerance=0.05, seed=0)
    assert (answer.verdict == vd.Verdict.OK).all()
    assert_within(answer.value, mean, answer.mcse, rate=RATE)
    particles = vd.posterior(model, x, vd.Prior(model.prior), 4000, seed=0)
    assert_within(particles.expect(lambda z: z[..., 0]).value, mean, 1.2 * sd / particles.ess.sqrt(), rate=RATE)


@pytest.mark.parametrize("kind", [tuple, dict, Pair])
def test_a_query_may_use_the_observation(kind):
    model, x = Conditional(kind), observed(kind)
    mean, sd = model.exact(x)

    def exceeds(z: Tensor, rows) -> Tensor:
        return (z[..., 0] > model.parts(rows)[1]).double()

    exact = torch.special.ndtr((mean - model.parts(x)[1]) / sd)
    # tolerances at which some observations settle in the first stage and others do not
    answer = vd.expect(model, x, exceeds, n=256, tolerance=0.03, seed=0)
    assert len(set(answer.draws.tolist())) > 1
    assert_within(answer.value[answer.mcse > 0], exact[answer.mcse > 0], answer.mcse[answer.mcse > 0], rate=RATE)
    particles = vd.posterior(model, x, {}, 256, tolerance=0.03, query=exceeds, seed=0)
    estimate = particles.expect(exceeds)
    assert_within(estimate.value, exact, estimate.mcse.clamp_min(1e-3), rate=RATE)
    decision = particles.decide(lambda z, rows: torch.stack([exceeds(z, rows), 1 - exceeds(z, rows)], -1))
    sure = decision.verdict == vd.Verdict.OK
    assert sure.any()
    assert torch.equal(decision.action[sure], (exact[sure] > 0.5).long())


# --------------------------------------------------------------------------------------------------- several latents
class TwoLevels:
    """b ~ N(0, I_2), a ~ N(B b, I_3), x ~ N(a, 0.7^2 I_3): the joint posterior is normal."""

    matrix = normals(3, 2, seed=3)

    def __init__(self) -> None:
        zeros, ones = torch.zeros(2, dtype=DOUBLE), torch.ones(2, dtype=DOUBLE)
        self.prior = vd.JointPrior(b=Independent(Normal(zeros, ones), 1), a=lambda b: Normal(b @ self.matrix.mT, 1.0))

    def log_joint(self, x: Tensor, z) -> Tensor:
        return Normal(z.a, 0.7).log_prob(x).sum(-1) + self.prior.log_prob(z, x)

    def exact(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of (b, a) and covariance."""
        m, eye2, eye3 = self.matrix, torch.eye(2, dtype=DOUBLE), torch.eye(3, dtype=DOUBLE)
        precision = torch.cat([torch.cat([eye2 + m.mT @ m, -m.mT], 1), torch.cat([-m, eye3 + eye3 / 0.49], 1)])
        covariance = torch.linalg.inv(precision)
        return torch.cat([torch.zeros(len(x), 2, dtype=DOUBLE), x / 0.49], 1) @ covariance, covariance


class Encoder:
    """The exact posterior of two levels, level by level: q(b | x) q(a | b, x), widened."""

    def __init__(self, model: TwoLevels) -> None:
        self.model = model

    def _joint(self, x: Tensor) -> MultivariateNormal:
        mean, covariance = self.model.exact(x)
        return MultivariateNormal(mean, 1.2 * covariance)

    def draw(self, x: Tensor, k: int, *, generator) -> vd.Draws:
        q = self._joint(x)
        eps = torch.randn(k, len(x), 5, generator=generator, dtype=DOUBLE)  # as a user would
        u = q.loc + eps @ q.scale_tril[0].mT
        z = self.model.prior.Latent(b=u[..., :2], a=u[..., 2:])
        return vd.Draws(z, q.log_prob(u))

    def log_prob(self, z, x: Tensor) -> Tensor:
        return self._joint(x).log_prob(torch.cat([z.b, z.a], -1))


def test_several_latents_have_their_joint_posterior():
    model, x = TwoLevels(), 2 * normals(30, 3, seed=4)
    mean, covariance = model.exact(x)
    for proposals in (None, Encoder(model)):
        answer = vd.expect(model, x, lambda z: torch.cat([z.b, z.a], -1), proposals, 500, tolerance=0.1, seed=0)
        assert (answer.verdict == vd.Verdict.OK).all()
        assert_within(answer.value, mean, answer.mcse, rate=RATE)
    particles = vd.posterior(model, x, Encoder(model), 2000, seed=0)
    product = particles.expect(lambda z: (z.b[..., 0] - mean[:, 0]) * (z.a[..., 0] - mean[:, 2]))
    assert_within(product.value, covariance[0, 2].expand(30), product.mcse, rate=RATE)
    escalated = vd.posterior(model, x, {}, 500, tolerance=0.2, seed=0)
    assert escalated.z.a.shape[1:] == (30, 3)
    assert_within(escalated.expect(lambda z: z.a).value, mean[:, 2:], escalated.expect(lambda z: z.a).mcse, rate=RATE)


def test_a_joint_prior_may_have_bounded_latents():
    """Scale s ~ Gamma(2, 1) and z ~ N(0, 1) given x ~ Poisson(s) + a normal coordinate: both are conjugate."""

    class Mixed:
        prior = vd.JointPrior(
            s=Independent(Gamma(torch.full((1,), 2.0, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)), 1),
            z=Normal(torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)),
        )

        def log_joint(self, x: Tensor, latent) -> Tensor:
            log_count = torch.distributions.Poisson(latent.s[..., 0]).log_prob(x[..., 0])
            return log_count + Normal(latent.z[..., 0], 1.0).log_prob(x[..., 1]) + self.prior.log_prob(latent, x)

    x = torch.tensor([[0.0, 1.0], [4.0, -2.0], [9.0, 0.5]], dtype=DOUBLE)
    answer = vd.expect(Mixed(), x, lambda t: torch.cat([t.s, t.z], -1), n=1000, tolerance=0.1, seed=0)
    exact = torch.stack([(2 + x[:, 0]) / 2, x[:, 1] / 2], -1)
    assert (answer.verdict == vd.Verdict.OK).all()
    assert_within(answer.value, exact, answer.mcse, rate=RATE)


# -------------------------------------------------------------------------------------------------- discrete latents
class Components:
    """x ~ N(m_c + z, 0.5^2), c in three classes, z ~ N(0, s_c^2): class and latent in closed form."""

    loc, scale = torch.tensor([-2.0, 0.0, 2.5], dtype=DOUBLE), torch.tensor([0.3, 1.0, 0.6], dtype=DOUBLE)
    share = torch.tensor([0.2, 0.5, 0.3], dtype=DOUBLE)

    def __init__(self, one_hot: bool) -> None:
        self.one_hot = one_hot
        c = OneHotCategorical(self.share) if one_hot else Categorical(self.share)
        self.prior = vd.JointPrior(c=c, z=lambda c: Normal(0 * self.of(self.scale, c), self.of(self.scale, c)))

    def of(self, value: Tensor, c: Tensor) -> Tensor:
        """The value of the class, as a vector of length one."""
        return (c.double() @ value if self.one_hot else value[c]).unsqueeze(-1)

    def log_joint(self, x: Tensor, t) -> Tensor:
        return Normal(self.of(self.loc, t.c) + t.z, 0.5).log_prob(x).sum(-1) + self.prior.log_prob(t, x)

    def exact(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """P(c | x) and E[z | x]."""
        spread = (self.scale.square() + 0.25).sqrt()
        prob = (self.share.log() + Normal(self.loc, spread).log_prob(x)).softmax(-1)
        return prob, (prob * (x - self.loc) * (self.scale / spread).square()).sum(-1)


X = torch.linspace(-4, 4, 25, dtype=DOUBLE).unsqueeze(-1)


@pytest.mark.parametrize("one_hot", [False, True])
def test_discrete_latents_beside_continuous_ones_are_summed(one_hot):
    model = Components(one_hot)
    prob, mean = model.exact(X)

    def query(t) -> Tensor:
        c = t.c if one_hot else torch.nn.functional.one_hot(t.c, 3)
        return torch.cat([c.double(), t.z], -1)

    answer = vd.expect(model, X, query, n=500, tolerance=0.05, seed=0)
    assert (answer.verdict == vd.Verdict.OK).all()
    assert_within(answer.value, torch.cat([prob, mean.unsqueeze(-1)], -1), answer.mcse.clamp_min(1e-6), rate=RATE)
    encoder = vd.Student(df=4.0).make(X, 1, hidden=(8,), generator=vd.seeded(0)).double()
    particles = vd.posterior(model, X, {"q": encoder, "PRIOR": vd.Prior(Enumerated(model, X).prior)}, 4000, seed=0)
    estimate = particles.expect(query)
    assert_within(estimate.value, torch.cat([prob, mean.unsqueeze(-1)], -1), estimate.mcse.clamp_min(1e-4), rate=RATE)


def test_a_model_with_discrete_latents_only_is_summed_exactly():
    class Mixture:
        prior = Categorical(Components.share)

        def log_joint(self, x: Tensor, c: Tensor) -> Tensor:
            return Normal(Components.loc[c], 1.0).log_prob(x[..., 0]) + self.prior.log_prob(c)

    exact = (Components.share.log() + Normal(Components.loc, 1.0).log_prob(X)).softmax(-1)
    answer = vd.expect(Mixture(), X, lambda c: torch.nn.functional.one_hot(c, 3).double())
    torch.testing.assert_close(answer.value, exact, rtol=1e-12, atol=1e-14)
    assert set(answer.stage) == {"EXACT"}
    assert (answer.mcse == 0).all()
    assert (answer.verdict == vd.Verdict.OK).all()
    with pytest.raises(SettingError, match="all latents of the model are discrete"):
        vd.posterior(Mixture(), X, vd.Prior(Normal(torch.zeros(1), 1.0)), 100)


# ------------------------------------------------------------------------------------------------------------ refusals
def test_priors_and_observations_that_cannot_be_used_are_refused():
    with pytest.raises(SettingError, match=r"the prior of a is a function of b; its arguments must be among x"):
        vd.JointPrior(a=lambda b: b)
    with pytest.raises(SettingError, match="at least one latent"):
        vd.JointPrior()
    model = Conditional(tuple)
    image, condition = observed(tuple)
    with pytest.raises(ShapeError, match=r"x\[0\] 40, x\[1\] 39"):
        vd.expect(model, (image, condition[1:]), lambda z: z)
    with pytest.raises(DataError, match=r"x\[1\] is a float; pass a tensor"):
        vd.expect(model, (image, 1.0), lambda z: z)

    class Many:
        prior = vd.JointPrior(a=Categorical(torch.ones(64)), b=Categorical(torch.ones(64)))

        def log_joint(self, x: Tensor, z) -> Tensor:
            return self.prior.log_prob(z)

    with pytest.raises(SettingError, match="4096 joint states"):
        vd.expect(Many(), X, lambda z: z.a.double())

    class Moving:
        """The bounds of the prior depend on the observation."""

        def prior(self, x: Tensor) -> Independent:
            return Independent(Uniform(x, x + 1), 1)

        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return self.prior(x).log_prob(z)

    with pytest.raises(SettingError, match="use a prior of unbounded vectors"):
        Target.of(Moving(), X)


# ------------------------------------------------------------------------------------------------------ a second look
def test_fields_of_a_joint_prior_are_independent_in_every_source():
    """Two fields of one size: P(a > 0, b > 0) is one quarter for each observation (rate 1e-6, binomial with 1024)."""
    normal = Normal(torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE))
    prior, x = vd.JointPrior(a=normal, b=normal), normals(20, 1, seed=9)
    keyed = KeyedNoise(0, 0, row_keys(x))
    for source in (keyed, keyed.net(), vd.Sobol(vd.seeded(0)), vd.seeded(0)):
        z = prior.draw(x, 1024, generator=source).z
        both = ((z.a > 0) & (z.b > 0)).double().mean(0)
        assert (both - 0.25).abs().max() < 5.5 * (0.25 * 0.75 / 1024) ** 0.5


def test_four_modes_of_two_latents_are_all_found():
    class Corners:
        prior = vd.JointPrior(
            a=Normal(torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)),
            b=Normal(torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)),
        )

        def log_joint(self, x: Tensor, z) -> Tensor:
            corner = torch.stack([z.a[..., 0].abs() - 1, z.b[..., 0].abs() - 1], -1)
            return -0.5 * (corner / 0.05).square().sum(-1) + 0 * x[..., 0]

    x = normals(30, 1, seed=10)
    answer = vd.expect(Corners(), x, lambda z: (z.a * z.b > 0)[..., 0].double(), n=200, tolerance=0.1, seed=0)
    ok = answer.verdict == vd.Verdict.OK
    assert ok.double().mean() > 0.8
    assert (answer.value[ok] - 0.5).abs().max() < 0.2


def test_impossible_observations_of_a_discrete_model_are_refused():
    class Broken:
        prior = Categorical(torch.ones(3))

        def log_joint(self, x: Tensor, c: Tensor) -> Tensor:
            return self.prior.log_prob(c) + torch.where(c >= 0, x[..., 0], 0.0)

        def simulate(self, n: int, *, generator) -> tuple[Tensor, Tensor]:
            c = torch.randint(3, (n,), generator=generator)
            return torch.zeros(n, 1, dtype=DOUBLE), c

    class Impossible(Broken):
        def log_joint(self, x: Tensor, c: Tensor) -> Tensor:
            log_p = super().log_joint(x, c)
            return torch.where(x[..., 0] > 1, -torch.inf, torch.where(x[..., 0] < -1, torch.nan, log_p))

    x = torch.tensor([[-2.0], [0.0], [2.0]], dtype=DOUBLE)
    answer = vd.expect(Impossible(), x, lambda c: c.double() + 1)
    assert vd.Verdict.names(answer.verdict) == ["REFUSE", "OK", "REFUSE"]
    assert answer.value[[0, 2]].isnan().all()
    assert "not finite" in answer.reason[0]
    report = vd.check(Broken(), lambda c: (c == 0).double(), n_pairs=60)
    assert report.verdict == vd.Verdict.OK
    with pytest.raises(SettingError, match="all latents of the model are discrete"):
        vd.posterior(Broken(), x, None, tolerance=0.1, query=lambda c: c.double())
    with pytest.raises(ShapeError, match=r"f returned \(\)"):
        vd.expect(Components(False), X, lambda t: t.z.mean())


def test_values_outside_the_support_of_a_dependent_latent_have_no_density():
    prior = vd.JointPrior(
        a=Normal(torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)),
        b=lambda a: Independent(Gamma(a.exp(), torch.ones(1, dtype=DOUBLE)), 1),
    )
    a, b = normals(4, 3, 1, seed=11), normals(4, 3, 1, seed=12).abs()
    b[:, :2] *= -1
    log_p = prior.log_prob(prior.Latent(a=a, b=b))
    exact = Normal(0.0, 1.0).log_prob(a[:, 2]) + Gamma(a[:, 2].exp(), 1.0).log_prob(b[:, 2])
    torch.testing.assert_close(log_p[:, 2], exact[:, 0])
    assert log_p[:, :2].isneginf().all()


def test_names_and_draws_that_would_mislead_are_refused():
    normal = Normal(torch.zeros(1), torch.ones(1))
    for name in ("x", "class", "_z"):
        with pytest.raises(SettingError, match="a latent cannot be called"):
            vd.JointPrior(**{name: normal})
    with pytest.raises(SettingError, match="the prior depends on the observations"):
        vd.JointPrior(z=lambda x: Normal(x, 1.0)).sample((3,))
    with pytest.raises(SettingError, match="the prior depends on the observations; give the model simulate"):
        vd.check(Conditional(tuple), lambda z: z, sample_x=lambda z, g: z)
    with pytest.raises(SettingError, match="give seed= a whole number"):
        vd.expect(Components(False), X, lambda t: t.z, seed=KeyedNoise(0, 0, row_keys(X)))


def test_fixed_proposals_and_mixtures_serve_images():
    model, x = Conditional(tuple), observed(tuple, 6)
    near = Independent(Normal(torch.zeros(1, dtype=DOUBLE), 3 * torch.ones(1, dtype=DOUBLE)), 1)
    mean, _ = model.exact(x)
    answer = vd.expect(model, x, lambda z: z[..., 0], near, 500, tolerance=0.1, seed=0)
    assert_within(answer.value, mean, answer.mcse, rate=RATE)

    class Images:
        prior = near

        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return self.prior.log_prob(z) - 0.5 * (x - z[..., None, None]).square().sum((-3, -2, -1))

    mixture = vd.Mixture({"near": vd.Prior(near), "PRIOR": vd.Prior(Images.prior)})
    assert vd.posterior(Images(), x[0], mixture, 100, seed=0).z.shape == (100, 6, 1)
    assert vd.posterior(Images(), x[0], mixture, 100, tolerance=1.0, seed=0).z.shape[1:] == (6, 1)
