"""The verdict on a differential expression: who decided its genes, what the calls rest on, and what to do next."""

from __future__ import annotations

import re
from typing import Any

import pytest

from de_runs import NAMES, contrast_record, model_record, run_in
from outline import outline
from vaerdict.de.page.document import from_run
from vaerdict.de.verdict import CAUTION, CERTIFIED, DECIDERS, FEW, advice, decided_by, findings, verdict
from vaerdict.report import text

INFERENCE = {"certified": 0.99, "caution": 0.9, "refused": 0.5}
FIT = {"fits": 0, "doubtful": 1, "wrong": 2}
DECIDED = {"counts": 0.0, "both": 0.3, "model": None}


def contrast(**changes: Any) -> dict[str, Any]:
    return (
        contrast_record("A vs B")
        | {"n_cells_a": 90, "n_cells_b": 50, "n_cells_a_used": 90, "n_cells_b_used": 50}
        | changes
    )


def model(inference: str = "certified", fit: str = "fits", **changes: Any) -> dict[str, Any]:
    names = ("zeros", "variance", "library")
    worst = {"group": "A", "n_cells": 90, "khat": 0.4, "share_ok": INFERENCE[inference]}
    checks = [{"name": name, "ok": i >= FIT[fit]} for i, name in enumerate(names)]
    return {"role": "decides", "refits": 3, "diagnostics": [worst], "checks": checks} | changes


def steps(
    contrasts: list[dict[str, Any]], record: dict[str, Any] | None, replicates: str = "samples", **how: Any
) -> str:
    parts = findings(contrasts, replicates=replicates, model=record)
    return advice(parts, **{"first_look": False, "within_batches": True} | how)


SAMPLES = {"n_samples_a": 9, "n_samples_b": 9}


def test_without_a_model_nothing_is_said_about_one():
    record = verdict([contrast(n_discoveries=3, n_up=2, n_down=1)], replicates="cells", model=None)
    states = {key: value for key, value in record.items() if key != "messages"}
    assert states == {
        "decided_by": "counts", "size": "enough", "replicates": "cells", "inference": None, "fit": None,
        "agreement": None,
    }  # fmt: skip
    assert record["messages"] == [
        "3 genes are called in A vs B at an expected FDR of 0.05, with |LFC| at least 0.5: 2 higher in A, 1 higher in "
        "B.",
        "Genes are called from the raw counts: a negative binomial likelihood per gene, with dispersions between cells "
        "moderated across genes, and adaptive shrinkage of fold changes.",
        "Cells are the replicates: the FDR holds for more cells of these samples, not for new donors or experiments.",
    ]


@pytest.mark.parametrize(
    ("shares", "record", "decided"),
    [
        ((0.0, 0.0), None, "counts"),
        ((0.0, 0.0), {"role": "checks"}, "counts"),
        ((0.0, 0.0), {"role": "decides"}, "counts"),
        ((0.0, 0.2), {"role": "decides"}, "both"),
        ((None,), {"role": "decides"}, "model"),
    ],
)
def test_who_decided_follows_the_share_of_the_model(shares, record, decided):
    assert decided_by([{"share_by_model": share} for share in shares], record) == decided


@pytest.mark.parametrize("decided", DECIDED)
@pytest.mark.parametrize("inference", INFERENCE)
@pytest.mark.parametrize("fit", FIT)
def test_advice_follows_the_verdict(decided, inference, fit):
    rows, record = [contrast(**SAMPLES, share_by_model=DECIDED[decided])], model(inference, fit)
    state = verdict(rows, replicates="samples", model=record)
    assert (state["decided_by"], state["inference"], state["fit"]) == (decided, inference, fit)
    said = steps(rows, record)
    sound = decided == "counts" or (inference, fit) == ("certified", "fits")
    assert ("The list can be used at its stated FDR." in said) == sound
    assert ("Do not use the list" in said) == (decided != "counts" and inference == "refused")
    assert ("Do not use the latents and fold changes" in said) == (decided == "counts" and inference == "refused")
    assert ("holds raw counts" in said) == (fit == "wrong")
    assert ("See the checks below" in said) == (fit == "doubtful")
    assert ("`vaerdict calibrate`" in said) == (decided == "counts")
    assert ("--borrow" in said) == (decided == "both")


@pytest.mark.parametrize("decided", DECIDED)
def test_a_model_that_fails_is_named_for_what_it_was(decided):
    rows = [contrast(share_by_model=DECIDED[decided])]
    messages = verdict(rows, replicates="cells", model=model("refused", "wrong"))["messages"]
    failed = [m for m in messages if m.startswith(("Inference is refused", "The model does not fit"))]
    assert len(failed) == 2
    assert all(("The calls do not rest on it." in message) == (decided == "counts") for message in failed)


def test_the_verdict_begins_with_what_the_calls_rest_on():
    by_counts = verdict([contrast(share_contradicted=0.02)], replicates="cells", model=model("refused"))
    order = ["genes are called", "from the raw counts", "Cells are the", "Inference", "model fits", "contradict the mo"]
    places = [next(i for i, message in enumerate(by_counts["messages"]) if part in message) for part in order]
    assert places == [0, 1, 2, 3, 4, 5]
    assert not any("refits" in message for message in by_counts["messages"])
    by_model = verdict([contrast(share_by_model=None)], replicates="cells", model=model())
    assert [re.split("[ :]", message)[0] for message in by_model["messages"][1:]] == [
        "The",
        "Inference",
        "The",
        "Cells",
    ]


def test_the_error_of_a_model_that_decides_comes_from_refits():
    for share, subject in ((None, "Intervals"), (0.3, "Intervals of the genes that the model decides")):
        rows = [contrast(**SAMPLES, share_by_model=share)]
        with_refits = verdict(rows, replicates="cells", model=model())["messages"][1]
        assert f"{subject} include the error of the model, estimated from 3 refits." in with_refits
        without = verdict(rows, replicates="cells", model=model(refits=0))["messages"][1]
        assert f"{subject} leave out the error of the model (no refits) and are too narrow." in without
        assert "--refits 3" in steps(rows, model(refits=0))
        assert "--refits" not in steps(rows, model())
    assert "--refits" not in steps([contrast(**SAMPLES)], model(refits=0))


def test_cells_taken_to_be_of_the_kinds_compared_are_named():
    messages = verdict([contrast(share_by_model=0.3)], replicates="cells", model=model())["messages"]
    assert "The model decides 30% of the genes" in messages[1]
    assert "are taken to be of the kinds compared (borrow)" in messages[1]


@pytest.mark.parametrize("decided", ["counts", "both"])
@pytest.mark.parametrize(("share", "state"), [(0.02, "agree"), (0.5, "disagree")])
def test_agreement_is_that_of_the_worst_contrast(decided, share, state):
    rows = [
        contrast(name=name, share_by_model=DECIDED[decided], share_contradicted=value)
        for name, value in (("A vs C", 0.01), ("A vs B", share))
    ]
    record = verdict(rows, replicates="cells", model=model())
    (message,) = [message for message in record["messages"] if "contradict the model" in message]
    assert record["agreement"] == state
    assert message.startswith(f"The counts of {share:.0%} of the genes contradict the model in A vs B")
    assert (DECIDERS[decided].disagree in message) == (state == "disagree")
    assert ("lfc_mean and model_lfc differ" in steps(rows, model(), "cells")) == (state == "disagree")


@pytest.mark.parametrize(
    ("share", "state"),
    [(CERTIFIED, "certified"), (CERTIFIED - 0.01, "caution"), (CAUTION, "caution"), (CAUTION - 0.01, "refused")],
)
def test_inference_is_judged_by_the_worst_group(share, state):
    groups = [{"group": name, "khat": 0.4, "share_ok": ok} for name, ok in (("A", 1.0), ("B", share))]
    record = verdict([contrast()], replicates="cells", model=model(diagnostics=groups))
    assert record["inference"] == state
    assert any("the worst group (B)" in message for message in record["messages"])


@pytest.mark.parametrize(
    ("changes", "replicates", "size"),
    [
        ({"n_cells_b_used": FEW["cells"]}, "cells", "enough"),
        ({"n_cells_b_used": FEW["cells"] - 1}, "cells", "few"),
        ({"n_samples_a": FEW["samples"], "n_samples_b": 9}, "samples", "enough"),
        ({"n_samples_a": 9, "n_samples_b": FEW["samples"] - 1}, "samples", "few"),
    ],
)
def test_few_replicates_are_named(changes, replicates, size):
    record = verdict([contrast(**changes)], replicates=replicates, model=None)
    assert (record["size"], record["replicates"]) == (size, replicates)
    assert any(re.search(r"Only \d+ \w+ are of B", message) for message in record["messages"]) == (size == "few")


def test_advice_names_samples_batches_and_a_first_look():
    said = steps([contrast()], None, "cells", first_look=True, within_batches=False)
    for part in ("as a first look", "--sample-key", "--batch-key", "`vaerdict calibrate`"):
        assert part in said
    said = steps([contrast(**SAMPLES)], None)
    assert said == (
        "What to do next: The list can be used at its stated FDR. `vaerdict calibrate` measures whether the FDR holds "
        "on these data."
    )


def test_the_page_says_who_decided(tmp_path):
    record = model_record(role="checks", diagnostics=[{"group": "B cells", "n_cells": 9, "khat": 0.9, "share_ok": 0.5}])
    agree = {"share_contradicted": 0.0}
    folder = run_in(tmp_path / "checks", n_genes=20, names=NAMES[:1], model=record, contrast=agree)
    seen = outline(from_run(folder)).text
    assert seen.index("genes are called in") < seen.index("Genes tested: 2000 of 9999")
    for part in ("Genes are called from the raw counts", "Inference is refused", "The calls do not rest on it."):
        assert part in seen
    assert "Do not use the list" not in seen
    assert "decided by the model, %" not in seen
    folder = run_in(
        tmp_path / "no-refits",
        n_genes=20,
        names=NAMES[:1],
        model=model_record(refits=0),
        contrast={"share_by_model": 0.4},
    )
    seen = text(from_run(folder))
    assert "as a first look" in seen
    assert "decided by the model, %" in seen


def test_pairs_and_the_rate_over_contrasts_are_said():
    samples = {"n_samples_a": 5, "n_samples_b": 5}
    paired = [contrast_record(name, paired=True, **samples) for name in NAMES[:2]]
    messages = verdict(paired, replicates="samples", model=None)["messages"]
    assert messages[0].startswith("0 calls are made in 2 contrasts at an expected FDR of 0.05 in each, with |LFC|")
    assert "Samples with cells in both groups are the replicates, compared within themselves: the FDR" in messages[2]
    mixed = [contrast_record(NAMES[0], paired=False, **samples), paired[1]]
    assert "Samples are the replicates: the FDR" in verdict(mixed, replicates="samples", model=None)["messages"][2]
    joint = [record | {"joint_fdr": True} for record in paired]
    assert "0.05 over all of them together" in verdict(joint, replicates="samples", model=None)["messages"][0]
