"""The words on a differential expression: who decided its genes, what the list rests on, and what to do next."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from vaerdict.de.compare import Support
from vaerdict.de.page.messages import answers, headline, next_steps

from de_toys import NAMES, run_in
from test_de_report import outline
from vaerdict.de.verdict import BOTH, COUNTS, FEW, MODEL, decided_by
from vaerdict.de.verdict import verdict as judge
from vaerdict.report import text

GENES = {"a": {"gene": ["x", "y"], "is_de": [True, False]}}


@pytest.mark.parametrize(
    ("verdict", "says", "advises", "silent"),
    [
        (("certified", "fits", "samples"), "samples are the replicates", "can be used", "--sample-key"),
        (("certified", "fits", "cells"), "cells are the replicates", "--sample-key", "Do not use"),
        (("caution", "fits", "samples"), "calls for caution", "more draws", "can be used"),
        (("refused", "fits", "samples"), "is refused", "Do not use the list", "can be used"),
        (("certified", "wrong", "samples"), "does not fit", "raw counts", "can be used"),
        (("certified", "doubtful", "samples"), "fit of the model is doubtful", "checks below", "can be used"),
    ],
)
def test_words_follow_the_verdict(verdict, says, advises, silent):
    record = dict(zip(("inference", "model", "replicates"), verdict, strict=True))
    assert says in headline(record, [{"name": "a", "level": 0.1}], GENES)
    assert "1 of 2 genes are called at a false discovery rate of 10%." in headline(
        record, [{"name": "a", "level": 0.1}], GENES
    )
    assert advises in next_steps(record)
    assert silent not in next_steps(record)


def record(inference: str, model: str, replicates: str, **more: str) -> dict[str, str]:
    return {"inference": inference, "model": model, "replicates": replicates, **more}


def test_a_model_that_decides_without_refits_gives_a_first_look(tmp_path):
    verdict = record("certified", "fits", "samples")
    assert next_steps(verdict, refits=3) == next_steps(verdict)
    assert next_steps(verdict) == "What to do next: The list can be used at its stated rate."
    for decided in (MODEL, BOTH):
        assert "as a first look. Run with --refits 3" in next_steps(verdict, decided, refits=0)
    assert "--refits" not in next_steps(verdict, COUNTS, refits=0)
    assert "at its stated rate" in next_steps(verdict, COUNTS, refits=0)
    folder = run_in(tmp_path, n_genes=20, names=NAMES[:1], settings={"effort": {"refits": 0, "recipes": ["VAE"]}})
    assert "as a first look" in text(folder)


@pytest.mark.parametrize("inference", ["certified", "caution", "refused"])
@pytest.mark.parametrize("model", ["fits", "doubtful", "wrong"])
def test_where_the_counts_decided_the_list_stands_whatever_the_model_does(inference, model):
    verdict, contrasts = record(inference, model, "samples"), [{"name": "a", "level": 0.1, "by_model": 0.0}]
    first = headline(verdict, contrasts, GENES, COUNTS)
    assert first.startswith("The counts decided every gene; samples are the replicates; 1 of 2 genes are called")
    assert not re.search("inference|model|certified", first)
    steps = next_steps(verdict, COUNTS)
    assert "The list can be used at its stated rate." in steps
    assert "Do not use the list" not in steps
    assert ("Do not use the model's latents and fold changes" in steps) == (inference == "refused")
    cards = {card.question: card for card in answers(verdict, contrasts, GENES, COUNTS)}
    assert cards["Who decided the genes?"].answer == "The counts"
    assert cards["How many genes were found?"].tone == "good"
    assert "The list does not rest on" in cards["Can the model's inference be trusted?"].meaning


def test_what_can_go_wrong_with_the_counts_is_said():
    contrasts = [{"name": "a", "level": 0.1, "by_model": 0.0}]
    verdict = record("certified", "fits", "cells", size="few")
    cards = {card.question: card for card in answers(verdict, contrasts, GENES, COUNTS)}
    assert "fewer than 20" in cards["What are the replicates?"].meaning
    assert cards["How many genes were found?"].tone == "open"
    steps = next_steps(verdict, COUNTS, batches=False)
    for words in ("as a first look", "--sample-key", "--batch-key", "`vaerdict calibrate`"):
        assert words in steps
    assert "--batch-key" not in next_steps(verdict, COUNTS)


@pytest.mark.parametrize("decided", [COUNTS, BOTH])
def test_a_model_that_the_counts_contradict_is_named_for_what_it_was(decided):
    contrasts = [{"name": "a", "by_model": 0.0 if decided == COUNTS else 0.3}]
    verdict = record("certified", "fits", "samples", counts="disagree")
    cards = {card.question: card for card in answers(verdict, contrasts, GENES, decided)}
    said = cards["Do the counts bear the model out?"].meaning
    assert ("The list follows the counts" in said) == (decided == COUNTS)
    assert "lfc_mean and model_lfc differ" in next_steps(verdict, decided)
    assert ("The model decided 30% of the genes" in headline(verdict, contrasts, GENES, decided)) == (decided == BOTH)


def test_what_the_model_decided_is_refused_with_its_inference():
    steps = next_steps(record("refused", "fits", "samples"), BOTH)
    assert "Do not use the list" in steps
    for words in ("if the cells without a label are of the kinds compared", "without --borrow the counts decide"):
        assert words in steps
    assert "--borrow" not in next_steps(record("refused", "fits", "samples"), MODEL)


@pytest.mark.parametrize(
    ("shares", "role", "decided"),
    [
        ((0.0, 0.0), "checks", COUNTS),
        ((0.0, 0.0), None, COUNTS),
        ((0.0, 0.0), "decides", COUNTS),
        ((0.0, 0.2), "decides", BOTH),
        ((0.0, 0.2), None, BOTH),
        ((None,), "decides", MODEL),
        ((None,), None, MODEL),
    ],
)
def test_who_decided_follows_the_share_of_the_model(shares, role, decided):
    assert decided_by([{"by_model": share} for share in shares], role) == decided
    assert decided_by([{}]) == MODEL  # a run of before


def judged(share_ok: float = 0.99, *, by_model: float | None = 0.0, missed: float | None = 0.02, **more: Any) -> Any:
    row = {"name": "A vs B", "group_a": "A", "group_b": "B", "n_cells_a": 90, "n_cells_b": 50, "n_discoveries": 3}
    row |= {"level": 0.05, "delta": 0.5, "by_model": by_model, "missed": missed}
    options = {"samples": False, "refits": 0, "checks": [{"name": "zeros", "ok": True}]} | more
    return judge(
        {"A": Support(90, 0.4, 100.0, share_ok)}, options.pop("checks"), [row | options.pop("row", {})], **options
    )


def test_the_verdict_begins_with_what_the_list_rests_on():
    found = judged(0.5)
    assert (found["decided_by"], found["inference"], found["size"]) == (COUNTS, "refused", "enough")
    order = [
        "3 genes are called",
        "The counts decided every gene",
        "Cells are treated",
        "contradict the model",
        "The inf",
    ]
    places = [next(i for i, words in enumerate(found["words"]) if part in words) for part in order]
    assert places == sorted(places)
    assert "the list does not rest on it" in found["words"][places[-1]]
    assert not any("refits" in words for words in found["words"])


def test_the_verdict_of_a_model_that_decides_begins_with_its_inference():
    found = judged(by_model=0.3)
    assert found["decided_by"] == BOTH
    assert found["words"][1].startswith("The inference is certified")
    assert any("of the genes that the model decided (no refits)" in words for words in found["words"])
    assert any("it decided 30% of the genes" in words for words in found["words"])
    assert any("are taken to be of the kinds compared" in words for words in found["words"])
    alone = judged(by_model=None, missed=None, refits=3)
    assert (alone["decided_by"], alone["counts"]) == (MODEL, None)
    assert any("by 3 refits, of the model" in words for words in alone["words"])


@pytest.mark.parametrize(
    ("row", "samples", "size"),
    [
        ({"n_cells_b": FEW["cells"]}, False, "enough"),
        ({"n_cells_b": FEW["cells"] - 1}, False, "few"),
        ({"n_samples_a": FEW["samples"], "n_samples_b": 9}, True, "enough"),
        ({"n_samples_a": 9, "n_samples_b": FEW["samples"] - 1}, True, "few"),
    ],
)
def test_few_replicates_are_said(row, samples, size):
    found = judged(row=row, samples=samples)
    assert found["size"] == size
    assert any(words.startswith("Only ") and " are of B" in words for words in found["words"]) == (size == "few")


def test_the_page_says_which_genes_were_tested_and_who_decided(tmp_path):
    folder = run_in(tmp_path, n_genes=20, names=NAMES[:1], genes_words="20 of 99 genes: the most variable")
    results = json.loads((folder / "results.json").read_text())
    results["model_role"] = "checks"
    results["verdict"] |= {"inference": "refused", "counts": "agree"}
    for row in results["contrasts"]:
        row |= {"by_model": 0.0, "missed": 0.0}
    (folder / "results.json").write_text(json.dumps(results))
    seen = outline(folder).text
    assert "Tested were 20 of 99 genes: the most variable. Proportions and the median that centres them" in seen
    assert seen.index("The counts decided every gene; cells are the replicates") < seen.index("Tested were 20 of 99")
    assert "What do dispersion and shrinkage add?" in seen
    assert "so that the list does not rest on what follows" in seen
    assert "Do not use the list" not in seen
    assert "decided by the model, %" not in seen
    assert "What does the model add?" not in seen
