r"""Probabilistic PCA, whose posterior, evidence and tail probabilities are known in closed form.

It has both parameterisations of the paper: `PPCA` with a fixed loading matrix and free diagonal noise (appendix), and
`LambdaPPCA` with :math:`\sigma^2 = 1/(1 - \lambda^2)` and off-diagonal loadings scaled by :math:`e^\lambda`
(section 3, after Turner & Sahani, 2011).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor, nn

from vaerdict.core import SettingError, ShapeError, per_member
from vaerdict.distributions import Elliptical, StandardNormal, Triangular
from vaerdict.networks import linear
from vaerdict.noise import as_source

_LOG_2PI = math.log(2 * math.pi)


class LinearGaussian(nn.Module):
    r"""Abstract: :math:`z \sim N(0, I)`, :math:`x \mid z \sim N(Wz + \mu, \mathrm{diag}(\sigma^2))`, solved exactly.

    In a stack of members the parameters have a leading member axis and batches are ``(members, n)``.
    """

    stackable = True

    def __init__(self, d: int) -> None:
        super().__init__()
        self.d = d

    @property
    def prior(self) -> StandardNormal:
        """The prior of z."""
        return StandardNormal(self.d)

    @property
    @abstractmethod
    def loading(self) -> Tensor:
        """W. Shapes: ``(p, d)``, or ``(members, p, d)``."""

    @property
    @abstractmethod
    def noise_sd(self) -> Tensor:
        """Standard deviation of the noise. Shapes: ``(p,)``, or ``(members, p)``."""

    @property
    @abstractmethod
    def center(self) -> Tensor:
        """The mean of x. Shapes: ``(p,)``, or ``(members, p)``."""

    def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
        """Log p(x, z). Shapes: ``(*batch, p), (K, *batch, d) -> (K, *batch)``."""
        if z.shape[-1] != self.d:
            raise ShapeError(
                f"z has {z.shape[-1]} latents, the model {self.d}; make both with the same latent dimension."
            )
        sd = per_member(self.noise_sd, 1)
        residual = (self._centred(x) - linear(z, self.loading)) / sd
        log_lik = -0.5 * (residual.square().sum(-1) + sd.shape[-1] * _LOG_2PI) - sd.log().sum(-1)
        return log_lik + self.prior.log_prob(z)

    def posterior_covariance(self) -> Tensor:
        """Covariance of z given x, which is equal for all x. Shapes: ``(d, d)``, or ``(members, d, d)``."""
        return self._posterior_covariance().to(self.noise_sd.dtype)

    def _posterior_covariance(self) -> Tensor:
        """In double precision, because a feature with little noise makes the precision almost singular."""
        scaled = (self.loading / self.noise_sd.unsqueeze(-1)).double()
        precision = torch.eye(self.d, device=scaled.device, dtype=scaled.dtype) + scaled.mT @ scaled
        return torch.cholesky_inverse(torch.linalg.cholesky(precision))

    def posterior(self, x: Tensor, *, inflate: float = 1.0) -> Elliptical:
        """The exact posterior of z for each x, with its variance multiplied by `inflate`; a proposal for these x.

        Shapes: ``(*batch, p) -> distribution over (*batch, d)``.
        """
        covariance = self._posterior_covariance()
        gain = covariance @ self.loading.mT.double() / self.noise_sd.square().unsqueeze(-2)
        loc = linear(self._centred(x), gain.to(x.dtype))
        tril = per_member(torch.linalg.cholesky(covariance).to(x.dtype), 2) * math.sqrt(inflate)
        return Elliptical(loc, Triangular(tril.expand(*loc.shape, self.d)))

    def log_evidence(self, x: Tensor) -> Tensor:
        """Exact log p(x). Shapes: ``(*batch, p) -> (*batch)``.

        Computed in double precision, because with little noise the covariance of x is almost singular.
        """
        loading, variance = self.loading.double(), self.noise_sd.double().square()
        root = Triangular(per_member(torch.linalg.cholesky(loading @ loading.mT + torch.diag_embed(variance)), 2))
        centred = self._centred(x)
        square = root.square_norm(centred.double()[None])[0]
        return (-0.5 * (square + x.shape[-1] * _LOG_2PI) - root.log_det()).to(centred.dtype)

    def tail_probability(self, x: Tensor, nu: Tensor | Sequence[float] | float) -> Tensor:
        """Exact P(z_1 >= nu | x) at one threshold, a float, or at T thresholds, a sequence or tensor.

        Shapes: ``(*batch, p), float -> (*batch)``; ``(*batch, p), (T,) -> (*batch, T)``.
        """
        posterior = self.posterior(x)
        sd = posterior.covariance()[..., 0, 0].sqrt()
        thresholds = torch.as_tensor(nu, dtype=x.dtype, device=x.device).reshape(-1, *(1,) * sd.dim())
        tail = torch.special.ndtr((posterior.loc[..., 0] - thresholds) / sd).movedim(0, -1)
        return tail[..., 0] if isinstance(nu, Real) else tail

    def _centred(self, x: Tensor) -> Tensor:
        center = per_member(self.center, 1)
        if x.shape[-1] != center.shape[-1]:
            raise ShapeError(
                f"x has {x.shape[-1]} features, the model {center.shape[-1]}; pass the features it was made for."
            )
        return x - center

    @torch.no_grad()
    def simulate(self, n: int, *, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw n pairs (x, z) from the model, on the model's device. Shapes: ``-> (n, p), (n, d)``."""
        source, sd = as_source(generator), self.noise_sd
        z = source.normal(n, (), self.d, like=sd)
        eps = source.normal(n, (), sd.shape[-1], like=sd)
        return self.center + linear(z, self.loading) + sd * eps, z


class PPCA(LinearGaussian):
    """pPCA with fixed loadings and mean; the noise, one scale per feature, is a parameter.

    Shapes: ``weight (p, d)``, ``noise_scale (p,)`` or a float, ``mean (p,)``, by default zero.

    >>> model = PPCA(torch.eye(3, 2), 0.5)
    >>> model.log_evidence(torch.zeros(4, 3)).shape
    torch.Size([4])
    >>> model.tail_probability(torch.zeros(4, 3), 0.3).shape
    torch.Size([4])
    >>> model.tail_probability(torch.zeros(4, 3), [0.0, 0.3, 0.6]).shape
    torch.Size([4, 3])
    """

    def __init__(self, weight: Tensor, noise_scale: Tensor | float, mean: Tensor | None = None) -> None:
        if weight.dim() != 2:
            raise ShapeError(f"weight has shape {tuple(weight.shape)}; expected (features, latents).")
        super().__init__(weight.shape[1])
        scale = torch.as_tensor(noise_scale, dtype=weight.dtype).expand(weight.shape[0]).clone()
        if not (scale > 0).all() or not torch.isfinite(scale).all():
            raise SettingError(f"noise_scale has minimum {scale.min().item():g}; it must be positive and finite.")
        self.weight = nn.Buffer(weight.detach().clone())
        self.mean = nn.Buffer(_mean(mean, weight))
        self.log_noise = nn.Parameter(scale.log().to(weight.device))

    @property
    def loading(self) -> Tensor:
        """W."""
        return self.weight

    @property
    def noise_sd(self) -> Tensor:
        """Standard deviation of the noise."""
        return self.log_noise.exp()

    @property
    def center(self) -> Tensor:
        """The mean of x."""
        return self.mean


class LambdaPPCA(LinearGaussian):
    r"""pPCA with one parameter: :math:`\sigma^2 = 1/(1-\lambda^2)`, :math:`W_{ij} = e^\lambda W'_{ij}` for i != j."""

    def __init__(self, base: Tensor, lam: float, mean: Tensor | None = None) -> None:
        if base.dim() != 2:
            raise ShapeError(f"base has shape {tuple(base.shape)}; expected (features, latents).")
        super().__init__(base.shape[1])
        if not -1 < lam < 1:
            raise SettingError(f"lam={lam} must lie in (-1, 1): the noise variance is 1/(1 - lam^2).")
        self.base = nn.Buffer(base.detach().clone())
        self.mean = nn.Buffer(_mean(mean, base))
        self.raw = nn.Parameter(torch.atanh(torch.tensor(lam, dtype=base.dtype)).to(base.device))

    @property
    def lam(self) -> Tensor:
        """Lambda, in (-1, 1). Shapes: ``()``, or ``(members,)``."""
        return torch.tanh(self.raw)

    @property
    def loading(self) -> Tensor:
        """W."""
        lam = self.lam[..., None, None]
        on_diagonal = torch.eye(*self.base.shape[-2:], device=self.base.device) > 0
        return torch.where(on_diagonal, self.base, lam.exp() * self.base)

    @property
    def noise_sd(self) -> Tensor:
        """Standard deviation of the noise."""
        return (1 - self.lam.square()).rsqrt().unsqueeze(-1).expand(*self.lam.shape, self.base.shape[-2])

    @property
    def center(self) -> Tensor:
        """The mean of x."""
        return self.mean


def _mean(mean: Tensor | None, weight: Tensor) -> Tensor:
    if mean is None:
        return weight.new_zeros(weight.shape[0])
    if mean.shape != weight.shape[:1]:
        raise ShapeError(
            f"mean has shape {tuple(mean.shape)}; expected one value for each of {weight.shape[0]} features."
        )
    return mean.detach().to(weight, copy=True)
