"""How notebooks show posteriors and answers: a few lines, a table, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vaerdict.core import WeightError
from vaerdict.diagnostics import Verdict, khat_threshold
from vaerdict.notebook import BAD, GOOD, GREY, WARNING, axes_or_new, counted, html

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vaerdict.inference.posterior import Answer, Posterior

_COLOURS = {Verdict.OK: GOOD, Verdict.CAUTION: WARNING, Verdict.REFUSE: BAD}
_SHOWN = 3  # values of an observation
_MOST_ROWS = 1000  # observations that a table is made of


def posterior_text(posterior: Posterior) -> str:
    """Numbers of observations and particles, verdicts and k-hat."""
    verdict, particles = posterior.verdict.flatten(), counted(posterior.log_w.shape[0], "particle")
    return (
        f"Posterior: {counted(len(verdict), 'observation')}, {particles} each\n"
        f"  {verdicts(verdict)}; {khat_range(posterior.khat)}"
    )


def posterior_html(posterior: Posterior) -> str:
    """The same with a row for each of the first observations."""
    title, *sentences = posterior_text(posterior).splitlines()
    verdict, khat, ess = (t.flatten().cpu() for t in (posterior.verdict, posterior.khat, posterior.ess))
    return html(title, sentences, _rows(verdict, khat, ess))


def answer_text(answer: Answer) -> str:
    """The number of observations, their verdicts, the first value and k-hat."""
    first = f"{number(answer.value[0])} ± {number(answer.mcse[0])}" if len(answer.ess) else "none"
    return (
        f"Answer: {counted(len(answer.ess), 'observation')}, {verdicts(answer.verdict)}\n"
        f"  first value {first}; {khat_range(answer.khat)}"
    )


def answer_html(answer: Answer) -> str:
    """A row for each of the first observations."""
    pairs = zip(answer.value[:_MOST_ROWS], answer.mcse[:_MOST_ROWS], strict=True)
    values = [f"{number(value)} ± {number(error)}" for value, error in pairs]
    verdict, khat, ess = (t.cpu() for t in (answer.verdict, answer.khat, answer.ess))
    rows = _rows(verdict, khat, ess, value=values, stage=answer.stage, reason=answer.reason)
    return html(answer_text(answer).splitlines()[0], [], rows)


def verdicts(verdict: Tensor) -> str:
    """How many observations have each verdict.

    >>> verdicts(torch.tensor([0, 0, 2]))
    'ok 2, refuse 1'
    """
    counts = {each: int((verdict == each).sum()) for each in sorted(Verdict)}
    return ", ".join(f"{each.name.lower()} {n:,}" for each, n in counts.items() if n)


def khat_range(khat: Tensor) -> str:
    """The median and the largest k-hat that could be assessed.

    >>> khat_range(torch.tensor([0.1, 0.5, torch.nan, 0.9]))
    'k-hat 0.50 in the median, 0.90 at most'
    """
    known = khat[~khat.isnan()]
    if not known.numel():
        return "k-hat not assessed"
    return f"k-hat {known.median():.2f} in the median, {known.max():.2f} at most"


def number(value: Tensor) -> str:
    """The first outputs of an observation.

    >>> number(torch.tensor([0.25, 1.0, 2.0, 3.0]))
    '0.25, 1, 2, ... (4 values)'
    """
    values = value.flatten()
    listed = ", ".join(f"{v:.3g}" for v in values[:_SHOWN].tolist())
    return listed if len(values) <= _SHOWN else f"{listed}, ... ({len(values):,} values)"


def _rows(verdict: Tensor, khat: Tensor, ess: Tensor, **more: Sequence[Any]) -> list[dict[str, Any]]:
    """A row for each of the first observations. Shapes: ``(n_obs,)`` each."""
    names = [Verdict(v).name.lower() for v in verdict[:_MOST_ROWS].tolist()]
    columns: dict[str, Sequence[Any]] = {"observation": range(len(names)), "verdict": names}
    columns |= {"k-hat": khat.tolist(), "ESS": ess.tolist(), **more}
    cut = [column[: len(names)] for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*cut, strict=True)]


# --------------------------------------------------------------------------------------------------------- plots
def plot_khat(posterior: Posterior, ax: Axes | None) -> Axes:
    """The k-hat of every observation, sorted, coloured by verdict, with the threshold."""
    khat, verdict = (t.flatten().cpu() for t in (posterior.khat, posterior.verdict))
    order = khat.nan_to_num(nan=-torch.inf).argsort()
    khat, verdict, place = khat[order], verdict[order], torch.arange(len(order))
    ax, threshold = axes_or_new(ax), khat_threshold(posterior.log_w.shape[0])
    for each, colour in _COLOURS.items():
        mask = verdict == each
        if mask.any():
            label = f"{each.name.lower()} ({int(mask.sum()):,})"
            ax.scatter(place[mask].numpy(), khat[mask].numpy(), s=12, color=colour, label=label)
    if threshold > 0:
        ax.axhline(threshold, color=GREY, linestyle="--", linewidth=1)
    ax.set(xlabel="observations by k-hat", ylabel="k-hat", title=counted(len(khat), "observation"))
    if len(khat):
        ax.legend()
    return ax


def plot_latents(posterior: Posterior, log_w: Tensor, observation: int, ax: Axes | None) -> Axes:
    """Mean, 50 % and 90 % intervals of the latents of an observation. Shapes: ``log_w (K, *batch)``."""
    if posterior.failed.flatten()[observation]:
        raise WeightError(f"observation {observation} was not answered; there is nothing to plot.")
    latents = [posterior.z] if isinstance(posterior.z, Tensor) else list(posterior.z)
    rows = [t.detach().double().flatten(1, log_w.dim() - 1)[:, observation].cpu().flatten(1) for t in latents]
    z, weight = torch.cat(rows, 1), log_w.detach().double().flatten(1)[:, observation].cpu().softmax(0)
    low, first, third, high = weighted_quantiles(z, weight, (0.05, 0.25, 0.75, 0.95))
    ax, place, mean = axes_or_new(ax), range(z.shape[1]), (weight[:, None] * z).sum(0)
    ax.vlines(place, low.numpy(), high.numpy(), color=GOOD, linewidth=1, label="90 %")
    ax.vlines(place, first.numpy(), third.numpy(), color=GOOD, linewidth=4, label="50 %")
    ax.scatter(place, mean.numpy(), color="white", edgecolors=GOOD, zorder=3, label="mean")
    name = Verdict(int(posterior.verdict.flatten()[observation])).name.lower()
    ax.set(xlabel="coordinate of the latent", ylabel="posterior", title=f"observation {observation}: {name}")
    ax.set_xticks(list(place))
    ax.legend()
    return ax


def weighted_quantiles(z: Tensor, weight: Tensor, levels: Sequence[float]) -> list[Tensor]:
    """Quantiles of every column. Shapes: ``z (K, d), weight (K,) -> (d,)`` each.

    >>> weighted_quantiles(torch.tensor([[3.0], [1.0], [2.0]]), torch.tensor([0.5, 0.25, 0.25]), (0.2, 0.9))
    [tensor([1.]), tensor([3.])]
    """
    ordered, order = z.sort(dim=0)
    share = weight[order].cumsum(0)
    place = [(share < level).sum(0).clamp_max(len(z) - 1) for level in levels]
    return [ordered.gather(0, each.unsqueeze(0)).squeeze(0) for each in place]
