"""The verdict on a differential expression: who decided its genes, what the calls rest on, and what to do next."""

from __future__ import annotations

import re
from typing import Any

import pytest

from de_runs import NAMES, contrast_record, model_record, run_in
from outline import outline
from vaerdict.de.page.document import from_run
from vaerdict.de.verdict import (
    CAUTION,
    CERTIFIED,
    DECIDERS,
    FEW,
    GOOD_PREDICTION,
    advice,
    decided_by,
    findings,
    verdict,
)
from vaerdict.report import text

INFERENCE = {"certified": 0.99, "caution": 0.9, "refused": 0.5}
FIT = {"fits": 0, "doubtful": 1, "wrong": 2}
ROLES = {"counts": "checks", "model": "decides"}


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
        "decided_by": "counts", "size": "enough", "replicates": "cells", "centre": None, "prior": None,
        "inference": None, "fit": None, "agreement": None,
    }  # fmt: skip
    assert record["messages"] == [
        "3 genes are called in A vs B at an expected FDR of 0.05, with |LFC| at least 0.5: 2 higher in A, 1 higher in "
        "B.",
        "Genes are called from the raw counts: a negative binomial likelihood per gene, with dispersions between cells "
        "moderated across genes, and adaptive shrinkage of fold changes.",
        "Cells are the replicates: the FDR holds for more cells of these samples, not for new donors or experiments.",
    ]


def balance(shift: float, *, near: bool = True) -> dict[str, Any]:
    return {"shift": shift, "near": near, "n_genes": 50, "n_about": 12, "n_about_centre": 18}


@pytest.mark.parametrize(
    ("delta", "shift", "state"),
    [(0.5, 0.2, "balanced"), (0.5, -0.7, "unsure"), (2.0, -0.7, "balanced"), (0.0, 0.1, "balanced")],
)
def test_the_centre_is_doubted_where_changes_do_not_balance_about_it(delta, shift, state):
    rows = [contrast(delta=delta, balance=balance(shift))]
    record = verdict(rows, replicates="cells", model=None)
    assert record["centre"] == state
    assert any("not certain which genes do not change" in m for m in record["messages"]) == (state == "unsure")
    said = steps(rows, None, "cells")
    assert ("can be used" in said) == (state == "balanced")
    assert ("before using the list" in said) == (state == "unsure")


def test_a_centre_that_the_counts_leave_open_is_unknown_and_the_list_can_be_used():
    rows = [contrast(balance=balance(0.1)), contrast(balance=balance(0.1, near=False))]
    assert verdict(rows, replicates="cells", model=None)["centre"] == "unknown"
    assert verdict([*rows, contrast(balance=balance(0.9))], replicates="cells", model=None)["centre"] == "unsure"
    assert "can be used" in steps(rows, None, "cells")


def test_the_doubt_names_how_far_off_fold_changes_are():
    rows = [contrast(balance=balance(-0.7)), contrast(name="A vs C", balance=balance(0.9)), contrast(balance=None)]
    (message,) = [m for m in verdict(rows, replicates="cells", model=None)["messages"] if "not certain" in m]
    assert message.startswith("In 2 of 3 contrasts (A vs C, A vs B), most in A vs C: It is not certain which genes do")
    assert "(18 of 50 well-measured ones), but ups and downs balance 0.90 log2 units above it, where 12 lie." in message
    assert "every fold change is 0.90 lower: upward calls that do not exceed delta by as much are false" in message
    assert message.endswith("and changes downward are missed.")


@pytest.mark.parametrize(
    ("record", "decided"), [(None, "counts"), ({"role": "checks"}, "counts"), ({"role": "decides"}, "model")]
)
def test_who_decided_follows_the_role_of_the_model(record, decided):
    assert decided_by(record) == decided


@pytest.mark.parametrize("decided", ROLES)
@pytest.mark.parametrize("inference", INFERENCE)
@pytest.mark.parametrize("fit", FIT)
def test_advice_follows_the_verdict(decided, inference, fit):
    rows, record = [contrast(**SAMPLES)], model(inference, fit, role=ROLES[decided])
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


@pytest.mark.parametrize("decided", ROLES)
def test_a_model_that_fails_is_named_for_what_it_was(decided):
    record = model("refused", "wrong", role=ROLES[decided])
    messages = verdict([contrast()], replicates="cells", model=record)["messages"]
    failed = [m for m in messages if m.startswith(("Inference is refused", "The model does not fit"))]
    assert len(failed) == 2
    assert all(("The calls do not rest on it." in message) == (decided == "counts") for message in failed)


def test_the_verdict_begins_with_what_the_calls_rest_on():
    checked = model("refused", role="checks")
    by_counts = verdict([contrast(share_contradicted=0.02)], replicates="cells", model=checked)
    order = ["genes are called", "from the raw counts", "Cells are the", "Inference", "model fits", "contradict the mo"]
    places = [next(i for i, message in enumerate(by_counts["messages"]) if part in message) for part in order]
    assert places == [0, 1, 2, 3, 4, 5]
    assert not any("refits" in message for message in by_counts["messages"])
    by_model = verdict([contrast()], replicates="cells", model=model())
    assert [re.split("[ :]", message)[0] for message in by_model["messages"][1:]] == [
        "The",
        "Inference",
        "The",
        "Cells",
    ]


def test_the_error_of_a_model_that_decides_comes_from_refits():
    rows = [contrast(**SAMPLES)]
    with_refits = verdict(rows, replicates="cells", model=model())["messages"][1]
    assert "Intervals include the error of the model, estimated from 3 refits." in with_refits
    without = verdict(rows, replicates="cells", model=model(refits=0))["messages"][1]
    assert "Intervals leave out the error of the model (no refits) and are too narrow." in without
    assert "--refits 3" in steps(rows, model(refits=0))
    assert "--refits" not in steps(rows, model())
    assert "--refits" not in steps(rows, model(refits=0, role="checks"))


@pytest.mark.parametrize("decided", ROLES)
@pytest.mark.parametrize(("share", "state"), [(0.02, "agree"), (0.5, "disagree")])
def test_agreement_is_that_of_the_worst_contrast(decided, share, state):
    rows = [contrast(name=name, share_contradicted=value) for name, value in (("A vs C", 0.01), ("A vs B", share))]
    of_model = model(role=ROLES[decided])
    record = verdict(rows, replicates="cells", model=of_model)
    (message,) = [message for message in record["messages"] if "contradict the model" in message]
    assert record["agreement"] == state
    assert message.startswith(f"The counts of {share:.0%} of the genes contradict the model in A vs B")
    assert (DECIDERS[decided].disagree in message) == (state == "disagree")
    assert ("lfc_mean and model_lfc differ" in steps(rows, of_model, "cells")) == (state == "disagree")


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


def prior(correlation: float = 0.8, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "profile", "used": True, "reason": None, "n_other": 1234, "correlation": correlation, "slope": 0.9,
        "share_following": 0.6, "n_counts": 30, "n_by_prior": 12,
    } | changes  # fmt: skip


@pytest.mark.parametrize(("correlation", "state"), [(GOOD_PREDICTION, "good"), (GOOD_PREDICTION - 0.01, "weak")])
def test_a_prior_is_as_good_as_its_prediction(correlation, state):
    rows = [contrast(**SAMPLES, prior=prior(correlation))]
    record = verdict(rows, replicates="samples", model=None)
    assert record["prior"] == state
    (message,) = [message for message in record["messages"] if "predicted" in message]
    for part in ("clusters of 1,234 other cells", f"is {correlation:.2f}. 30 genes", "the counts alone, 12 only"):
        assert part in message
    assert "--prior none" in steps(rows, None)
    assert "--prior none" not in steps([contrast(**SAMPLES, prior=prior(n_by_prior=0))], None)
    of_model = verdict([contrast(prior=prior(kind="model"))], replicates="cells", model=None)
    assert any("by a model of 1,234 other cells" in message for message in of_model["messages"])


def test_the_prior_of_the_best_contrast_is_named_and_the_calls_of_all_are_counted():
    rows = [contrast(name=name, prior=prior(r)) for name, r in (("A vs B", 0.2), ("A vs C", 0.7))]
    record = verdict([*rows, contrast(prior=prior(used=False))], replicates="cells", model=None)
    (message,) = [message for message in record["messages"] if "predicted" in message]
    assert record["prior"] == "good"
    assert "is 0.70 in the best of 2 contrasts. 60 genes are called by the counts alone, 24 only with" in message


def test_why_there_is_no_prior_is_said():
    unused = {"kind": "profile", "used": False, "reason": "7 cells are too few", "n_other": 7}
    record = verdict([contrast(prior=unused)], replicates="cells", model=None)
    assert record["prior"] == "none"
    assert "stand alone: 7 cells are too few to learn a prior for fold changes." in " ".join(record["messages"])


def test_the_page_says_who_decided(tmp_path):
    record = model_record(role="checks", diagnostics=[{"group": "B cells", "n_cells": 9, "khat": 0.9, "share_ok": 0.5}])
    agree = {"share_contradicted": 0.0}
    folder = run_in(tmp_path / "checks", n_genes=20, names=NAMES[:1], model=record, contrast=agree)
    seen = outline(from_run(folder)).text
    assert seen.index("genes are called in") < seen.index("Genes tested: 2000 of 9999")
    for part in ("Genes are called from the raw counts", "Inference is refused", "The calls do not rest on it."):
        assert part in seen
    assert "Do not use the list" not in seen
    folder = run_in(tmp_path / "no-refits", n_genes=20, names=NAMES[:1], model=model_record(refits=0))
    assert "as a first look" in text(from_run(folder))


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
