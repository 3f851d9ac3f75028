"""Settings of the MNIST experiment: sizes of the networks, variants of the model, presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from vaerdict.models.m1m2 import Architecture
from vaerdict.tasks import Task
from vaerdict.training.semisupervised_stack import SEMI_RECIPES

N_KNOWN = 9
FOUR = tuple(SEMI_RECIPES)
MIXTURE = ("IWAE", "WW", "CHI")
"""The paper's mixture; the prior is its fourth component, and weights are equal."""

# The paper's text gives three convolutions of size 3, two fully connected layers, and one hidden layer of 128 units in
# every other network. It gives no channels: 16, 32 and 32 are ours.
PRINTED_SIZES = Architecture()
# The sizes of the released code. Its layer class makes a hidden layer as wide as the output where no width is given:
# 784 units decode x, and nine classify z. It defines two dense layers of 128 behind the convolutions, but never calls
# them.
RELEASED_SIZES = Architecture(decoder=(784,), channels=(32, 64, 128), padded=False, encoder=(), classifier=(9,))
OUR_SIZES = Architecture(decoder=(784,), channels=(32, 64, 128), encoder=(256,))
SIZE_NAMES = {PRINTED_SIZES: "printed", RELEASED_SIZES: "released", OUR_SIZES: "ours"}


@dataclass(frozen=True)
class Variant:
    """A way to build and train the model. `objectives` name the models, `proposals` those fitted to each of them.

    `labelled_bound` is the weight of the bound of labelled images (`SemiSettings`), None their share of all images.
    `networks` is the number of networks of one objective in the ensembles that are compared with the mixture; 1 is
    none. The selected models of the first `n_closer` seeds (None: all) are refined too. At most `most_seeds` seeds run.
    """

    name: str
    objectives: tuple[str, ...]
    proposals: tuple[str, ...] = ()
    architecture: Architecture = PRINTED_SIZES
    free: int = 0
    shifts: int = 0
    relaxed: bool = True
    dropout: float = 0.1
    cooling: float = 0.0
    labelled_bound: float | None = None
    epochs: int = 100
    networks: int = 3
    n_closer: int | None = None
    most_seeds: int | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Variant:
        """The variant in the arguments of a task, where JSON has made lists of tuples."""
        sizes = Architecture(**_tuples(values["architecture"]))
        return cls(**{**_tuples(values), "architecture": sizes})


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


@dataclass(frozen=True)
class Preset:
    """How much of the experiment to run.

    `n_draws` is the number of draws of every row, whatever the number of networks that share them; `n_escalated` that
    of digits whose weights are not reliable after refinement.
    """

    variants: tuple[Variant, ...]
    seeds: int = 5
    first_split: int = 0
    n_particles: int = 30
    batch_size: int = 512
    n_labels: int = 1494
    n_held_out: int = 500
    n_train: int | None = None
    n_test: int = 5000
    n_corrected: int = 5000
    n_scored: int = 50
    n_refined: int = 200
    n_gold: int = 10
    n_draws: int = 300
    n_escalated: int = 1200
    proposal_epochs: int = 12
    baseline_epochs: int = 100
    device: str = "cpu"


# Claims are about our sizes. The others are for bounds and decisions of models with their own proposals; fewer seeds.
# HALF_LABELLED changes one setting of AS_PRINTED: 1,494 labelled images are half of the objective.
AS_PRINTED = Variant("printed", FOUR, n_closer=0, most_seeds=3)
AS_RELEASED = Variant("released", FOUR, architecture=RELEASED_SIZES, n_closer=0, most_seeds=3)
HALF_LABELLED = replace(AS_PRINTED, name="printed, half labelled", objectives=("IWAE",), labelled_bound=1.0)
OURS = Variant("ours", FOUR, FOUR, OUR_SIZES, cooling=0.3)
# NINE (wake-wake with exact sums, shifts and no dropout) was chosen among nine settings by its average precision on the
# test digits of splits 0 and 100; the preset `best` uses other splits. There it rejected nines no better than a
# supervised network; SHIFTED, the paper's setting with shifts and fitted proposals, was added for that reason. All
# three were chosen with the labelled bound at weight 1. LARGE is FREE with larger networks and the labelled bound at
# its share, chosen before any run of it.
NINE = Variant("nine", ("WW",), relaxed=False, dropout=0.0, shifts=2, cooling=0.3, labelled_bound=1.0)
SHIFTED = Variant("shifted", ("IWAE",), FOUR, shifts=2, cooling=0.3, labelled_bound=1.0)
FREE = replace(NINE, name="free", proposals=FOUR, free=1)
LARGE = replace(FREE, name="free, large", architecture=OUR_SIZES, labelled_bound=None)
PRESETS = {
    "paper": Preset((OURS,)),
    "sizes": Preset((AS_RELEASED, AS_PRINTED, HALF_LABELLED)),
    "printed": Preset((AS_PRINTED,)),
    "released": Preset((AS_RELEASED,)),
    "best": Preset((SHIFTED, FREE, NINE, LARGE), first_split=10),
    "quick": Preset(
        (
            replace(AS_PRINTED, epochs=8, proposals=FOUR, n_closer=None),
            Variant("free", ("WW",), relaxed=False, free=1, shifts=2, epochs=8),
        ),
        seeds=1,
        n_particles=5,
        batch_size=128,
        n_labels=450,
        n_held_out=200,
        n_train=2000,
        n_test=1000,
        n_corrected=300,
        n_scored=6,
        n_refined=12,
        n_gold=1,
        n_draws=120,
        n_escalated=360,
        proposal_epochs=4,
        baseline_epochs=20,
    ),
}


def preset_tasks(preset: Preset) -> list[Task]:
    """One task per seed and variant, and one for the supervised baselines where proposals are compared.

    The tasks of a seed are the same with any number of seeds.
    """
    settings = {name: value for name, value in asdict(preset).items() if name not in ("variants", "seeds")}
    variants = [
        {"stage": variant.name, "variant": asdict(variant), "seed": seed, **settings}
        for seed in range(preset.seeds)
        for variant in preset.variants
        if variant.most_seeds is None or seed < variant.most_seeds
    ]
    compared = any(variant.proposals for variant in preset.variants)
    return [*variants, *([{"stage": "baselines", "seeds": preset.seeds, **settings}] if compared else [])]


def preset_of(task: Task) -> Preset:
    """The settings that all tasks of a preset share."""
    return Preset((), **{name: task[name] for name in Preset.__dataclass_fields__ if name in task})
