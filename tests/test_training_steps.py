"""Single steps: which parameters each objective moves, losses and gradients by hand, and joint steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from training_toys import SHORT, X, member, short_train, stack_of
from vaerdict.core import SettingError
from vaerdict.objectives import loss
from vaerdict.training import AGG, CHI, CYCLIC, IWAE, VAE, WW, Recipe, train
from vaerdict.training.data import SharedRows


# ----------------------------------------------------------------------------------------- losses and gradients
def test_a_fixed_model_does_not_change():
    members = [member(IWAE, 0), member(CHI, 1), member(AGG, 0)]
    fits = short_train(members, learn_model=False)
    for m, fit in zip(members, fits, strict=True):
        assert torch.equal(fit.model.log_noise, m.model.log_noise)
        assert not torch.equal(fit.proposal.encoder.layers[0].weight, m.proposal.encoder.layers[0].weight)


def test_theta_changes_only_the_model_and_phi_only_the_proposal():
    zero = replace(loss("elbo", "pathwise"), fn=lambda log_w, log_q: 0 * log_w.mean(0))
    fixed_model = Recipe("A", lambda log_w: 0 * log_w.mean(0), IWAE.phi)
    fixed_proposal = Recipe("B", IWAE.theta, zero)
    for one, model_moves in ((member(fixed_model, 0), False), (member(fixed_proposal, 0), True)):
        (fit,) = short_train([one])
        assert torch.equal(fit.model.log_noise, one.model.log_noise) != model_moves
        weights = (m.proposal.encoder.layers[0].weight for m in (fit, one))
        assert torch.equal(*weights) == model_moves


SCORE = replace(WW, name="score", phi=loss("forward_kl", "score"))
PATHWISE = replace(IWAE, name="pathwise", phi=loss("iwelbo", "pathwise"))


@pytest.mark.parametrize("recipes", [(VAE, IWAE, WW, VAE), (CHI, IWAE), (SCORE, SCORE), (PATHWISE, PATHWISE)])
def test_losses_and_gradients_are_those_of_the_recipes(recipes):
    """Computed by hand: theta by the recipe's bound, phi by its loss, on the noise of the step."""
    members = [member(one, seed) for seed, one in enumerate(recipes)]
    stack, x = stack_of(*members), X[:12]
    batch = x.expand(len(members), 12, 5)
    noise = stack.proposal.noise(batch, 7, stack.source)
    theta, phi = stack.theta_loss(batch, noise, None), stack.phi_loss(batch, noise, None)
    gradients = stack.theta.flat.gradient(theta), stack.phi.flat.gradient(phi)
    for i, m in enumerate(members):
        q, phi_loss = m.proposal(x), m.recipe.phi
        z = q.transform(type(noise)(noise.normal[:, i]))
        theta_value = m.recipe.theta(m.model.log_joint(x, z.detach()) - q.log_prob(z).detach()).mean()
        z = z if phi_loss.z_grad else z.detach()
        log_q = (q if phi_loss.q_grad else q.detach()).log_prob(z)
        phi_value = phi_loss(m.model.log_joint(x, z) - log_q, log_q).mean()
        for losses, gradient, expected, module in (
            (theta, gradients[0], theta_value, m.model),
            (phi, gradients[1], phi_value, m.proposal),
        ):
            torch.testing.assert_close(losses[i], expected)
            by_hand = torch.autograd.grad(expected, list(module.parameters()))
            filled = [nn.functional.pad(g.flatten(), (0, -g.numel() % 4)) for g in by_hand]
            torch.testing.assert_close(gradient[i], torch.cat(filled))


# --------------------------------------------------------------------------------------------------------- joint steps
@pytest.mark.parametrize("recipe", [VAE, IWAE, WW, CHI, CYCLIC])
@pytest.mark.parametrize("n_members", [1, 2])
def test_one_backward_pass_gives_both_gradients(recipe, n_members, monkeypatch):
    """A joint step has the gradients of the two separate losses on the same particles."""
    members = [member(recipe, i) for i in range(n_members)]
    joint, separate = stack_of(*members), stack_of(*members)
    x = SharedRows(X[:40]).block(slice(None), joint.n_stacked)
    beta = None if recipe is not CYCLIC else torch.tensor(0.4).double()
    noise = joint.proposal.noise(x, 7, joint.source)
    monkeypatch.setattr(joint.proposal, "noise", lambda *_: noise)
    losses = joint.joint_step(x, 7, beta)
    expected = separate.theta_loss(x, noise, beta), separate.phi_loss(x, noise, beta)
    torch.testing.assert_close(losses, torch.stack(expected).detach())
    for after, adam, value in ((joint.theta, separate.theta, expected[0]), (joint.phi, separate.phi, expected[1])):
        gradient = adam.flat.gradient(value)
        assert gradient.abs().max() > 0
        torch.testing.assert_close(after.first, 0.1 * gradient, rtol=1e-7, atol=1e-10)  # Adam's first moment


def test_joint_training_learns_what_separate_steps_learn():
    settings = replace(SHORT, epochs=60, n_particles=10, lr_theta=2e-2)
    noises = []
    for joint in (False, True):
        fits = train([member(r, 0) for r in (IWAE, CHI)], X[:200], X[200:], replace(settings, joint=joint))
        noises.append(torch.stack([f.model.noise_sd.detach() for f in fits]))
    torch.testing.assert_close(noises[0], noises[1], rtol=0, atol=0.05)
    assert (noises[0] - 1).abs().max() > 0.1  # it has moved from its initial value


@pytest.mark.parametrize(
    "recipe",
    [
        replace(WW, name="score", phi=loss("forward_kl", "score")),
        replace(IWAE, name="pathwise", phi=loss("iwelbo", "pathwise")),
        replace(IWAE, name="mixed", phi=loss("elbo", "stl")),
        replace(IWAE, name="vr", phi=loss("vr_iwelbo", "dreg", alpha=0.5)),
    ],
)
def test_losses_that_joint_steps_do_not_support_are_refused(recipe):
    with pytest.raises(SettingError, match=rf"{recipe.name} \(.*\) cannot take joint steps"):
        train([member(recipe, 0)], X, X, replace(SHORT, joint=True))


@pytest.mark.parametrize("setting", [{"compile": True}, {"n_particles_theta": 50}])
def test_joint_steps_share_particles_and_are_not_compiled(setting):
    with pytest.raises(SettingError, match="joint steps share"):
        replace(SHORT, joint=True, **setting)
