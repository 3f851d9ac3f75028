"""Training of M1+M2: losses by hand, members side by side, and what they learn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from checks import assert_mean
from vaerdict import objectives
from vaerdict.core import DataError, DivergenceError, SettingError
from vaerdict.distributions import Diagonal, Elliptical
from vaerdict.inference import amortised, class_posterior, plugin_classes
from vaerdict.models import M1M2, Recognition, recognition
from vaerdict.noise import seeded
from vaerdict.training import (
    SEMI_RECIPES,
    SemiData,
    SemiFit,
    SemiMember,
    SemiRecipe,
    SemiSettings,
    semi_recipe,
    train_semisupervised,
    train_semisupervised_each,
)
from vaerdict.training.semisupervised_stack import (
    SemiParticles,
    SemiStack,
    semi_cubo_loss,
    semi_elbo_loss,
    semi_iwelbo_loss,
    semi_wake_loss,
    stack_data,
)

SIDE, C = 4, 3
P = SIDE**2
SETTINGS = SemiSettings(n_particles=3, epochs=2, batch_size=16, labelled_batch=8, lr=1e-2)


def pair(seed: int = 0, *, df: float | None = None, n_classes: int = C) -> tuple[M1M2, Recognition]:
    g = seeded(seed)
    model = M1M2(P, n_classes, d_z=2, d_u=2, hidden=(8,), generator=g)
    return model.double(), recognition(model, hidden=(8,), df=df, generator=g).double()


def member(name: str, seed: int = 0, *, df: float | None = None, n_classes: int = C) -> SemiMember:
    return SemiMember(*pair(seed, df=df, n_classes=n_classes), semi_recipe(name), seed)


def striped_images(n: int = 40, n_labelled: int = 12, seed: int = 0) -> SemiData:
    """Images with one white row, whose position is the class; one pixel in twenty is flipped."""
    g = seeded(seed)
    y = torch.arange(n) % C
    x = torch.zeros(n, SIDE, SIDE, dtype=torch.double)
    x[torch.arange(n), y] = 1.0
    flipped = torch.rand(n, P, generator=g) < 0.05
    labelled = torch.randperm(n, generator=g)[:n_labelled]
    return SemiData(torch.where(flipped, 1 - x.flatten(1), x.flatten(1)), labelled, y[labelled])


def stack_of(members: Sequence[SemiMember], settings: SemiSettings = SETTINGS, **options: bool) -> SemiStack:
    data = stack_data([striped_images()] * len(members), torch.device("cpu"))
    return SemiStack(members, data, settings, **{"learn_model": True, **options})


def parameters(fit: SemiFit) -> dict[str, Tensor]:
    both = {"model": fit.model, "recognition": fit.recognition}
    return {f"{name}.{k}": v for name, module in both.items() for k, v in module.state_dict().items()}


def assert_same(a: SemiFit, b: SemiFit) -> None:
    for (name, first), second in zip(parameters(a).items(), parameters(b).values(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    assert a.losses == pytest.approx(b.losses, rel=1e-8)


# ------------------------------------------------------------------------------------------------ bounds and losses
def weighted(generator: torch.Generator, k: int = 5, n: int = 4) -> tuple[Tensor, Tensor, SemiParticles]:
    """Leaf tensors log p and log q, and their particles with equal masses."""
    log_p, log_q = (torch.randn(k, n, generator=generator, dtype=torch.double, requires_grad=True) for _ in range(2))
    mass = torch.full((k, 1), -math.log(k), dtype=torch.double)
    return log_p, log_q, SemiParticles(log_p - log_q, log_q, mass)


def test_with_equal_masses_losses_are_the_general_ones(generator):
    _, log_q, p = weighted(generator)
    torch.testing.assert_close(semi_elbo_loss(p), -objectives.elbo(p.log_w))
    torch.testing.assert_close(semi_iwelbo_loss(p), -objectives.iwelbo(p.log_w))
    torch.testing.assert_close(
        semi_wake_loss(p) - semi_iwelbo_loss(p), objectives.forward_kl_score_loss(p.log_w, log_q)
    )
    torch.testing.assert_close(semi_cubo_loss(p) - semi_iwelbo_loss(p), objectives.cubo_score_loss(p.log_w, log_q))


@pytest.mark.parametrize(
    ("loss", "of_q"), [(semi_wake_loss, objectives.forward_kl_score_loss), (semi_cubo_loss, objectives.cubo_score_loss)]
)
def test_score_losses_have_the_gradients_of_the_iwelbo_and_of_the_score_loss(loss, of_q, generator):
    log_p, log_q, p = weighted(generator)
    gradients = torch.autograd.grad(loss(p).sum(), (log_p, log_q), retain_graph=True)
    (model,) = torch.autograd.grad(objectives.iwelbo_loss(p.log_w).sum(), log_p, retain_graph=True)
    (q,) = torch.autograd.grad(of_q(p.log_w.detach(), log_q).sum(), log_q)
    torch.testing.assert_close(gradients, (model, q))


def test_with_classes_summed_losses_have_the_exact_gradients(generator):
    """With no latent but the class, bounds and their gradients in the logits of q(c) are finite sums."""
    log_p = torch.randn(C, generator=generator, dtype=torch.double)
    logits = torch.randn(C, generator=generator, dtype=torch.double, requires_grad=True)
    log_q = torch.log_softmax(logits, 0)
    particles = SemiParticles(log_p - log_q, log_q, log_q)
    posterior = torch.softmax(log_p, 0)
    exact = {
        semi_elbo_loss: -(log_q.exp() * (log_p - log_q)).sum(),
        semi_wake_loss: (posterior * (posterior.log() - log_q)).sum(),
        semi_cubo_loss: 0.5 * (2 * log_p - log_q).logsumexp(0),
    }
    for loss, value in exact.items():
        computed, expected = (torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (loss(particles), value))
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(computed, expected)
    torch.testing.assert_close(semi_iwelbo_loss(particles), -log_p.logsumexp(0))
    torch.testing.assert_close(semi_elbo_loss(particles), exact[semi_elbo_loss])


@pytest.mark.parametrize(("name", "variance"), [("VAE", 0.36), ("WW", 1.0), ("CHI", 1.3685)])
def test_fits_reach_the_variance_of_their_divergence(name, variance, generator):
    """A mean-field normal fitted to unit variances of correlation 0.8; a loss of the wrong sign diverges or collapses.

    Biases of order 1/K are at most 3 per cent with K = 200.
    """
    precision = torch.linalg.inv(torch.tensor([[1.0, 0.8], [0.8, 1.0]], dtype=torch.double))
    recipe, k, batch = semi_recipe(name), 200, 30
    log_s = torch.zeros(2, dtype=torch.double, requires_grad=True)
    optimiser = torch.optim.Adam([log_s], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 150)
    for _ in range(150):
        optimiser.zero_grad()
        q = Elliptical(torch.zeros(batch, 2, dtype=torch.double), Diagonal(log_s.exp().expand(batch, 2)))
        z = q.draw(None, k, generator=generator).z
        z = z if recipe.pathwise else z.detach()
        log_q = q.log_prob(z)
        log_p = -0.5 * torch.einsum("...i,ij,...j", z, precision, z)
        mass = torch.full((k, 1), -math.log(k), dtype=torch.double)
        recipe.loss(SemiParticles(log_p - log_q, log_q, mass)).mean().backward()
        optimiser.step()
        schedule.step()
    assert (2 * log_s).exp().mean().item() == pytest.approx(variance, rel=0.06)


def test_recipes_by_name():
    assert list(SEMI_RECIPES) == ["VAE", "IWAE", "WW", "CHI"]
    assert [r.loss for r in SEMI_RECIPES.values()] == [semi_elbo_loss, semi_iwelbo_loss, semi_wake_loss, semi_cubo_loss]
    assert semi_recipe("CHI") is SEMI_RECIPES["CHI"]
    assert [r.pathwise for r in SEMI_RECIPES.values()] == [True, True, False, False]
    with pytest.raises(SettingError, match="no objective 'AGG' for M1\\+M2; choose one of VAE, IWAE, WW, CHI"):
        semi_recipe("AGG")


# ------------------------------------------------------------------------------------------------------- one step
def by_hand(stack: SemiStack, x: Tensor, y: Tensor, bound: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The loss of a stack of one member, from its separate modules and its generator, without dropout."""
    s, ((model, q),) = stack.settings, stack.separate()
    g, k, nl = stack.generators[0].clone_state(), s.n_particles, len(y)
    n, eye = len(x) - nl, torch.eye(C, dtype=torch.double)

    def normals(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.double)

    def u_terms(z: Tensor, c: Tensor, eps: Tensor) -> Tensor:
        """Log p(z, c, u) - log q(u | z, c) at a drawn u."""
        q_u = q.u_given(z, c)
        u = q_u.loc + q_u.root.apply(eps)
        return model.log_prior(z, c, u) - q_u.log_prob(u)

    q_z = q.z_given(x)
    z = q_z.loc + q_z.root.apply(normals(k, len(x), 2))
    log_z, log_c = model.log_likelihood(x, z) - q_z.log_prob(z), q.log_class(z)
    if s.relaxed:
        gumbel = -(-torch.rand(k, n, C, generator=g, dtype=torch.double).log()).log()
        c = eye[torch.cat([(log_c[:, :n] + gumbel).argmax(-1), y.expand(k, nl)], 1)]
        log_w = log_z + u_terms(z, c, normals(k, len(x), 2))
        mass = torch.full((k, n), -math.log(k), dtype=torch.double)
        unlabelled, labelled = bound(log_w[:, :n] - (c * log_c).sum(-1)[:, :n], mass), log_w[:, n:]
    else:
        eps = normals(C, k, n, 2)
        log_w = [log_z[:, :n] + u_terms(z[:, :n], eye[[c] * n], eps[c]) - log_c[:, :n, c] for c in range(C)]
        mass = [log_c[:, :n, c] - math.log(k) for c in range(C)]
        unlabelled = bound(torch.cat(log_w), torch.cat(mass))
        labelled = log_z[:, n:] + u_terms(z[:, n:], eye[y], normals(k, nl, 2))
    equal_mass = torch.full_like(labelled, -math.log(k))
    cross_entropy = -log_c[:, n:].gather(-1, y.expand(k, nl)[..., None]).mean()
    of_labelled = (nl / stack.data.rows.shape[1]) if s.labelled_bound is None else s.labelled_bound
    bounds = unlabelled.mean() + of_labelled * bound(labelled, equal_mass).mean()
    return s.classification * cross_entropy - bounds


@pytest.mark.parametrize("labelled_bound", [1.0, 0.2, None])
@pytest.mark.parametrize("relaxed", [True, False])
def test_losses_agree_with_the_formulas(relaxed, labelled_bound):
    bounds = {
        "VAE": lambda log_w, log_mass: (log_mass.exp() * log_w).sum(0),
        "IWAE": lambda log_w, log_mass: (log_mass.exp() * log_w.exp()).sum(0).log(),
    }
    x, labelled, y = striped_images()
    x = torch.cat([x[:10], x[labelled]])
    for name, bound in bounds.items():
        one = stack_of(
            [member(name)],
            replace(SETTINGS, dropout=0.0, relaxed=relaxed, n_particles=4, labelled_bound=labelled_bound),
        )
        expected = by_hand(one, x, y, bound)
        torch.testing.assert_close(one.losses(x[None], y[None])[0], expected)


def recording(recipe: SemiRecipe, particles: list[SemiParticles]) -> SemiRecipe:
    """The recipe with a loss that records the particles it is called with."""

    def loss(p: SemiParticles) -> Tensor:
        particles.append(p)
        return recipe.loss(p)

    return replace(recipe, loss=loss)


@pytest.mark.parametrize("relaxed", [True, False])
@pytest.mark.parametrize("name", ["IWAE", "WW"])
def test_masses_sum_to_one_and_only_pathwise_particles_carry_gradient_of_q(name, relaxed):
    particles: list[SemiParticles] = []
    one = replace(member(name), recipe=recording(semi_recipe(name), particles))
    stack = stack_of([one], replace(SETTINGS, relaxed=relaxed))
    x, _, y = striped_images()
    stack.losses(x[None], y[None])
    for p in particles:
        total = p.log_mass.expand_as(p.log_w).logsumexp(0)
        torch.testing.assert_close(total, torch.zeros_like(total))
        joint = (p.log_w + p.log_q).sum()  # log p(x, z, c, u)
        gradients = torch.autograd.grad(
            joint, list(stack.recognition.parameters()), retain_graph=True, allow_unused=True
        )
        # log q cancels in the sum up to rounding
        assert any(g is not None and g.abs().max() > 1e-6 for g in gradients) == (name == "IWAE")


@pytest.mark.parametrize("relaxed", [True, False])
@pytest.mark.parametrize("name", ["WW", "CHI"])
def test_the_models_gradient_in_score_recipes_is_that_of_the_iwelbo(name, relaxed):
    settings = replace(SETTINGS, dropout=0.0, relaxed=relaxed, classification=0.0)
    x, _, y = striped_images()

    def stack(recipe: SemiRecipe) -> SemiStack:
        return stack_of([replace(member(name), recipe=replace(recipe, name=name))], settings)

    score, pathwise = stack(semi_recipe(name)), stack(semi_recipe("IWAE"))
    gradient, iwelbo = (
        torch.autograd.grad(s.losses(x[None], y[None]).sum(), list(s.model.parameters())) for s in (score, pathwise)
    )
    torch.testing.assert_close(gradient, iwelbo)

    # and by finite differences along a direction
    perturbed = stack(semi_recipe("IWAE"))
    state = perturbed.generators[0].get_state()
    g, step = seeded(1), 1e-5
    directions = [torch.randn(p.shape, generator=g, dtype=torch.double) for p in perturbed.model.parameters()]

    def loss_at(t: float) -> float:
        perturbed.generators[0].set_state(state)
        with torch.no_grad():
            for p, d in zip(perturbed.model.parameters(), directions, strict=True):
                p.add_(t * d)
            value = perturbed.losses(x[None], y[None]).item()
            for p, d in zip(perturbed.model.parameters(), directions, strict=True):
                p.sub_(t * d)
        return value

    slope = (loss_at(step) - loss_at(-step)) / (2 * step)
    along = sum(float((a * d).sum()) for a, d in zip(gradient, directions, strict=True))
    assert abs(slope) > 1
    assert along == pytest.approx(slope, rel=1e-5)


def test_drawn_classes_are_one_hot_with_the_gradient_of_their_relaxation():
    stack = stack_of([member("VAE")])
    log_class = torch.log_softmax(torch.tensor([0.0, 1.0, -1.0], dtype=torch.double), 0).expand(2000, 1, 20, C)
    log_class = log_class.clone().requires_grad_()
    drawn = stack._drawn(log_class)
    assert torch.equal(drawn.round().sort(-1).values, torch.tensor([0.0, 0.0, 1.0]).double().expand_as(drawn))
    for c, expected in enumerate(log_class[0, 0, 0].exp().tolist()):
        assert_mean(drawn[..., c], expected, rate=1e-6)
        with pytest.raises(AssertionError, match="standard errors"):
            assert_mean(drawn[..., c], expected + 0.02, rate=1e-6)
    (gradient,) = torch.autograd.grad(drawn[..., 0].sum(), log_class)
    assert gradient[..., 0].min() >= 0 > gradient[..., 1].min()
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(2000, 1, 20, dtype=torch.double))
    hard = stack_of([member("WW")])._drawn(log_class)
    assert not hard.requires_grad


def test_drawing_the_class_agrees_in_mean_with_summing_over_classes():
    x, _, y = striped_images()

    def losses(relaxed: bool) -> Tensor:
        one = member("VAE")
        with torch.no_grad():
            one.recognition.classifier.layers[1].get_parameter("weight").mul_(8)  # classes of unequal probability
        stack = stack_of([one], replace(SETTINGS, relaxed=relaxed, n_particles=50, dropout=0.0, classification=0.0))
        values = []
        for seed in range(200):
            stack.generators[0].manual_seed(seed)  # the same z for both
            with torch.no_grad():
                values.append(stack.losses(x[None], y[None]))
        return torch.cat(values)

    difference = losses(True) - losses(False)
    assert_mean(difference, 0.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(difference + 0.05, 0.0, rate=1e-6)


# ---------------------------------------------------------------------------------------------------- shifted images
def shifts_of(image: Tensor, reach: int) -> dict[tuple[int, int], Tensor]:
    height, width = image.shape
    padded = torch.nn.functional.pad(image, (reach,) * 4)
    reachable = range(2 * reach + 1)
    return {(i, j): padded[i : i + height, j : j + width] for i in reachable for j in reachable}


def test_every_image_is_shifted_independently(generator):
    shape = (4, 3)
    settings = replace(SETTINGS, shifts=1, image_shape=shape)
    members = [member("VAE", s) for s in range(2)]
    stack = SemiStack(members, stack_data([striped_images()] * 2, torch.device("cpu")), settings, learn_model=True)
    x = torch.rand(2, 200, 12, generator=generator)
    shifted = stack._shifted(x)
    assert shifted.shape == x.shape
    offsets: list[list[tuple[int, int]]] = [[], []]
    for m in range(2):
        for before, after in zip(x[m], shifted[m], strict=True):
            candidates = shifts_of(before.reshape(shape), 1)
            offsets[m].append(next(o for o, image in candidates.items() if torch.equal(image.flatten(), after)))
    assert all(len(set(of_member)) == 9 for of_member in offsets)  # all nine occur
    assert offsets[0] != offsets[1]
    assert stack_of(members)._shifted(x) is x


# -------------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("relaxed", [True, False])
def test_a_member_learns_the_same_alone_and_in_a_stack(relaxed):
    x, labelled, y = striped_images()
    settings = replace(SETTINGS, relaxed=relaxed, shifts=1, image_shape=(SIDE, SIDE))
    members = [member(name, seed) for seed in range(2) for name in SEMI_RECIPES]
    members.append(member("CHI", 2, df=4.0))
    fits = train_semisupervised(members, x, labelled, y, settings)
    assert [fit.member for fit in fits] == members
    for one, fit in zip(members, fits, strict=True):
        assert_same(train_semisupervised([one], x, labelled, y, settings)[0], fit)
    for a, b in zip(train_semisupervised(members, x, labelled, y, settings, max_members=2), fits, strict=True):
        assert_same(a, b)
    weight = parameters(fits[0])["model.decoder.layers.0.weight"]
    assert not torch.equal(weight, members[0].model.decoder.layers[0].weight)
    assert not torch.equal(weight, parameters(fits[4])["model.decoder.layers.0.weight"])


def test_every_member_may_have_its_own_data():
    members = [member("VAE", s) for s in range(3)]
    first, second = striped_images(seed=0), striped_images(seed=1)
    data = [first, second, first]
    fits = train_semisupervised_each(members, data, SETTINGS)
    for one, member_data, fit in zip(members, data, fits, strict=True):
        assert_same(train_semisupervised_each([one], [member_data], SETTINGS)[0], fit)
    stacked = stack_data(data, torch.device("cpu"))
    assert len(stacked.x) == 2 * len(first.x)  # shared images are stored once
    for i, member_data in enumerate(data):
        assert torch.equal(stacked.x[stacked.rows[i]], member_data.x)
        assert torch.equal(stacked.x[stacked.labelled[i]], member_data.x[member_data.labelled])


def test_an_epoch_shows_every_image_once():
    stack = stack_of([member("VAE", s) for s in range(2)])
    batches = stack.shuffled()
    assert batches.shape == (2, 2, 16)  # 40 images: two full batches, the rest is left out
    for m in range(2):
        assert len(batches[:, m].unique()) == 32
    assert not torch.equal(batches[:, 0], batches[:, 1])
    assert not torch.equal(batches, stack.shuffled())


def test_training_does_not_change_its_inputs_or_a_fixed_model():
    x, labelled, y = striped_images()
    one = member("IWAE")
    before = {k: v.clone() for k, v in (one.model.state_dict() | one.recognition.state_dict()).items()}
    reported: list[tuple[int, int, str]] = []
    (fit,) = train_semisupervised(
        [one], x, labelled, y, SETTINGS, learn_model=False, progress=lambda *arguments: reported.append(arguments)
    )
    assert all(torch.equal(v, before[k]) for k, v in (one.model.state_dict() | one.recognition.state_dict()).items())
    assert all(torch.equal(v, fit.model.state_dict()[k]) for k, v in one.model.state_dict().items())
    assert all(p.requires_grad for p in fit.model.parameters())
    changed = [k for k, v in one.recognition.named_parameters() if not torch.equal(v, fit.recognition.state_dict()[k])]
    assert len(changed) == len(list(one.recognition.parameters()))
    assert len(fit.losses) == 2
    assert reported == [(i, 2, "IWAE (1 of 1)") for i in (1, 2)]


@pytest.mark.parametrize("relaxed", [True, False])
def test_training_raises_the_evidence_and_learns_the_classes(relaxed):
    x, labelled, y = striped_images(90, 30)
    held_out = striped_images(60, 60, seed=9)
    members = [member(name, df=5.0 if name == "CHI" else None) for name in SEMI_RECIPES]
    settings = SemiSettings(5, 20, 30, 15, lr=3e-2, cooling=0.5, relaxed=relaxed)
    for fit in train_semisupervised(members, x, labelled, y, settings):

        def evidence(model: M1M2, q: Recognition) -> Tensor:
            return class_posterior(
                model, held_out.x, {"MIS": amortised({"Q": q}, model)}, 100, generator=seeded(0)
            ).log_evidence.mean()

        name = fit.member.name
        gain = evidence(fit.model, fit.recognition) - evidence(fit.member.model, fit.member.recognition)
        assert gain > 2, name
        assert fit.losses[-1] < fit.losses[0] - 2, name
        guess = plugin_classes(fit.recognition, held_out.x, 50, generator=seeded(0)).argmax(-1)
        assert (guess[held_out.labelled] == held_out.labels).double().mean() > 0.85, name
        assert not fit.model.training


def test_a_class_without_labels_is_learned_from_unlabelled_images():
    x, labelled, y = striped_images(60, 60)
    seen = y < 2  # the third class is never labelled
    settings = SemiSettings(4, 60, 30, 15, lr=2e-2, relaxed=False, classification=1.0, dropout=0.0)
    (fit,) = train_semisupervised([member("VAE")], x, labelled[seen], y[seen], settings)
    unseen_class = plugin_classes(fit.recognition, x[labelled], 50, generator=seeded(0))[:, 2]
    assert unseen_class[~seen].mean() > 0.8
    assert unseen_class[seen].mean() < 0.1


def test_the_learning_rate_falls_along_half_a_cosine():
    settings = SemiSettings(epochs=10, lr=1e-3, cooling=0.4)
    rates = [settings.rate(epoch) for epoch in range(11)]
    assert rates[:7] == [1e-3] * 7
    assert rates[6:] == pytest.approx([1e-3 * (0.5 + 0.5 * math.cos(math.pi * i / 4)) for i in range(5)])
    assert rates[-1] == 0
    assert all(SemiSettings(epochs=10).rate(epoch) == 1e-3 for epoch in range(10))
    x, labelled, y = striped_images()
    constant, cooled = (
        train_semisupervised([member("VAE")], x, labelled, y, replace(SETTINGS, cooling=c))[0] for c in (0.0, 1.0)
    )
    assert constant.losses[0] == cooled.losses[0]  # the first epoch has the full rate in both
    assert not torch.equal(constant.model.decoder.layers[0].weight, cooled.model.decoder.layers[0].weight)


# ------------------------------------------------------------------------------------------------- invalid inputs
def test_the_error_of_a_loss_that_is_not_finite_names_the_member():
    x, labelled, y = striped_images()
    members = [member("VAE", 0), member("IWAE", 3)]
    with torch.no_grad():
        members[1].model.decoder.layers[0].get_parameter("weight")[0, 0] = torch.nan
    with pytest.raises(DivergenceError, match="the loss of IWAE, seed 3 became nan in epoch 1; lower the learning"):
        train_semisupervised(members, x, labelled, y, SETTINGS)


def test_a_last_step_to_parameters_that_are_not_finite_is_an_error():
    kink = SemiRecipe("KINK", lambda p: (p.log_w - p.log_w).sum(0).sqrt(), True)  # zero, with an infinite derivative
    one = replace(member("VAE"), recipe=kink)
    with pytest.raises(DivergenceError, match="the sum of parameters of KINK, seed 0 became nan in epoch 1"):
        train_semisupervised_each([one], [striped_images()], replace(SETTINGS, epochs=1, batch_size=40))


@pytest.mark.parametrize(
    ("change", "settings", "error", "message"),
    [
        ({"labels": torch.full((12,), 3)}, {}, DataError, "labels reach from 3 to 3; the model has 3 classes"),
        ({"labels": torch.full((12,), -1)}, {}, DataError, "labels reach from -1 to -1"),
        ({"labels": torch.zeros(11).long()}, {}, DataError, "12 labelled images have 11 labels"),
        ({"labelled": torch.zeros(0).long(), "labels": torch.zeros(0).long()}, {}, DataError, "at least one is needed"),
        ({"labelled": torch.arange(29, 41)}, {}, DataError, "labelled reaches from 29 to 40; there are 40 images"),
        ({"labelled": torch.arange(-1, 11)}, {}, DataError, "labelled reaches from -1 to 10"),
        ({"x": torch.full((40, P), torch.nan)}, {}, DataError, "x holds 640 non-finite values"),
        ({}, {"image_shape": (5, 4)}, SettingError, r"image_shape=\(5, 4\) does not hold 16 pixels"),
    ],
)
def test_invalid_data_are_refused(change, settings, error, message):
    data = striped_images()._replace(**change)
    with pytest.raises(error, match=message):
        train_semisupervised_each([member("VAE")], [data], replace(SETTINGS, **settings))


def test_members_need_one_data_set_each_of_one_size():
    with pytest.raises(SettingError, match=r"0 members and 0 data sets; .* at least one"):
        train_semisupervised_each([], [])
    with pytest.raises(SettingError, match="1 members and 2 data sets"):
        train_semisupervised_each([member("VAE")], [striped_images(), striped_images()])
    with pytest.raises(SettingError, match=r"data of one size, not \(images, labels\) of \[\(30, 12\), \(40, 12\)\]"):
        train_semisupervised_each(
            [member("VAE", s) for s in range(2)], [striped_images(), striped_images(30)], SETTINGS
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_particles": 0}, "n_particles=0 must be a whole number"),
        ({"epochs": 1.5}, "epochs=1.5 must be a whole number"),
        ({"lr": 0.0}, "lr=0.0 and temperature=0.5 must be positive"),
        ({"temperature": -1.0}, "temperature=-1.0 must be positive"),
        ({"classification": -1.0}, "classification=-1.0 and labelled_bound=1.0 not negative"),
        ({"labelled_bound": -1.0}, "labelled_bound=-1.0 not negative"),
        ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
        ({"cooling": 1.5}, r"cooling=1.5 in \[0, 1\]"),
        ({"shifts": 2}, "shifts=2 moves images; give their image_shape too"),
    ],
)
def test_invalid_settings_are_refused(change, message):
    with pytest.raises(SettingError, match=message):
        SemiSettings(**change)
