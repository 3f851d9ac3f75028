"""Training a count model: with and without computing once what does not depend on z, and against scvi-tools.

All times are CPU seconds of one thread, which other load on the machine does not inflate.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vaerdict.core import Progress, silent
from vaerdict.datasets import appendix
from vaerdict.likelihoods import CountLikelihood, CountParameters, NegativeBinomial, ZeroInflated
from vaerdict.models.counts import CountModel
from vaerdict.noise import global_state_from, seeded
from vaerdict.proposals import OfCounts
from vaerdict.training import IWAE, VAE, Member, Recipe, Settings, train
from vaerdict_paper.benchmarks.timing import one_thread, watched

log = logging.getLogger("vaerdict.paper.counts")  # below the logger that the commands print

PEERS = ("scvi",)

_D, _HIDDEN = 10, (128,)
_LONG = 1.0  # seconds of an epoch above which fewer are averaged


@dataclass(frozen=True)
class Textbook:
    """The negative binomial of ``torch.distributions``: all gamma functions computed for every particle."""

    dispersed = True
    inflated = False
    per_cell = False

    def log_prob(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """Log-probability of every entry."""
        assert parameters.log_dispersion is not None
        logits = parameters.log_mean - parameters.log_dispersion
        total = parameters.log_dispersion.exp()
        return torch.distributions.NegativeBinomial(total, logits=logits, validate_args=False).log_prob(x)

    def fixed(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """The part that does not depend on z: none."""
        return x.new_zeros(x.shape[:-1])

    def moving(self, x: Tensor, parameters: CountParameters) -> Tensor:
        """The part that depends on z: all of it."""
        return self.log_prob(x, parameters).sum(-1)

    def sample(self, parameters: CountParameters, *, generator: torch.Generator) -> Tensor:
        """Draw counts."""
        return NegativeBinomial().sample(parameters, generator=generator)


def run(*, quick: bool = False, progress: Progress = silent) -> list[dict[str, Any]]:
    """CPU seconds per epoch: the 30-particle IWELBO with and without hoisting, the ELBO against scvi-tools."""
    cases: list[Callable[[], dict[str, Any] | None]] = [
        lambda: _hoisting("dense", _dense(200 if quick else 1000)),
        lambda: _hoisting("sparse", sparse_counts(200 if quick else 1000, 100 if quick else 2000)),
        lambda: _against_scvi(NegativeBinomial(), "nb", quick),
        lambda: _against_scvi(ZeroInflated(per_cell=True), "zinb", quick),
    ]
    rows = []
    for i, case in enumerate(cases):
        with one_thread():
            row = case()
        rows += [] if row is None else [row]
        progress(i + 1, len(cases), "cases")
    return rows


def _hoisting(kind: str, x: Tensor) -> dict[str, Any]:
    ours, peer = (_epoch_seconds(x, likelihood, IWAE, 30) for likelihood in (NegativeBinomial(), Textbook()))
    case = f"IWELBO, 30 particles, {len(x):,} x {x.shape[1]:,} {kind}"
    return _row(case, ours, "every particle pays for all terms", peer)


def _against_scvi(likelihood: CountLikelihood, name: str, quick: bool) -> dict[str, Any] | None:
    x = sparse_counts(500, 100) if quick else sparse_counts(10_000, 2000)
    peer = _scvi_epoch_seconds(x, name)
    if peer is None:
        log.warning("scvi-tools is not installed (`pip install vaerdict[rivals]`): its rows are left out")
        return None
    case = f"ELBO, {name.upper()}, {len(x):,} x {x.shape[1]:,} sparse"
    return _row(case, _epoch_seconds(x, likelihood, VAE, 1), "scvi-tools", peer)


def _row(case: str, ours: float, peer: str, peer_s: float) -> dict[str, Any]:
    return {"case": case, "ours_s": ours, "peer": peer, "peer_s": peer_s, "ratio": peer_s / ours}


def _dense(n: int) -> Tensor:
    return appendix(0, n_cells=n).counts


def sparse_counts(n: int, n_genes: int) -> Tensor:
    """Counts as sparse as those of a droplet experiment: nine of ten are zero."""
    g = seeded(0)
    rate = (1.5 * torch.randn(n_genes, generator=g) - 3).exp() * (0.5 * torch.randn(n, 1, generator=g)).exp()
    x = torch.poisson(rate * torch._standard_gamma(torch.full((n, n_genes), 2.0), generator=g), generator=g)
    x[:, 0] += 1  # no cell is empty
    return x


def _epoch_seconds(x: Tensor, likelihood: CountLikelihood, recipe: Recipe, k: int) -> float:
    model = CountModel.start(x, _D, generator=seeded(0), likelihood=likelihood, hidden=_HIDDEN)
    member = Member(model, OfCounts().make(x, _D, hidden=_HIDDEN, generator=seeded(1)), recipe, 0)

    def epochs(n: int) -> None:
        settings = Settings(n_particles=k, epochs=n, patience=None, check_every=n, joint=True, score_particles=1)
        train([member], x, x[:1], settings)

    return _per_epoch(epochs)


def _scvi_epoch_seconds(x: Tensor, likelihood: Any) -> float | None:
    """Seconds per epoch of scvi-tools with the same widths and batch size; None if it is not installed."""
    try:
        import anndata
        import scvi
        from scipy import sparse
    except ImportError:
        return None
    with _quiet():
        data = anndata.AnnData(sparse.csr_matrix(x.numpy()))
        scvi.model.SCVI.setup_anndata(data)

        def epochs(n: int) -> None:
            model = scvi.model.SCVI(data, n_hidden=_HIDDEN[0], n_latent=_D, gene_likelihood=likelihood)
            model.train(n, accelerator="cpu", train_size=1.0, batch_size=128, enable_progress_bar=False, logger=False)

        with global_state_from(seeded(0)):
            return _per_epoch(epochs)


def _per_epoch(epochs: Callable[[int], None]) -> float:
    """Seconds of one epoch, from the difference of several and one, which excludes the set-up."""
    epochs(1)  # warms up
    once = _timed(epochs, 1)
    n = 2 if once > _LONG else 10
    return (_timed(epochs, 1 + n) - once) / n


def _timed(epochs: Callable[[int], None], n: int) -> float:
    with watched() as watch:
        epochs(n)
    return watch.cpu


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the peer's warnings and log messages."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
