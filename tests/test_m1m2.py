"""M1+M2 against torch's and scipy's distributions, in stacks, and conditioned on each class."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from scipy import stats
from torch import Tensor, distributions
from torch.nn import functional as F

from checks import assert_mean
from vaerdict.core import Model, Proposal, SettingError, ShapeError
from vaerdict.models import (
    M1M2,
    Architecture,
    BernoulliLikelihood,
    ClassPrior,
    ClassProposal,
    GaussianLikelihood,
    PerClass,
    Recognition,
    per_class,
    recognition,
)
from vaerdict.networks import CNN, MLP, stack
from vaerdict.noise import KeyedNoise, Sobol, seeded

N, P, C = 5, 16, 3


def make(
    seed: int = 0, df: float | None = None, image_shape: tuple[int, int] | None = None
) -> tuple[M1M2, Recognition]:
    g = seeded(seed)
    model = M1M2(P, C, d_z=2, d_u=2, hidden=(8,), generator=g)
    q = recognition(model, image_shape=image_shape, hidden=(8,), df=df, generator=g)
    return model.double(), q.double()


def images(generator: torch.Generator, n: int = N) -> Tensor:
    return torch.rand(n, P, generator=generator, dtype=torch.double)


def normals(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.double)


# ------------------------------------------------------------------------------------------------------ likelihoods
def test_the_bernoulli_likelihood_and_its_derivatives(generator):
    out, x = 3 * normals(generator, 4, N, 6), images(generator)[:, :6]
    log_prob = BernoulliLikelihood().log_prob(x, out)
    torch.testing.assert_close(
        log_prob, -F.binary_cross_entropy_with_logits(out, x.expand_as(out), reduction="none").sum(-1)
    )
    extreme = BernoulliLikelihood().log_prob(torch.tensor([1.0, 0.0]), torch.tensor([[100.0, -100.0], [-100.0, 100.0]]))
    assert extreme.tolist() == pytest.approx([0.0, -200.0])
    with torch.random.fork_rng():  # gradcheck draws directions from the global state
        few = (x[:2].clone().requires_grad_(), out[:2, :2].detach().requires_grad_())
        assert torch.autograd.gradcheck(BernoulliLikelihood().log_prob, few)
        assert torch.autograd.gradgradcheck(BernoulliLikelihood().log_prob, few)


def test_the_gaussian_likelihood_keeps_scales_above_its_floor(generator):
    x, out = normals(generator, N, 3), normals(generator, 4, N, 6)
    scale = F.softplus(out[..., 3:] + math.log(math.e - 1)) + 0.2
    by_torch = distributions.Normal(out[..., :3], scale).log_prob(x).sum(-1)
    torch.testing.assert_close(GaussianLikelihood(0.2).log_prob(x, out), by_torch)
    collapsed = GaussianLikelihood(0.2).log_prob(torch.zeros(1, 1), torch.tensor([[0.0, -1e4]]))
    assert collapsed.item() == pytest.approx(-math.log(0.2 * math.sqrt(2 * math.pi)))
    model = M1M2(3, C, d_z=2, d_u=2, hidden=(8,), likelihood=GaussianLikelihood(), generator=generator)
    assert model.log_likelihood(x.float(), torch.zeros(4, N, 2)).shape == (4, N)


# -------------------------------------------------------------------------------------------------- the two models
def test_the_density_of_the_generative_model(generator):
    model, _ = make()
    z, u, x = normals(generator, 7, N, 2), normals(generator, 7, N, 2), images(generator)
    c = torch.eye(C, dtype=torch.double)[torch.tensor([0, 2, 1, 1, 0])]
    loc, raw = model.between(c, u).chunk(2, -1)
    p_z = distributions.Normal(loc, F.softplus(raw + math.log(math.e - 1)) + 1e-4)
    prior = p_z.log_prob(z).sum(-1) + distributions.Normal(0.0, 1.0).log_prob(u).sum(-1) - math.log(3)
    torch.testing.assert_close(model.log_prior(z, c, u), prior)
    pixels = distributions.Bernoulli(logits=model.decoder(z), validate_args=False).log_prob(x.expand(7, N, P))
    torch.testing.assert_close(model.log_likelihood(x, z), pixels.sum(-1))


@pytest.mark.parametrize("df", [None, 4.0])
def test_the_density_of_the_recognition_model(df, generator):
    _, q = make(df=df)
    x, z = images(generator), normals(generator, 7, N, 2)
    loc, raw = q.encoder(x).chunk(2, -1)
    scale = F.softplus(raw + math.log(math.e - 1)) + 1e-4
    for i in range(N):
        cov = torch.diag(scale[i].square()).detach().numpy()
        frozen = (
            stats.multivariate_normal(loc[i].detach().numpy(), cov)
            if df is None
            else stats.multivariate_t(loc[i].detach().numpy(), cov, df)
        )
        log_prob = q.z_given(x).log_prob(z)[:, i].detach()
        torch.testing.assert_close(log_prob, torch.as_tensor(frozen.logpdf(z[:, i].numpy())))
    torch.testing.assert_close(q.log_class(z).exp().sum(-1), torch.ones(7, N, dtype=torch.double))
    c = torch.eye(C, dtype=torch.double)[torch.tensor([0, 2, 1, 1, 0])]
    q_u = q.u_given(z, c)
    assert q_u.df is None
    torch.testing.assert_close(q_u.loc, q.auxiliary(c, z)[..., :2])


@pytest.mark.parametrize("image_shape", [None, (4, 4)])
def test_dropout_reaches_the_encoder(image_shape, generator):
    _, q = make(image_shape=image_shape)
    x = images(generator)
    assert torch.equal(q.z_given(x).loc, q.z_given(x, lambda h: h).loc)
    assert not torch.allclose(q.z_given(x).loc, q.z_given(x, lambda h: 0.5 * h).loc)


@pytest.mark.parametrize(("df", "image_shape"), [((None, None), None), ((3.0, 3.0), None), ((3.0, 8.0), (4, 4))])
def test_stacks_agree_with_their_members(df, image_shape, generator):
    pairs = [make(s, df[s], image_shape) for s in range(2)]
    model, q = stack([m for m, _ in pairs]), stack([r for _, r in pairs])
    x, z, u = images(generator, 2 * N).reshape(2, N, P), normals(generator, 7, 2, N, 2), normals(generator, 7, 2, N, 2)
    c = torch.eye(C, dtype=torch.double)[torch.tensor([[0, 2, 1, 1, 0], [1, 1, 2, 0, 2]])]
    stacked = [model.log_likelihood(x, z), model.log_prior(z, c, u), q.z_given(x).log_prob(z), q.log_class(z)]
    stacked.append(q.u_given(z, c).log_prob(u))
    for i, (one, r) in enumerate(pairs):
        single = [one.log_likelihood(x[i], z[:, i]), one.log_prior(z[:, i], c[i], u[:, i])]
        single += [r.z_given(x[i]).log_prob(z[:, i]), r.log_class(z[:, i]), r.u_given(z[:, i], c[i]).log_prob(u[:, i])]
        for of_stack, of_member in zip(stacked, single, strict=True):
            torch.testing.assert_close(of_stack[:, i], of_member, rtol=1e-10, atol=1e-10)


def test_a_recognition_model_has_convolutions_if_images_have_a_shape():
    assert isinstance(make(image_shape=(4, 4))[1].encoder, CNN)
    encoder = make()[1].encoder
    assert isinstance(encoder, MLP)
    assert [tuple(layer.get_parameter("weight").shape) for layer in encoder.layers] == [(8, 16), (8, 8), (4, 8)]
    with pytest.raises(SettingError, match=r"image_shape=\(4, 5\) does not hold the model's 16 pixels"):
        make(image_shape=(4, 5))


def widths(network: MLP) -> list[int]:
    return [len(layer.get_parameter("bias")) for layer in network.layers]


def test_an_architecture_sets_the_size_of_every_network(generator):
    sizes = Architecture((11,), (12, 13), (2, 3), False, (14, 15), (7,), (16,))
    model = M1M2(100, C, d_z=2, d_u=4, hidden=sizes, generator=generator)
    q = recognition(model, image_shape=(10, 10), generator=generator)
    assert (widths(model.decoder), widths(model.between.rest)) == ([11, 100], [13, 4])
    assert (widths(q.classifier), widths(q.auxiliary.rest)) == ([7, C], [8])
    assert len(q.auxiliary.of_class.bias) == 16
    assert isinstance(q.encoder, CNN)
    assert [tuple(c.get_parameter("weight").shape) for c in q.encoder.convolutions] == [(2, 9), (3, 18)]
    assert widths(q.encoder.head) == [14, 15, 4]
    assert q.encoder.head.layers[0].get_parameter("weight").shape[1] == 3  # 10 to 8, 4, 2 and 1 pixels wide
    with pytest.raises(SettingError, match="auxiliary=\\(\\) has no layer"):
        Architecture(auxiliary=())
    with pytest.raises(SettingError, match=r"too small for 2 convolutions .*; use padded=True or fewer channels="):
        recognition(M1M2(16, C, hidden=sizes, generator=generator), image_shape=(4, 4), generator=generator)


def test_networks_of_equal_widths_are_those_of_one_number():
    assert Architecture.of([128]) == Architecture()
    by_width, by_name = (M1M2(P, C, hidden=hidden, generator=seeded(0)) for hidden in ((8,), Architecture.of((8,))))
    for a, b in zip(by_width.parameters(), by_name.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["n_pixels", "n_classes", "d_z", "d_u"])
def test_sizes_must_be_positive_whole_numbers(name, generator):
    sizes = {"n_pixels": 4, "n_classes": 3, "d_z": 2, "d_u": 2} | {name: 0}
    with pytest.raises(SettingError, match=f"{name}=0 must be a whole number of at least 1"):
        M1M2(**sizes, generator=generator)


def test_the_prior_and_the_joint_density_of_all_latents_follow_the_module(generator):
    model, _ = make()
    x = images(generator)
    assert isinstance(model, Model)
    (c, u, z), log_p = model.prior.draw(x, 7, generator=generator)
    torch.testing.assert_close(
        model.log_joint(x, model.prior.Latent(c, u, z)), model.log_likelihood(x, z) + model.log_prior(z, c, u)
    )
    moved = copy.deepcopy(model).float()
    with torch.no_grad():
        moved.between.of_class.bias.add_(1.0)
    with torch.random.fork_rng():
        latent = moved.prior.sample((7, N))
    assert [t.dtype for t in latent] == [torch.float] * 3
    assert [tuple(t.shape) for t in latent] == [(7, N, C), (7, N, 2), (7, N, 2)]
    torch.testing.assert_close(moved.prior.log_prob(latent), moved.log_prior(latent.z, latent.c, latent.u))
    same = model.prior.Latent(c.float(), u.float(), z.float())
    assert not torch.allclose(moved.prior.log_prob(same), log_p.float(), atol=0.1)


# ------------------------------------------------------------------------------------------ conditioned on each class
def test_the_joint_density_given_each_class_includes_the_prior_of_classes(generator):
    model, _ = make()
    view, x, latent = PerClass(model), images(generator), normals(generator, 7, C, N, 4)
    assert isinstance(view, Model)
    log_joint = view.log_joint(per_class(x, C), latent)
    assert log_joint.shape == (7, C, N)
    for c in range(C):
        z, u = latent[:, c, :, :2], latent[:, c, :, 2:]
        one_hot = torch.eye(C, dtype=torch.double)[[c] * N]
        by_hand = model.log_likelihood(x, z) + model.log_prior(z, one_hot, u)
        torch.testing.assert_close(log_joint[:, c], by_hand)
        torch.testing.assert_close(view.prior.log_prob(latent)[:, c], model.log_prior(z, one_hot, u) + math.log(3))


def test_particles_with_one_z_for_all_classes_are_decoded_once(generator, monkeypatch):
    """Whatever the particles share, values and gradients are those of every class on its own."""
    model, _ = make()
    view, x, latent = PerClass(model), per_class(images(generator), C), normals(generator, 6, C, N, 4)
    latent[2:, :, :, :2] = latent[2:, :1, :, :2]
    decoded, decode = [], model.log_likelihood
    monkeypatch.setattr(model, "log_likelihood", lambda x, z: decoded.append(z[..., 0].numel()) or decode(x, z))
    for part, n_decoded in ((latent[:2], 2 * C * N), (latent[2:], 4 * N), (latent, 2 * C * N + 4 * N)):
        decoded.clear()
        by_class = [view.prior.log_prob(part)[:, c] + decode(x[0], part[:, c, :, :2]) - math.log(3) for c in range(C)]
        torch.testing.assert_close(view.log_joint(x, part), torch.stack(by_class, 1))
        assert sum(decoded) == n_decoded
    free = latent.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(view.log_joint(x, free)[:, 1].sum(), free)
    assert gradient[:, 1].abs().amin() > 0
    assert gradient[:, [0, 2]].abs().amax() == 0


def test_observations_per_class_are_a_view(generator):
    x = images(generator)
    repeated = per_class(x, C)
    assert repeated.shape == (C, N, P)
    assert repeated.data_ptr() == x.data_ptr()
    assert all(torch.equal(part, x) for part in repeated)


@pytest.mark.parametrize("source", [lambda g: g, Sobol], ids=["iid", "sobol"])
@pytest.mark.parametrize("kind", ["normal", "student", "prior"])
def test_proposals_per_class_return_the_density_of_their_draws(kind, source, generator):
    model, q = make(df=5.0 if kind == "student" else None)
    proposal: Proposal = ClassPrior(model) if kind == "prior" else ClassProposal(q)
    x = per_class(images(generator), C)
    assert isinstance(proposal, Proposal)
    latent, log_q = proposal.draw(x, 8, generator=source(generator))
    assert (latent.shape, log_q.shape) == ((8, C, N, 4), (8, C, N))
    torch.testing.assert_close(proposal.log_prob(latent, x), log_q)
    assert not torch.allclose(proposal.log_prob(latent + 0.1, x), log_q)


@torch.no_grad()
def test_the_proposal_per_class_draws_one_z_for_all_classes_and_u_given_each(generator):
    _, q = make()
    x = per_class(images(generator), C)
    latent, _ = ClassProposal(q).draw(x, 3000, generator=generator)
    z, u = latent.split(2, -1)
    assert torch.equal(z, z[:, :1].expand_as(z))
    q_z = q.z_given(x[0])
    standard_z = (z[:, 0] - q_z.loc) / q_z.root.covariance().diagonal(dim1=-2, dim2=-1).sqrt()
    eye = torch.eye(C, dtype=torch.double)
    for c in range(C):
        q_u = q.u_given(z[:, c], eye[[c] * N])
        standard_u = (u[:, c] - q_u.loc) / q_u.root.covariance().diagonal(dim1=-2, dim2=-1).sqrt()
        both = torch.cat([standard_z, standard_u], -1)
        assert stats.kstest(both.flatten().numpy(), "norm").pvalue > 1e-6
        for i in range(2):  # u has its own noise, not that of z
            assert_mean(standard_z[..., i] * standard_u[..., i], 0.0, rate=1e-6)
    assert stats.kstest((1.1 * standard_z).flatten().numpy(), "norm").pvalue < 1e-6


@torch.no_grad()
def test_draws_of_the_prior_have_its_distribution_given_each_class_and_jointly(generator):
    """Latents whose class is given by the position, and latents of the whole model in their order of dependence."""
    model, _ = make()
    per_position, x = ClassPrior(model), images(generator)
    assert per_position.event_shape == (4,)
    latent = per_position.draw(per_class(x, C), 2000, generator=generator).z
    assert (latent.shape, latent.dtype) == ((2000, C, N, 4), torch.double)
    eye = torch.eye(C, dtype=torch.double)
    given = [(latent[:, c, :, :2], latent[:, c, :, 2:], eye[[c] * N]) for c in range(C)]
    for source in (generator, Sobol(generator), KeyedNoise(0, 0, torch.arange(N))):
        (c, u, z), log_p = model.prior.draw(x, 4000, generator=source)
        assert_mean(c[..., 0], 1 / C, rate=1e-6)
        torch.testing.assert_close(log_p, model.log_prior(z, c, u))
        given.append((z, u, c))
    for z, u, c in given:
        assert stats.kstest(u.flatten().numpy(), "norm").pvalue > 1e-6
        p, wrong = model.conditional(c, u), model.conditional(c.roll(1, -1), u)
        standard, other = ((z - q.loc) / q.root.covariance().diagonal(dim1=-2, dim2=-1).sqrt() for q in (p, wrong))
        assert stats.kstest(standard.flatten().numpy(), "norm").pvalue > 1e-6
        assert stats.kstest(other.flatten().numpy(), "norm").pvalue < 1e-6


def test_the_locations_of_the_proposal_per_class(generator):
    _, q = make()
    x = images(generator)
    z = q.z_given(x).loc
    locations = ClassProposal(q).locate(per_class(x, C))
    for c in range(C):
        torch.testing.assert_close(locations[c, :, :2], z)
        torch.testing.assert_close(locations[c, :, 2:], q.u_given(z, torch.eye(C, dtype=torch.double)[[c] * N]).loc)


def test_latents_without_an_axis_of_classes_are_refused(generator):
    model, q = make()
    x = images(generator)
    with pytest.raises(ShapeError, match=r"latents \(7, 5, 4\) have no batch axis of 3 classes; use `per_class`"):
        PerClass(model).log_joint(x, normals(generator, 7, N, 4))
    with pytest.raises(ShapeError, match="no batch axis of 3 classes"):
        ClassProposal(q).log_prob(normals(generator, 7, 2, N, 4), per_class(x, 2))
    with pytest.raises(SettingError, match="k=0 must be a whole number"):
        ClassProposal(q).draw(per_class(x, C), 0, generator=generator)
    with pytest.raises(SettingError, match="k=0 must be a whole number"):
        ClassPrior(model).draw(per_class(x, C), 0, generator=generator)
