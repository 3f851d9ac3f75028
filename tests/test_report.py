"""The report layer on made-up results whose right answers are known: numbers, claims, tables, pages, errors."""

from __future__ import annotations

import ast
import base64
import copy
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from vaerdict.core import DataError, SettingError
from vaerdict.report import markdown, render, svg, tables, text, update_readme
from vaerdict.report.assets import SCRIPT
from vaerdict.report.claims import Claim, Evidence, Word, tally
from vaerdict.report.document import Document, Picture, Section, slug
from vaerdict.report.page import page, write_whole
from vaerdict.report.summary import Summary, by_seed, difference, mean_of, rows_of, summarise, where
from vaerdict.report.tables import Column, Table, Value
from vaerdict_paper.pages.ppca_claims import further_claims, paper_claims
from vaerdict_paper.pages.ppca_tables import MAE, beyond_table, cross_table, floors_table, models_table

SEEDS = range(5)
NASTY = "<script>alert('x')</script> \"&\" $\\frac$ 名前 a|b `c` \x07"
WOBBLE = (-0.002, 0.001, 0.0, 0.002, -0.001)
"""What differs between seeds: mean zero, standard error 0.0007."""


# ----------------------------------------------------------------------------- made-up results


def model_row(
    model: str, seed: int, k: int, log_p: float, training: str = "paper", mae_model: float = 0.01
) -> dict[str, Any]:
    return {
        "model": model, "seed": seed, "k_train": k, "training": training, "log_evidence": log_p + WOBBLE[seed],
        "log_evidence_gap": log_p + 16.6, "iwelbo": log_p - 0.01, "a_norm": 1.0, "n_draws": 200,
        "mae": 0.03, "mae_plugin": 0.05, "mae_inference": 0.02,
        "mae_model": mae_model + WOBBLE[seed] / 10, "within_2_mcse": 0.94,
        **khat_keys(0.98 if (model, k) == ("CHI", 200) else 0.4),
    }  # fmt: skip


def khat_keys(khat: float) -> dict[str, Any]:
    return {"khat": khat, "khat_share_ok": 0.9, "khat_quantiles": [khat + d for d in (-0.3, -0.1, 0, 0.1, 0.3)]}


def pair_row(model: str, proposal: str, seed: int, mae: float, khat: float, **keys: Any) -> dict[str, Any]:
    base = {
        "model": model,
        "proposal": proposal,
        "seed": seed,
        "k_train": 5,
        "training": "paper",
        "n_draws": 200,
        "ess": 90.0,
    }
    return {**base, "mae": mae + WOBBLE[seed] / 100, "mae_inference": mae, "mae_model": 0.01, **khat_keys(khat), **keys}


LOG_P = {
    5: {"VAE": -17.0, "IWAE": -16.6, "WW": -16.65, "CHI": -16.62},
    200: {"VAE": -16.9, "IWAE": -16.63, "WW": -16.6, "CHI": -17.2},
}
ERROR = {"VAE": 0.05, "IWAE": 0.031, "WW": 0.04, "CHI": 0.030, "CHI-t": 0.033, "MIS": 0.025}
"""By proposal: CHI is the best single one and MIS better still."""


def ppca_results(seeds: range = SEEDS, particles: Sequence[int] = (5, 200)) -> dict[str, Any]:
    """A run in which every claim of the paper holds."""
    models = [model_row(m, s, k, level) for k in particles for m, level in LOG_P[k].items() for s in seeds]
    models += [model_row(m, s, 30, -16.6, "converged", 0.005) for m in ("VAE", "IWAE", "WW", "CHI") for s in seeds]
    cross = [
        pair_row(m, q, s, error, 0.8 if q == "VAE" and m != "VAE" else 0.4, k_train=k)
        for k in particles for m in LOG_P[k] for q, error in ERROR.items() for s in seeds
    ]  # fmt: skip
    ours = {"IWAE": 0.02, "MIS": 0.018, "MIS-full": 0.012, "MIS-full-optimal": 0.011, "REFINED": 0.013}
    base, kinds = {"k_train": 30, "training": "converged"}, (("snis", 1.0), ("psis", 0.95))
    gain = {"iid": 1.0, "sobol": 0.5, "aligned": 0.4}
    cross += [
        pair_row("WW", q, s, error * gain[noise] * smooth, 0.1, **base, noise=noise, estimator=kind)
        for q, error in ours.items() for noise in gain for kind, smooth in kinds for s in seeds
    ]  # fmt: skip
    curve = [
        {"proposal": "MIS", "noise": "iid", "seed": s, "n_draws": n, "mae": 1.0, "mae_inference": n**-0.5}
        for n in (64, 256) for s in seeds
    ]  # fmt: skip
    floors = [
        {"floor": f"exact posterior, {kind}", "n_draws": n, "mae": scale * n**-0.5, "mae_inference": scale * n**-0.5}
        for kind, scale in (("i.i.d.", 0.1), ("Sobol", 0.02), ("aligned Sobol", 0.01)) for n in (64, 200, 256)
    ]  # fmt: skip
    floors.append({"floor": "maximum likelihood", "mae_model": 0.004, "log_evidence_gap": 0.01})
    return {
        "experiment": "ppca", "preset": "paper", "settings": {"n_draws": 200, "khat_draws": 5000}, "seeds": list(seeds),
        "seconds": {}, "models": models, "cross": cross, "curve": curve, "floors": floors,
        "selection": [score("IWAE", 0.0)], "true_log_evidence": -16.6,
    }  # fmt: skip


def score(model: str, behind: float) -> dict[str, Any]:
    return {
        "model": model, "seed": 0, "iwelbo": -16.8, "iwelbo_se": 0.2, "iwelbo_best": -16.7, "best_by": "refined",
        "gap": 0.1, "behind": behind, "behind_se": 0.01, "khat": None,
    }  # fmt: skip


def demo_results(**decision: Any) -> dict[str, Any]:
    shares = {"share_ok": 0.96, "share_caution": 0.03, "share_refuse": 0.01}
    point = {"exact": 0.4, "estimate": 0.41, "mcse": 0.01, "verdict": "ok"}
    return {
        "experiment": "demo",
        "selection": [score("IWAE", 0.0), score(NASTY, 0.3)],
        "proposals": [
            {"proposal": NASTY, "khat": 0.5, "khat_share_ok": 0.9, "ess": 100.0, "mae": 0.02, "mcse": 0.02},
            {"proposal": "MIS", "khat": None, "khat_share_ok": 1.0, "ess": 300.0, "mae": 0.01, "mcse": 0.01},
        ],
        "decision": {"error": 0.01, "mcse": 0.012, "n_draws": 1000, **shares, **decision},
        "points": [point, {**point, "verdict": "refuse", "estimate": 0.7}, {**point, "verdict": "caution"}],
    }  # fmt: skip


def bivariate_results() -> dict[str, Any]:
    names = ("VAE", "WW", "CHI")
    covariance = [[1.0, 0.6], [0.6, 1.0]]
    shape = {
        "stage": "approximation", "loading": "../entangled", "means": None, "seed": 0,
        "posterior": {"mean": [0.0, 0.0], "covariance": covariance, "correlation": 0.6},
        "proposals": [
            {"proposal": q, "mean": [0, 0], "covariance": [[v, 0], [0, v]], "variance_ratio": [v, v], "a_norm": 1 / v}
            for q, v in zip(names, (0.5, 1.0, 1.3), strict=True)
        ],
    }  # fmt: skip
    margins = {"WW - VAE": {"margin": 0.1, "se": 0.01}, "CHI - VAE": {"margin": -0.2, "se": 0.01}}
    curves = {q: {"value": [0.0, 1.0, 0.5], "mcse": [0.1] * 3} for q in ("EVIDENCE", *names)}
    found = {
        "lambda": 0.8,
        "lambda_se": 0.01,
        "bias": -0.02,
        "at_edge": False,
        "sensitivity": 0.1,
        "sensitivity_se": 0.01,
    }
    chosen = {
        "stage": "selection", "loading": "../entangled", "means": "exact", "seed": 0,
        "grid": [-1.0, 0.0, 1.0], "curves": curves, "zoom_grid": [0.7, 0.8, 0.9],
        "zoom": curves, "selection": [{"proposal": q, **found} for q in curves],
        "claims": [{"claim": "WW and CHI select worse", "holds": False, "margins": margins}],
    }  # fmt: skip
    return {
        "experiment": "bivariate",
        "preset": "quick",
        "settings": {"n_data": 400},
        "seeds": [0],
        "panels": [shape, chosen],
    }


def run_in(folder: Path, results: Any, *, manifest: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "manifest.json").write_text(
        json.dumps(manifest or {"command": ["vaerdict", NASTY], "versions": {"torch": "2"}})
    )
    return folder


@pytest.fixture(scope="module")
def ppca_run(tmp_path_factory) -> Path:
    """A rendered run, shared by the tests that only look at it."""
    folder = run_in(tmp_path_factory.mktemp("ppca"), ppca_results())
    render(folder)
    return folder


# ----------------------------------------------------------------------------- numbers


def test_summary_is_mean_sd_and_se():
    summary = summarise([1.0, 2.0, 3.0, None, math.inf])
    assert summary == Summary(2.0, 1.0, 3, missing=2)
    assert summary.se == pytest.approx(1 / math.sqrt(3))
    assert summarise([4.0]) == Summary(4.0, None, 1)
    assert summarise([None]) is None


def test_seeds_weigh_the_same_however_many_rows_they_have():
    rows = [{"seed": 0, "a": 1.0}, {"seed": 0, "a": 3.0}, {"seed": 1, "a": 4.0}, {"seed": 1, "a": None}]
    assert by_seed(rows, "a") == {0: 2.0, 1: 4.0}
    assert mean_of(rows, "a") == Summary(3.0, pytest.approx(math.sqrt(2)), 2, missing=1)


def test_differences_are_paired():
    a, b = {0: 10.0, 1: 20.0, 2: 30.0}, {0: 9.0, 1: 19.0, 7: 0.0}
    assert difference(a, b) == Summary(1.0, 0.0, 2)  # unpaired, the spread would be 7


def test_rows_are_checked():
    assert rows_of({}, "models", "seed") == []
    with pytest.raises(DataError, match=r"record 1 of 'models' in results\.json lacks seed"):
        rows_of({"models": [{"seed": 0}, {}]}, "models", "seed")
    with pytest.raises(DataError, match="not a list of records"):
        rows_of({"models": {"seed": 0}}, "models")


# ----------------------------------------------------------------------------- claims


@pytest.mark.parametrize(
    ("difference_", "word"),
    [
        (Summary(1.0, 1.0, 5), Word.HOLDS),  # 2.2 standard errors
        (Summary(0.8, 1.0, 5), Word.OPEN),  # 1.8
        (Summary(-1.0, 1.0, 5), Word.FAILS),
        (Summary(9.0, 0.1, 2), Word.OPEN),  # two seeds resolve nothing
        (Summary(9.0, None, 1), Word.OPEN),
        (None, Word.ABSENT),
    ],
)
def test_two_standard_errors(difference_, word):
    assert Evidence("d", difference_, +1).word is word
    mirrored = difference_ and difference_._replace(mean=-difference_.mean)
    assert Evidence("d", mirrored, -1).word is word


def test_a_claim_needs_all_of_its_evidence():
    good, bad, none = (Evidence("d", d, +1) for d in (Summary(1.0, 0.1, 5), Summary(-1.0, 0.1, 5), None))
    assert [Claim("c", e).word for e in ([good], [good, bad], [good, none], [none])] == [
        Word.HOLDS, Word.FAILS, Word.OPEN, Word.ABSENT,
    ]  # fmt: skip
    assert tally([Claim("c", [good]), Claim("c", [bad]), Claim("c", [bad]), Claim("c", [none])]) == (
        "1 holds, 2 do not hold and 1 was not run"
    )
    assert Evidence("exact", Summary(0.1, 0.0, 1), +1, over="").word is Word.HOLDS


def words(results: dict[str, Any]) -> list[Word]:
    return [claim.word for claim in paper_claims(results["models"], results["cross"], {})]


def test_claims_that_hold_are_found_to_hold():
    assert words(ppca_results()) == [Word.HOLDS] * 9


def test_claims_turn_with_the_numbers():
    """Each planted change makes its own claim fail, and only claims that speak of it."""
    results = ppca_results()
    for row in where(results["cross"], training="paper", k_train=5, proposal="MIS"):
        row["mae"] = 0.0305  # worse than CHI by a twentieth of a hundredth, paired
    for row in where(results["models"], training="paper", k_train=200, model="CHI"):
        row["log_evidence"], row["khat"] = -16.61 + WOBBLE[row["seed"]], 0.3
    for row in where(results["cross"], k_train=5, proposal="VAE"):
        row["khat"] = 0.5
    better, chi, mis5, mis200, vae, three5, three200, ww, collapse = words(results)
    assert [mis5, three5, vae, collapse] == [Word.FAILS] * 4
    assert [better, chi, mis200, three200] == [Word.HOLDS] * 4
    assert ww is Word.HOLDS


def test_the_three_steps_keep_the_best_model_of_each_seed():
    results = ppca_results()
    for row in where(results["models"], training="paper", k_train=5, model="WW", seed=3):
        row["iwelbo"] = 0.0
    claim = paper_claims(results["models"], results["cross"], {})[5]
    assert "IWAE 4 times, WW once" in claim.note
    assert claim.evidence[0].what.startswith("three steps minus CHI")
    assert claim.evidence[0].difference.mean == pytest.approx(100 * (0.025 - 0.030))


def test_published_differences_stand_beside_ours():
    results = ppca_results()
    published = {"k5": {"log_evidence": {"VAE": -17.65, "IWAE": -16.91}}}
    first = paper_claims(results["models"], results["cross"], published)[0].evidence[0]
    assert first.published == pytest.approx(0.74)
    assert "+0.400 (se 0.000, 5 seeds; published +0.740)" in first.sentence


def test_our_own_claims_are_put_to_the_same_rule():
    results = ppca_results()
    assert {c.word for c in further_claims(results["models"], results["cross"])} == {Word.HOLDS}
    for row in where(results["cross"], proposal="MIS-full-optimal"):
        row["mae"] += 0.05
    assert [c.word for c in further_claims(results["models"], results["cross"])].count(Word.FAILS) == 1


def test_few_seeds_resolve_nothing():
    assert set(words(ppca_results(range(2)))) == {Word.OPEN}
    assert set(words({"models": [], "cross": []})) == {Word.ABSENT}


# ----------------------------------------------------------------------------- tables


def test_cells_print_scale_sign_and_spread():
    column = Column("a", "A", 2, 100, signed=True)
    assert column.text(Value(0.0123, 0.002)) == "+1.23 ± 0.20"
    assert column.text(-0.5) == "\N{MINUS SIGN}50.00"
    assert (column.text(None), column.text("a-b"), column.text(7)) == (tables.ABSENT, "a-b", "7")
    assert column.text(tables.cell(Summary(0.01, None, 1, missing=3))) == "+1.00 (3 missing)"


def test_models_table_has_published_numbers_beside_ours():
    published = {"log_evidence": {"VAE": -17.65, "IWAE": -16.91}, "mae": {"VAE": 0.103}}
    table = models_table(ppca_results()["models"], 5, published)
    vae, iwae = (next(row for row in table.rows if row["model"] == name) for name in ("VAE", "IWAE"))
    assert [row["model"] for row in table.rows] == ["VAE", "IWAE", "WW", "CHI"]
    assert (vae["behind"].value, vae["behind_paper"], vae["mae_paper"]) == (
        pytest.approx(0.4),
        pytest.approx(0.74),
        0.103,
    )
    assert iwae["gap"].best
    assert not vae["gap"].best
    assert models_table([], 5, published) is None


def test_cross_table_marks_the_best_proposal_of_each_model():
    table = cross_table(ppca_results()["cross"], 5, MAE, 200)
    assert [column.key for column in table.columns] == ["model", "VAE", "IWAE", "WW", "CHI", "CHI-t", "MIS"]
    for row in table.rows:
        assert [key for key, value in row.items() if tables.is_best(value)] == ["MIS"]


def test_beyond_table_is_best_first_under_the_floor():
    results = ppca_results()
    table = beyond_table(results["cross"], results["floors"])
    names = [row["proposal"] for row in table.rows]
    assert names == ["floor: exact posterior", "MIS-full-optimal", "MIS-full", "REFINED", "MIS", "IWAE"]
    assert table.rows[0]["aligned"].value == pytest.approx(0.01 * 200**-0.5)
    floors = floors_table(results["floors"])
    assert [row["n"] for row in floors.rows] == [64, 200, 256]


def test_plain_text_is_aligned_and_markdown_is_safe():
    columns = (Column("name", "na|me"), Column("x", "x"))
    table = Table(
        "t", "A *caption*", columns, [{"name": NASTY, "x": Value(1.0, best=True)}, {"name": "b", "x": 22.0}], "note"
    )
    lines = tables.plain(table).splitlines()
    assert lines[2].index("x", 5) == len(lines[2]) - 1
    assert lines[4].endswith("1.00*")
    assert lines[-1] == "note"
    source = tables.markdown(table)
    rows = [line for line in source.splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)
    assert "<script" not in source
    assert "**1.00**" in source


# ----------------------------------------------------------------------------- pages


class Outline(HTMLParser):
    """Tags as opened and closed, attributes, and the text outside of style and script."""

    VOID = ("meta", "br")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


def outline(run: Path) -> tuple[Outline, str]:
    source = (run / "report.html").read_text(encoding="utf-8")
    return Outline(source), source


def test_page_is_whole_and_loads_nothing(ppca_run):
    seen, source = outline(ppca_run)
    assert seen.tags["h1"] == 1
    assert seen.tags["table"] >= 8
    assert not set(seen.tags) & {"link", "img", "iframe", "object", "embed", "base", "image"}
    assert "http:" not in source.replace("http-equiv", "")
    assert "https:" not in source
    assert "@import" not in source
    for _, attributes in seen.attributes:
        assert "src" not in attributes
        assert all((attributes.get(key) or "#").startswith("#") for key in ("href", "xlink:href"))


def test_only_our_own_script_may_run(ppca_run):
    seen, _ = outline(ppca_run)
    policy = next(a["content"] for tag, a in seen.attributes if tag == "meta" and a.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert seen.tags["script"] == 1


def test_page_says_the_verdict_first_and_in_words(ppca_run):
    seen, source = outline(ppca_run)
    assert (
        "Of 9 claims of the paper, put to a fair test with equal draws and corrected losses, 9 hold (5 seeds)."
        in seen.text
    )
    assert source.index('class="summary"') < source.index("<table")
    assert "with the best fitted proposal (MIS-full-optimal)" in seen.text
    assert "both with aligned Sobol draws" in seen.text
    assert "preset" not in seen.text.split("What holds")[0]


def test_page_can_be_used_without_eyes_and_without_a_mouse(ppca_run):
    seen, _ = outline(ppca_run)
    drawings = [a for tag, a in seen.attributes if tag == "svg"]
    assert len(drawings) == 6
    assert all(a["role"] == "img" and len(a["aria-label"] or "") > 40 for a in drawings)
    ids = Counter(a["id"] for _, a in seen.attributes if "id" in a)
    assert max(ids.values()) == 1
    boxes = [a for _, a in seen.attributes if a.get("class") == "scroll"]
    assert len(boxes) == seen.tags["table"]
    assert all(a["tabindex"] == "0" and a["aria-labelledby"] in ids for a in boxes)
    assert all(a["scope"] in ("col", "row") for tag, a in seen.attributes if tag == "th")


def test_drawings_follow_the_colour_of_the_page(ppca_run):
    _, source = outline(ppca_run)
    assert "currentColor" in source.split("</style>", 1)[1]
    assert svg.INK not in source
    assert svg.INK in (ppca_run / "figures" / "draws.svg").read_text()


def test_every_figure_is_also_a_file(ppca_run):
    names = {path.name for path in (ppca_run / "figures").iterdir()}
    stems = ("cross-mae-k5", "cross-khat-k5", "cross-mae-k200", "cross-khat-k200", "draws", "khat")
    assert names == {stem + suffix for stem in stems for suffix in (".svg", ".png")}
    assert (ppca_run / "figures" / "khat.png").read_bytes().startswith(b"\x89PNG")


def test_rendering_twice_gives_the_same_bytes_and_leaves_matplotlib_alone(ppca_run, tmp_path):
    import matplotlib

    def settings() -> dict[str, Any]:  # asking for the backend would choose one
        return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}

    before, had_pyplot = settings(), "matplotlib.pyplot" in sys.modules
    again = run_in(tmp_path, ppca_results())
    render(again)
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
    assert settings() == before
    for path in (ppca_run / "report.html", *(ppca_run / "figures").iterdir()):
        assert (again / path.relative_to(ppca_run)).read_bytes() == path.read_bytes()


def test_names_of_any_kind_are_printed_and_never_obeyed(tmp_path):
    run = run_in(tmp_path, demo_results())
    render(run)
    seen, source = outline(run)
    assert seen.tags["script"] == 1
    assert "<script>alert" not in source
    assert "alert('x')</script> \"&\" $\\frac$ 名前 a|b `c` \ufffd" in seen.text
    assert "\x07" not in source + text(run) + markdown(run)


def test_names_of_any_kind_can_be_drawn(tmp_path):
    results = json.loads(json.dumps(ppca_results(range(1), [5])).replace('"IWAE"', json.dumps(NASTY)))
    page_path = render(run_in(tmp_path, results))
    assert "名前" in page_path.read_text(encoding="utf-8").split("<svg", 1)[1]
    assert Outline(page_path.read_text(encoding="utf-8")).tags["script"] == 1


def test_titles_captions_and_claims_are_escaped():
    table = Table(NASTY, NASTY, (Column("a", NASTY),), [{"a": NASTY}], NASTY, detail=True)
    claim = Claim(NASTY, [Evidence(NASTY, None, 1)], NASTY)
    source = page(
        Document(NASTY, [NASTY], [Section(NASTY, [NASTY, table, [claim]])], {NASTY: {NASTY: [NASTY, 1.0, None]}}), {}
    )
    seen = Outline(source)
    assert seen.tags["script"] == 1
    assert source.count("<script>") == 1
    assert slug("../" + NASTY).isascii()
    assert "/" not in slug("../x")


def test_demo_says_whether_to_use_the_answers(tmp_path):
    usable = text(run_in(tmp_path / "a", demo_results()))
    assert "These answers can be used. The weights are in order for 96% of the observations" in usable
    assert "cover the truth in 67% of 3 observations" in usable
    careful = text(run_in(tmp_path / "b", demo_results(share_ok=0.85, share_caution=0.1, share_refuse=0.05)))
    assert "can be used with care" in careful
    refused = text(run_in(tmp_path / "c", demo_results(share_ok=0.5, share_refuse=0.5)))
    assert "should not be used as they are" in refused
    counted = text(
        run_in(tmp_path / "d", demo_results(n_different=1, n_observations=9, n_different_flagged=1, rungs={"MIS": 9}))
    )
    assert "Of 9 decisions, 1 differs from what exact probabilities would give, and 1 of those was marked" in counted
    assert "9 at MIS" in counted


def test_bivariate_page_has_its_panels_and_claims(tmp_path):
    run = run_in(tmp_path / "in" / "run", bivariate_results())
    render(run)
    seen, _ = outline(run)
    assert {path.name for path in (run / "figures").glob("*.svg")} == {
        "approximation-entangled.svg",
        "selection-entangled-exact.svg",
    }
    assert "2 hold and 1 does not hold" in seen.text
    assert "CHI minus VAE: \N{MINUS SIGN}0.2000 (se 0.0100, 400 observations)" in seen.text
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".svg") == [
        "approximation-entangled.svg", "selection-entangled-exact.svg",
    ]  # fmt: skip


def audit_results() -> dict[str, Any]:
    fit = {"k": 30, "best_variance": 1.37, "chi_square": None, "best_chi_square": 1.02}
    gains = {"as released": 0.005, "equal draws": -0.004}
    return {
        "experiment": "audit", "preset": "paper", "seeds": [0],
        "derivatives": [{"k": 30, "loss": "released", "derivative": -0.344, "se": 0.001, "exact": 0.357}],
        "fits": [
            {**fit, "loss": "released", "steps": n, "seed": s, "variance": n + s, "log10_variance": math.log10(n + s)}
            for n in (9, 90) for s in SEEDS
        ],
        "collapse": [{"k_train": 200, "loss": "released", "seed": s, "behind": 0.3 + WOBBLE[s]} for s in range(3)],
        "mixture": [
            {"setting": setting, "against": "CHI", "seed": s, "gain": gain + WOBBLE[s] / 10, "n_mixture": 9}
            for setting, gain in gains.items() for s in SEEDS
        ],
        "comparison": [{"model": "VAE", "metric": "mae", "measured": 0.06, "spread": None, "released": 0.05}],
        "patterns": [{"pattern": NASTY, "found_in": 1, "data_sets": 3}],
    }  # fmt: skip


def test_audit_page_weighs_its_statements(tmp_path):
    run = run_in(tmp_path, audit_results())
    render(run)
    seen, _ = outline(run)
    assert "Of 4 statements on the released code, 3 hold and 1 does not hold." in seen.text
    assert "has derivative \N{MINUS SIGN}0.344 (se 0.001) where that of the bound is +0.357" in seen.text
    assert "held-out log p lost, 200 particles: +0.300 (se 0.001, 3 data sets)" in seen.text
    assert (run / "figures" / "variance-k30.svg").exists()
    partial = text(run_in(tmp_path / "b", {**audit_results(), "fits": []}))
    assert "2 hold, 1 does not hold and 1 was not run" in partial


@pytest.mark.parametrize(
    "empty", [("floors",), ("cross", "curve"), ("models", "cross", "curve", "floors", "selection")]
)
def test_a_run_without_some_stages_still_has_a_page(tmp_path, empty):
    results = ppca_results(range(1), [5]) | {name: [] for name in empty} | {"preset": "quick"}
    seen, _ = outline(render(run_in(tmp_path, results)).parent)
    assert "This is the quick preset" in seen.text


def test_missing_numbers_are_shown_as_missing(tmp_path):
    results = ppca_results(range(2), [5])
    for row in results["cross"]:
        row["khat"] = row["khat_share_ok"] = row["khat_quantiles"] = None
    results["models"][0]["mae"] = None
    run = run_in(tmp_path, results)
    render(run)
    assert "(1 missing)" in markdown(run)


# ----------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"experiment": "ppca", "models": [{"mod', "not whole JSON"),
        (b"\xff\xfe\x00", "not whole JSON"),
        (b"[1, 2]", "holds a list"),
        (b"{}", "experiment None; reports exist for ppca, bivariate, audit, demo"),
        (b'{"experiment": ["ppca"]}', r"experiment \['ppca'\]"),
        (b'{"experiment": "unknown"}', "experiment 'unknown'"),
        (b'{"experiment": "ppca", "models": 3}', "'models' in results.json is not a list"),
        (b'{"experiment": "ppca", "seeds": 3}', "lacks something that its report needs"),
        (b'{"experiment": "demo"}', "no 'decision'"),
        (b'{"experiment": "bivariate"}', "no 'panels'"),
    ],
)
def test_unusable_results_are_named(tmp_path, content, message):
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        render(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_records_that_cannot_be_drawn_are_the_files_fault(tmp_path):
    results = bivariate_results()
    del results["panels"][1]["grid"]
    with pytest.raises(DataError, match="'grid'"):
        render(run_in(tmp_path, results))


def test_missing_runs_and_damaged_manifests_are_named(tmp_path):
    with pytest.raises(DataError, match="does not exist; give the directory of a finished run"):
        render(tmp_path / "nowhere")
    run = run_in(tmp_path, demo_results())
    (run / "manifest.json").write_text('{"command": [')
    with pytest.raises(DataError, match=r"manifest\.json is not whole JSON"):
        render(run)
    (run / "manifest.json").unlink()
    assert "what produced them is not known" in render(run).read_text(encoding="utf-8")


def test_files_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = write_whole(tmp_path / "a" / "page.html", "old")

    def torn(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("vaerdict.report.page.os.replace", torn)
    with pytest.raises(OSError, match="disk full"):
        write_whole(target, "new")
    assert target.read_text() == "old"


def test_readme_is_rebuilt_between_its_markers(tmp_path):
    run_in(tmp_path / "results" / "ppca", ppca_results())
    readme = tmp_path / "README.md"
    readme.write_text("# Title ü\n<!-- results:ppca -->\nstale\n<!-- /results:ppca -->\nafter\n", encoding="utf-8")
    assert update_readme(readme, tmp_path / "results") == ["ppca"]
    first = readme.read_text(encoding="utf-8")
    assert first.startswith("# Title ü\n<!-- results:ppca -->\n\nOf 9 claims")
    assert first.endswith("<!-- /results:ppca -->\nafter\n")
    assert "stale" not in first
    assert "Every proposal, kind of draws" not in first  # a detail
    update_readme(readme, tmp_path / "results")
    assert readme.read_text(encoding="utf-8") == first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<!-- results:ppca -->", "exactly one"),
        ("<!-- /results:ppca --> <!-- results:ppca -->", "exactly one"),
        ("<!-- results:ppca --><!-- results:ppca --><!-- /results:ppca -->", "exactly one"),
        ("<!-- results:genes --><!-- /results:genes -->", "does not exist"),
    ],
)
def test_a_readme_that_cannot_be_rebuilt_is_left_as_it_is(tmp_path, content, message):
    run_in(tmp_path / "ppca", ppca_results(range(1)))
    readme = tmp_path / "README.md"
    readme.write_text(content)
    with pytest.raises(DataError, match=message):
        update_readme(readme, tmp_path)
    assert readme.read_text() == content
    with pytest.raises(DataError, match="does not exist"):
        update_readme(tmp_path / "none.md", tmp_path)


def test_matplotlib_is_loaded_only_to_draw(tmp_path, monkeypatch):
    for path in Path(svg.__file__).parent.glob("*.py"):
        at_import = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [node for node in at_import if re.search("matplotlib|rich", ast.unparse(node))]
    run = run_in(tmp_path, demo_results())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "These answers" in markdown(run)
    with pytest.raises(SettingError, match=r"pip install 'vaerdict\[plot\]'"):
        render(run)


def test_inline_drawings_keep_their_ids_apart():
    parts = '<g id="a"/><use xlink:href="#a"/></svg>'
    source = f'<?xml?><svg xmlns="http://x" viewBox="0 0 1 1"><metadata>http://y</metadata>{parts}'
    one = Picture("one two", "c", 'say "<alt>"', lambda: None)  # type: ignore[arg-type, return-value]
    assert svg.inline(source, one) == (
        '<svg viewBox="0 0 1 1" role="img" aria-label="say &quot;&lt;alt&gt;&quot;">'
        '<g id="one-two-a"/><use xlink:href="#one-two-a"/></svg>'
    )
    assert 'id="two-a"' in svg.inline(source, replace(one, name="two"))


def test_results_are_not_changed_by_reporting(tmp_path):
    results = ppca_results(range(2))
    kept = copy.deepcopy(results)
    markdown(run_in(tmp_path, results))
    paper_claims(results["models"], results["cross"], {})
    assert results == kept


def test_benchmarks_of_a_folder_become_tables_with_their_machine(tmp_path: Path) -> None:
    row = {"case": "grid", "ours_s": 2.0, "peer": NASTY, "peer_s": 10.0, "ratio": 5.0}
    hardware = {"machine": "x", "cores": 4, "threads": 2, "accelerator": None}
    result = {"benchmark": "ppca", "hardware": hardware, "versions": {"torch": "2.13"}, "rows": [row]}
    (tmp_path / "ppca.json").write_text(json.dumps(result))
    told = markdown(tmp_path)
    assert "2 threads of 4 CPU cores" in told
    assert "| 5.0 |" in told
    page = render(tmp_path).read_text()
    assert NASTY not in page
    (tmp_path / "ppca.json").write_text(json.dumps({**result, "rows": 3}))
    with pytest.raises(DataError, match="run the experiment again"):
        markdown(tmp_path)


def test_a_brief_readme_has_verdicts_without_their_evidence(tmp_path: Path) -> None:
    run_in(tmp_path / "results" / "ppca", ppca_results())
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:ppca/brief --><!-- /results:ppca/brief -->")
    assert update_readme(readme, tmp_path / "results") == ["ppca/brief"]
    brief, full = readme.read_text(encoding="utf-8"), markdown(tmp_path / "results" / "ppca")
    assert "- **" in brief
    assert brief.count("|---") + brief.count("| ---") < full.count("|---") + full.count("| ---")
    assert "| claim | verdict | evidence |" in full
    assert "| claim | verdict | evidence |" not in brief
    assert brief.index("<details><summary>") < brief.index("| ---") < brief.index("</details>")
    assert "<details>" not in full
