"""`from_vae`: log-weights of people's own VAEs against hand computations, and one clear line for every misuse."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    NegativeBinomial,
    Normal,
    Poisson,
)

from checks import assert_mean
from vaerdict import inference
from vaerdict.core import DataError, Model, Proposal, SettingError, ShapeError, VaerdictError, check_model
from vaerdict.models import Autoencoder, from_vae
from vaerdict.noise import global_state_from, seeded

N, P, D, K = 7, 4, 2, 3
Z = torch.randn(K, N, D, generator=seeded(1))
REAL = torch.randn(N, P, generator=seeded(2))
UNIT = torch.rand(N, P, generator=seeded(3))
COUNTS = torch.poisson(torch.full((N, P), 3.0), generator=seeded(4))
CONDITION = torch.randn(N, 3, generator=seeded(5))


def linear(n_in: int, n_out: int, seed: int = 0) -> nn.Linear:
    with global_state_from(seeded(seed)):
        return nn.Linear(n_in, n_out)


class Encoder(nn.Module):
    """(mean, log_variance) from one layer, with dropout and batch norm as people have them."""

    def __init__(self, n_in: int = P, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer, self.dropout = linear(n_in, 2 * D, 6), nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(n_in)

    def forward(self, x: Tensor, *conditions: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(self.dropout(self.norm(torch.cat([x.flatten(1), *conditions], -1))))
        return out[:, :D], out[:, D:] - 1


class Convolutional(nn.Module):
    """A decoder of images ``(m, 1, 4, 4)`` that accepts one batch axis and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(D, 4)
        with global_state_from(seeded(8)):
            self.up = nn.ConvTranspose2d(1, 1, 2, stride=2)

    def forward(self, z: Tensor) -> Tensor:
        assert z.dim() == 2
        return self.up(self.layer(z).reshape(-1, 1, 2, 2))


DECODER = linear(D, P, 7)
STANDARD = Independent(Normal(torch.zeros(D), torch.ones(D)), 1)


def agrees(model: Autoencoder, x: object, expected: Tensor, z: Tensor = Z) -> None:
    """Compare log_joint with a hand computation, prepared or not."""
    for observations in (x, model.prepare(x)):
        torch.testing.assert_close(model.log_joint(observations, z), expected, rtol=1e-5, atol=1e-4)


# -------------------------------------------------------------------------------------------------- log densities
def test_it_is_a_model_with_a_proposal():
    model = from_vae(Encoder(), DECODER, "gaussian", scale=1.0, d=D)
    assert isinstance(model, Model)
    assert isinstance(model.encoder, Proposal)
    assert model.prior.event_shape == (D,)


def test_a_gaussian_with_a_fixed_scale():
    scale = torch.tensor([0.5, 1.0, 2.0, 3.0])
    for given, used in ((0.7, torch.tensor(0.7)), (scale, scale), (nn.Parameter(scale), scale)):
        model = from_vae(Encoder(), DECODER, "gaussian", scale=given)
        agrees(model, REAL, Normal(DECODER(Z), used).log_prob(REAL).sum(-1) + STANDARD.log_prob(Z))
    assert sum(p is model.likelihood.value for p in model.parameters()) == 1  # a learned scale stays a parameter


@pytest.mark.parametrize("output", ["log_variance", "sd", "log_sd", "variance"])
def test_a_gaussian_whose_decoder_returns_the_scale(output):
    sd = 0.5 + DECODER(Z).sigmoid()
    second = {"log_variance": lambda s: 2 * s.log(), "sd": lambda s: s, "log_sd": torch.log, "variance": torch.square}
    decoder = lambda z: (DECODER(z), second[output](0.5 + DECODER(z).sigmoid()))  # noqa: E731
    model = from_vae(Encoder(), decoder, "gaussian", output=output)
    agrees(model, REAL, Normal(DECODER(Z), sd).log_prob(REAL).sum(-1) + STANDARD.log_prob(Z))


def test_bernoulli_logits_and_probabilities():
    logits = DECODER(Z)
    expected = (UNIT * logits - nn.functional.softplus(logits)).sum(-1) + STANDARD.log_prob(Z)
    agrees(from_vae(Encoder(), DECODER, "bernoulli"), UNIT, expected)
    probabilities = nn.Sequential(DECODER, nn.Sigmoid())
    agrees(from_vae(Encoder(), probabilities, "bernoulli", output="probabilities"), UNIT, expected)


def test_poisson_and_negative_binomial():
    expected = Poisson(DECODER(Z).exp()).log_prob(COUNTS).sum(-1) + STANDARD.log_prob(Z)
    agrees(from_vae(Encoder(), DECODER, "poisson"), COUNTS.long(), expected)
    agrees(from_vae(Encoder(), lambda z: DECODER(z).exp(), "poisson", output="mean"), COUNTS, expected)
    r = torch.tensor([0.5, 1.0, 2.0, 8.0])
    expected = NegativeBinomial(r, logits=DECODER(Z) - r.log()).log_prob(COUNTS).sum(-1) + STANDARD.log_prob(Z)
    agrees(from_vae(Encoder(), DECODER, "nb", dispersion=r), COUNTS, expected)
    agrees(from_vae(Encoder(), lambda z: (DECODER(z), r.log()[None]), "nb"), COUNTS, expected)
    pair = from_vae(Encoder(), lambda z: (DECODER(z).exp(), r[None]), "nb", output="mean")
    agrees(pair, COUNTS, expected)


def test_a_function_of_the_output_and_a_decoder_that_returns_a_distribution():
    expected = Poisson(DECODER(Z).exp()).log_prob(COUNTS).sum(-1) + STANDARD.log_prob(Z)
    agrees(from_vae(Encoder(), DECODER, lambda out: Independent(Poisson(out.exp()), 1)), COUNTS, expected)
    agrees(from_vae(Encoder(), lambda z: Poisson(DECODER(z).exp())), COUNTS, expected)
    agrees(from_vae(Encoder(), lambda z: DECODER(z).exp(), Poisson), COUNTS, expected)


def test_images_and_convolutions():
    x = torch.bernoulli(torch.full((N, 1, 4, 4), 0.5), generator=seeded(9))
    decoder, z = Convolutional(), Z
    logits = decoder(z.reshape(-1, D)).reshape(K, N, -1)
    expected = Bernoulli(logits=logits).log_prob(x.flatten(1)).sum(-1) + STANDARD.log_prob(z)
    agrees(from_vae(Encoder(16), decoder, "bernoulli"), x, expected)
    agrees(from_vae(Encoder(16), decoder, "bernoulli"), x.flatten(1), expected)  # a decoder of images for flat data
    whole_image = from_vae(Encoder(16), decoder, lambda out: Independent(Bernoulli(logits=out), 3))
    agrees(whole_image, x, expected)
    assert whole_image.decode(z).shape == (K, N, 1, 4, 4)


def test_other_priors():
    mixture = MixtureSameFamily(
        Categorical(logits=torch.zeros(3)), Independent(Normal(torch.randn(3, D, generator=seeded(1)), 0.5), 1)
    )
    likelihood = Normal(DECODER(Z), 1.0).log_prob(REAL).sum(-1)
    agrees(from_vae(Encoder(), DECODER, "gaussian", mixture, scale=1.0), REAL, likelihood + mixture.log_prob(Z))
    agrees(from_vae(Encoder(), DECODER, "gaussian", lambda: mixture, scale=1.0), REAL, likelihood + mixture.log_prob(Z))
    coordinates = from_vae(Encoder(), DECODER, "gaussian", Normal(torch.zeros(D), torch.ones(D)), scale=1.0)
    agrees(coordinates, REAL, likelihood + STANDARD.log_prob(Z))


class XC(NamedTuple):
    x: Tensor
    c: Tensor


def test_conditions_of_encoder_decoder_and_prior():
    decoder, prior = linear(D + 3, P), linear(3, D)

    def decode(z: Tensor, c: Tensor) -> Tensor:
        return decoder(torch.cat([z, c], -1))

    def conditional(c: Tensor) -> Independent:
        return Independent(Normal(prior(c), 0.5), 1)

    mean = decoder(torch.cat([Z, CONDITION.expand(K, N, 3)], -1))
    expected = Normal(mean, 1.0).log_prob(REAL).sum(-1) + Normal(prior(CONDITION), 0.5).log_prob(Z).sum(-1)
    model = from_vae(Encoder(P + 3), decode, "gaussian", conditional, scale=1.0)
    agrees(model, (REAL, CONDITION), expected)
    agrees(model, XC(REAL, CONDITION), expected)
    torch.testing.assert_close(model.prior((REAL, CONDITION)).mean, prior(CONDITION))
    torch.testing.assert_close(model.decode(Z, (REAL, CONDITION)), mean)
    assert model.encoder.draw((REAL, CONDITION), K, generator=seeded(0)).z.shape == (K, N, D)

    def encode(x: Tensor, *, c: Tensor) -> tuple[Tensor, Tensor]:
        return (torch.cat([x, c], -1)[:, :D], torch.zeros(len(x), D))

    by_name = from_vae(encode, lambda z, c: decode(z, c), "gaussian", lambda c: conditional(c), scale=1.0)
    agrees(by_name, {"x": REAL, "c": CONDITION}, expected)


# ------------------------------------------------------------------------------------------------------ as they are
def test_networks_are_evaluated_without_dropout_and_left_alone():
    """With dropout in training mode, functions and methods of modules give the weights of evaluation mode."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decoder = Encoder(dropout=0.5), nn.Sequential(DECODER, nn.Dropout(0.5))

        def decode(self, z: Tensor) -> Tensor:
            return self.decoder(z)

    whole = Whole().train()
    before = {name: t.clone() for name, t in whole.state_dict().items()}
    plain = from_vae(copy.deepcopy(whole.encode).eval(), DECODER, "gaussian", scale=1.0, d=D)
    expected = inference.posterior(plain, REAL, plain.encoder, 50, seed=0).log_w
    for encode, decode in (
        (whole.encode, whole.decode),
        (lambda x: whole.encode(x), lambda z: whole.decode(z)),
        (whole.encode.forward, whole.decoder),
    ):
        model = from_vae(encode, decode, "gaussian", scale=1.0, d=D)
        assert torch.equal(inference.posterior(model, REAL, model.encoder, 50, seed=0).log_w, expected)
    assert all(m.training for m in whole.modules())
    assert all(p.requires_grad and p.grad is None for p in whole.parameters())
    assert all(torch.equal(t, before[name]) for name, t in whole.state_dict().items())


def test_dropout_that_cannot_be_switched_off_is_refused():
    hidden = {"encoder": Encoder(dropout=0.5), "decoder": nn.Sequential(DECODER, nn.Dropout(0.5))}
    with torch.random.fork_rng(), pytest.raises(SettingError, match=r"the encoder gives another output .*call .eval"):
        check_model(vae(encoder=lambda x: hidden["encoder"](x)), REAL)
    with torch.random.fork_rng(), pytest.raises(SettingError, match=r"the decoder gives another output .*dropout"):
        check_model(vae(decoder=lambda z: hidden["decoder"](z)), REAL)
    hidden["encoder"] = Encoder()  # batch norm in training mode depends on the other observations
    with pytest.raises(SettingError, match=r"the encoder gives another output .*batch norm"):
        check_model(vae(encoder=lambda x: hidden["encoder"](x)), REAL)
    hidden["encoder"].eval()
    check_model(vae(encoder=lambda x: hidden["encoder"](x)), REAL)


def test_a_copy_of_a_model_is_of_modules_not_of_functions():
    whole = from_vae(Encoder(), DECODER, "gaussian", scale=1.0)
    twin = copy.deepcopy(whole)
    twin.decoder.weight.data.zero_()  # type: ignore[union-attr,operator]
    assert bool(DECODER.weight.any())
    method = copy.deepcopy(from_vae(Encoder().forward, DECODER.forward, "gaussian", scale=1.0))
    assert method.decoder.function.__self__ is method.decoder.networks[0]  # type: ignore[union-attr]
    assert method.decoder.networks[0] is not DECODER  # type: ignore[union-attr,index]
    with pytest.raises(SettingError, match=r"uses networks that are not copied with it.*pass a module"):
        copy.deepcopy(from_vae(Encoder(), lambda z: DECODER(z), "gaussian", scale=1.0))


# ---------------------------------------------------------------------------------------------------------- answers
class Linear(NamedTuple):
    """A linear VAE and its exact posterior means."""

    model: Autoencoder
    mean: Tensor


def linear_vae() -> Linear:
    decoder, sd = copy.deepcopy(DECODER).double(), 0.6
    precision = torch.eye(D, dtype=torch.double) + decoder.weight.mT @ decoder.weight / sd**2
    covariance = torch.linalg.inv(precision).detach()

    def mean(x: Tensor) -> Tensor:
        return (x - decoder.bias) @ decoder.weight / sd**2 @ covariance

    def encode(x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(mean(x), 1.3 * covariance)  # too wide: the weights are bounded

    return Linear(from_vae(encode, decoder, "gaussian", scale=sd, d=D), mean(REAL.double()).detach())


def test_weights_are_unbiased_against_the_exact_evidence():
    """False-alarm rate 1e-6."""
    model = linear_vae().model
    weight, bias = (p.detach() for p in model.decoder.parameters())
    evidence = MultivariateNormal(bias, weight @ weight.mT + 0.36 * torch.eye(P)).log_prob(REAL.double())
    z, log_q = model.encoder.draw(REAL.double(), 20_000, generator=seeded(3))
    ratio = (model.log_joint(REAL.double(), z) - log_q - evidence).exp()
    assert_mean(ratio, 1.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(1.01 * ratio, 1.0, rate=1e-6)


def test_an_answer_by_the_encoder_is_exact_within_its_tolerance():
    model, mean = linear_vae()
    answer = inference.expect(model, REAL.double(), lambda z: z, model.encoder, 256, tolerance=0.1, seed=0)
    assert (answer.verdict == 0).all()
    assert (answer.value - mean).abs().max() < 0.1


# ------------------------------------------------------------------------------------------------------- bad inputs
def vae(**settings: object) -> Autoencoder:
    arguments = {"encoder": Encoder(), "decoder": DECODER, "likelihood": "gaussian", "scale": 1.0} | settings
    return from_vae(**arguments)  # type: ignore[arg-type]


ONE = torch.ones(N, D)
AT_ONCE = {
    "encoder= is the class Encoder": {"encoder": Encoder},
    "decoder= is a Tensor": {"decoder": REAL},
    "likelihood='normal' is not known; use 'bernoulli', 'gaussian'": {"likelihood": "normal", "scale": None},
    "likelihood= is a int": {"likelihood": 3, "scale": None},
    "spread='std' is not known; use one of 'log_variance', 'sd'": {"spread": "std"},
    "output='mean' is not known for likelihood='gaussian'": {"output": "mean"},
    "scale= belongs to likelihood='gaussian'": {"likelihood": "bernoulli"},
    "dispersion= belongs to likelihood='nb'": {"dispersion": 1.0},
    "output='sd' belongs to the named likelihoods": {"likelihood": None, "scale": None, "output": "sd"},
    "scale=-1.0 must be positive and finite": {"scale": -1.0},
    "the prior is the class Normal; pass a distribution": {"prior": Normal},
    "the prior is a tensor of shape": {"prior": ONE},
}


@pytest.mark.parametrize("message", AT_ONCE)
def test_settings_without_meaning(message):
    with pytest.raises(SettingError, match=message):
        vae(**AT_ONCE[message])


WITH_DATA = {
    # the encoder
    "the encoder returned a tensor of shape .7, 4.; it must return .mean, log_variance.": {"encoder": linear(P, 4)},
    "the encoder returned a tuple of .*, .*, .*; it must return": {"encoder": lambda x: (x, x, x)},
    "the encoder returned tensors of shapes .7,. and .7,. for 7 obs": {"encoder": lambda x: (x[:, 0], x[:, 0])},
    "shapes .7, 2. and .7, 4. for 7 observations": {"encoder": lambda x: (x[:, :2], x)},
    "batch shape .5,. for 7 observations; it must have one row": {"encoder": lambda x: Normal(ONE[:5], 1.0)},
    "the encoder is a Normal with batch shape .. and event shape ..; it must be over": {
        "encoder": lambda x: Normal(0.0, 1.0)
    },
    "the encoder failed on a tensor of shape .7, 4.: .*mat1 and mat2": {"encoder": Encoder(9).layer},
    "second output of the encoder is positive everywhere .1 to 1.*spread='sd', or": {"encoder": lambda x: (ONE, ONE)},
    "14 of 14 values of the sd of the encoder are not positive; was it spread='log_variance'": {
        "encoder": lambda x: (ONE, -ONE),
        "spread": "sd",
    },
    "the mean of the encoder holds 2 non-finite values of 14, for 1 of 7 observations .at 3.": {
        "encoder": lambda x: (torch.where(torch.arange(len(x))[:, None] == 3, torch.nan, x[:, :D]), -ONE)
    },
    "the encoder gives another output when the same observations .*or sampling inside": {
        "encoder": lambda x: (torch.randn(len(x), D, generator=seeded(len(x))), -ONE[: len(x)])
    },
    "from_vae was given d=3, but the encoder returns 2 latents": {"d": 3},
    # the prior
    "the prior has batch shape .. and event shape .3,., the encoder returns 2": {
        "prior": Normal(torch.zeros(3), torch.ones(3))
    },
    "event shape .., the encoder returns 2 latents": {"prior": Normal(0.0, 1.0)},
    # the decoder
    "the decoder failed on a tensor of shape .7, 2.: .*mat1 and mat2": {"decoder": linear(3, P)},
    "the decoder returned a tensor of shape .7, 5. for 7 latents, the observations are .7, 4.": {
        "decoder": linear(D, 5)
    },
    "the decoder returned a dict; likelihood='gaussian' needs one tensor, or a pair": {"decoder": lambda z: {}},
    "the decoder returned a mean alone; likelihood='gaussian' needs scale= too": {"scale": None},
    "the decoder returned its own scale; leave out scale=": {"decoder": lambda z: (DECODER(z), DECODER(z))},
    "the decoder's output, .* holds 28 non-finite values of 28, for 7 of 7": {"decoder": lambda z: DECODER(z) / 0},
    "the decoder gives another output": {"decoder": lambda z: DECODER(z) + len(z)},
    "output, 1 to 1, may be sd where log_variance is expected; say": {
        "decoder": lambda z: (DECODER(z), torch.ones(len(z), P)),
        "scale": None,
    },
    "output, -1 to -1, is no sd; was it output='log_variance'": {
        "decoder": lambda z: (DECODER(z), -torch.ones(len(z), P)),
        "scale": None,
        "output": "sd",
    },
    "scale= has shape .3,.; pass a number, or one for each of 4 features": {"scale": torch.ones(3)},
    "without likelihood= the decoder must return a torch distribution, not a tensor": {
        "likelihood": None,
        "scale": None,
    },
    "the function likelihood= returned a tensor of shape .7, 4.; it must return a torch": {
        "likelihood": lambda out: out,
        "scale": None,
    },
    "the likelihood is a Normal over .7, 2., the observations are .7, 4.": {
        "likelihood": lambda out: Normal(out[:, :2], 1.0),
        "scale": None,
    },
}


@pytest.mark.parametrize("message", WITH_DATA)
def test_parts_that_do_not_fit_are_refused_in_one_line_at_the_first_data(message):
    model = vae(**WITH_DATA[message])
    with pytest.raises(VaerdictError, match=message) as caught:
        check_model(model, REAL)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


NOT_FITTING = [
    ("bernoulli", REAL, "values of x are outside .0, 1.*rescale x"),
    ("poisson", COUNTS - 1, r"values of x are negative or not whole numbers \(such as -1\); pass raw counts"),
    ("poisson", COUNTS + 0.5, "28 of 28 values of x are negative or not whole numbers .*pass raw counts"),
    ("nb", UNIT, "negative or not whole numbers"),
    (lambda out: Poisson(out.exp()), COUNTS - 1, "values of x are outside the support of the likelihood, a Poisson"),
]


@pytest.mark.parametrize(("likelihood", "x", "message"), NOT_FITTING)
def test_data_that_do_not_fit_the_likelihood(likelihood, x, message):
    dispersion = 1.0 if likelihood == "nb" else None
    model = vae(likelihood=likelihood, scale=None, dispersion=dispersion)
    with pytest.raises(DataError, match=message):
        check_model(model, x)
    model = vae(likelihood=likelihood, scale=None, dispersion=dispersion)
    model.check_data(COUNTS.clamp_max(1))
    with pytest.raises(DataError, match="x"):  # and later too
        model.log_joint(x, Z)


def test_support_is_checked_where_torch_was_told_not_to(monkeypatch):
    """Packages turn the checks of distributions off for the whole process."""
    monkeypatch.setattr(Distribution, "_validate_args", False)
    model = vae(likelihood=lambda out: Poisson(out.exp()), scale=None)
    model.check_data(COUNTS)
    with pytest.raises(DataError, match="outside its support"):
        model.log_joint(COUNTS - 1, Z)


@pytest.mark.parametrize(
    ("likelihood", "x", "message"),
    [
        ("bernoulli", UNIT, "may be probabilities where logits is expected; say what it is: output='probabilities'"),
        ("poisson", COUNTS, "may be mean where log_mean is expected"),
    ],
)
def test_outputs_with_two_meanings_are_refused(likelihood, x, message):
    probabilities = nn.Sequential(DECODER, nn.Sigmoid())
    with pytest.raises(SettingError, match=message):
        check_model(vae(decoder=probabilities, likelihood=likelihood, scale=None), x)
    first, second = ("log_mean", "mean") if likelihood == "poisson" else ("logits", "probabilities")
    for word in (first, second):
        check_model(vae(decoder=probabilities, likelihood=likelihood, scale=None, output=word), x)
    model = vae(likelihood=likelihood, scale=None, output=second)
    with pytest.raises(SettingError, match=f"is no {second}; was it output='{first}'"):
        check_model(model, x)


def test_axes_in_another_order_are_refused():
    x = torch.rand(N, 3, 2, 2, generator=seeded(1))
    decoder = lambda z: z.repeat(1, 6).reshape(-1, 2, 2, 3)  # noqa: E731
    with pytest.raises(ShapeError, match="the features of one observation in the same order"):
        check_model(vae(encoder=Encoder(12), decoder=decoder), x)


def test_a_conditional_vae_with_the_wrong_number_of_arguments():
    with pytest.raises(
        SettingError, match=r"the decoder failed on a tensor of shape .7, 2., a tensor of shape .7, 3.: .*argument"
    ):
        check_model(vae(encoder=Encoder(P + 3)), (REAL, CONDITION))
    model = vae(encoder=Encoder(P + 3), decoder=lambda z, c: DECODER(z), prior=lambda c: Normal(ONE[:3], 1.0))
    with pytest.raises(ShapeError, match=r"batch shape .3,. and event shape .2,.*one for each of 7 observations"):
        check_model(model, (REAL, CONDITION))


def test_latents_are_counted_by_the_first_data():
    model = vae()
    with pytest.raises(SettingError, match="the number of latents is not known before the model has seen data"):
        _ = model.prior
    check_model(model, REAL)
    assert model.prior.event_shape == (D,)
    with pytest.raises(ShapeError, match="z has 3 latents, the encoder 2"):
        model.log_joint(REAL, torch.zeros(K, N, 3))


def test_objects_that_are_no_models():
    with pytest.raises(SettingError, match=r"the model Linear has no log_joint and no prior; .*from_vae"):
        check_model(DECODER)
    with pytest.raises(SettingError, match="the model is the class Encoder; pass an object of it"):
        check_model(Encoder)
    model = linear_vae().model
    assert check_model(model, REAL.double()) is model
