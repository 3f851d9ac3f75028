"""Training a count model: against scvi-tools, and with and without computing once what does not depend on z.

All times are CPU seconds of one thread, which other load on the machine does not inflate. scvi-tools has the widths,
latents, batch size (its default) and cells of our model, all in memory as dense or as sparse rows, and its defaults
otherwise: it computes in its own way what is an epoch of the ELBO with one particle in both. Its networks have batch
normalisation and dropout, ours have not.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from scipy import sparse
from torch import Tensor

from vaerdict.core import Progress, silent
from vaerdict.datasets import appendix
from vaerdict.likelihoods import CountLikelihood, CountParameters, NegativeBinomial, ZeroInflated
from vaerdict.models.counts import CountModel
from vaerdict.noise import global_state_from, seeded
from vaerdict.proposals import OfCounts
from vaerdict.training import IWAE, VAE, Member, Recipe, Settings, train
from vaerdict_paper.benchmarks.timing import ABLATION, LIKE, comparison, interleaved, one_thread, watched

log = logging.getLogger("vaerdict.paper.counts")  # below the logger that the commands print

PEERS = ("scvi",)

_D, _HIDDEN = 10, (128,)
_MORE = 2  # epochs whose seconds are averaged
_BATCH = 128

Epochs = Callable[[int], None]
"""Trains a new model for a number of epochs."""


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


def run(*, quick: bool = False, progress: Progress = silent) -> Iterator[dict[str, Any]]:
    """CPU seconds per epoch: the ELBO against scvi-tools, the 30-particle IWELBO with and without hoisting."""
    repeats = 1 if quick else 3
    cases: list[Callable[[], dict[str, Any] | None]] = [
        partial(_against_scvi, NegativeBinomial(), "nb", False, quick, repeats),
        partial(_against_scvi, NegativeBinomial(), "nb", True, quick, repeats),
        partial(_against_scvi, ZeroInflated(per_cell=True), "zinb", False, quick, repeats),
        lambda: _hoisting("dense", _dense(200 if quick else 1000), repeats),
        lambda: _hoisting("mostly zero", sparse_counts(200 if quick else 500, 100 if quick else 2000), repeats),
    ]
    for i, case in enumerate(cases):
        with one_thread():
            row = case()
        if row is not None:
            yield row
        progress(i + 1, len(cases), "cases")


def _hoisting(kind: str, x: Tensor, repeats: int) -> dict[str, Any]:
    both = {"ours": _ours(x, NegativeBinomial(), IWAE, 30), "peer": _ours(x, Textbook(), IWAE, 30)}
    seconds = _per_epoch(both, repeats)
    case = f"epoch of the IWELBO, 30 particles, {len(x):,} x {x.shape[1]:,} counts, {kind}"
    hoisted = "our likelihood: terms without z once per cell, explicit derivatives, no gamma functions of zeros"
    slow = "the formula of torch.distributions for every particle"
    return comparison(ABLATION, case, slow, seconds["ours"], seconds["peer"], differs=hoisted)


def _against_scvi(
    likelihood: CountLikelihood, name: str, as_sparse: bool, quick: bool, repeats: int
) -> dict[str, Any] | None:
    x = sparse_counts(500, 100) if quick else sparse_counts(2500, 2000)
    rows: Any = sparse.csr_matrix(x.numpy()) if as_sparse else x
    with _quiet():
        peer = _scvi(rows, name)
    if peer is None:
        log.warning("scvi-tools is not installed (`pip install vaerdict[rivals]`): its rows are left out")
        return None
    with _quiet(), global_state_from(seeded(0)):
        seconds = _per_epoch({"ours": _ours(rows, likelihood, VAE, 1, start=x), "peer": peer}, repeats)
    stored = "sparse" if as_sparse else "dense"
    case = f"epoch of the ELBO, {name.upper()}, {len(x):,} x {x.shape[1]:,} counts, {stored} in memory"
    networks = "its networks have batch normalisation and dropout"
    return comparison(LIKE, case, "scvi-tools", seconds["ours"], seconds["peer"], differs=networks)


def _dense(n: int) -> Tensor:
    return appendix(0, n_cells=n).counts


def sparse_counts(n: int, n_genes: int) -> Tensor:
    """Counts as sparse as those of a droplet experiment: nine of ten are zero."""
    g = seeded(0)
    rate = (1.5 * torch.randn(n_genes, generator=g) - 3).exp() * (0.5 * torch.randn(n, 1, generator=g)).exp()
    x = torch.poisson(rate * torch._standard_gamma(torch.full((n, n_genes), 2.0), generator=g), generator=g)
    x[:, 0] += 1  # no cell is empty
    return x


def _ours(x: Any, likelihood: CountLikelihood, recipe: Recipe, k: int, *, start: Tensor | None = None) -> Epochs:
    """Training on dense or sparse counts `x`; networks are initialised from `start`, dense counts, `x` by default."""
    dense = x if start is None else start
    model = CountModel.start(dense, _D, generator=seeded(0), likelihood=likelihood, hidden=_HIDDEN)
    member = Member(model, OfCounts().make(dense, _D, hidden=_HIDDEN, generator=seeded(1)), recipe, 0)

    def epochs(n: int) -> None:
        settings = Settings(
            n_particles=k,
            epochs=n,
            batch_size=_BATCH,
            patience=None,
            check_every=n,
            joint=True,
            score_particles=1,
        )
        train([member], x, dense[:1], settings)

    return epochs


def _scvi(x: Any, likelihood: Any) -> Epochs | None:
    """Training by scvi-tools with the same widths and batch size; None if it is not installed."""
    try:
        import anndata
        import scvi
    except ImportError:
        return None
    data = anndata.AnnData(x.numpy() if isinstance(x, Tensor) else x)
    scvi.model.SCVI.setup_anndata(data)

    def epochs(n: int) -> None:
        model = scvi.model.SCVI(data, n_hidden=_HIDDEN[0], n_latent=_D, gene_likelihood=likelihood)
        model.train(n, accelerator="cpu", train_size=1.0, batch_size=_BATCH, enable_progress_bar=False, logger=False)

    return epochs


def _per_epoch(both: dict[str, Epochs], repeats: int) -> dict[str, list[float]]:
    """Seconds of one epoch, from the difference of several and one, which excludes the set-up."""

    def one(epochs: Epochs) -> float:
        once = _timed(epochs, 1)
        return (_timed(epochs, 1 + _MORE) - once) / _MORE

    for epochs in both.values():
        epochs(1)  # warms up
    works = {name: partial(one, epochs) for name, epochs in both.items()}
    return interleaved(works, repeats, warm=False, measured=True)


def _timed(epochs: Epochs, n: int) -> float:
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
