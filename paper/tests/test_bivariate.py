"""Figure 1 of the paper: closed forms of one particle, the maximum of the evidence, and which claims hold."""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache
from typing import Any

import pytest
import torch

from checks import assert_mean
from page_checks import outline, run_in
from vaerdict.core import DataError, SettingError
from vaerdict.distributions import Diagonal, Elliptical
from vaerdict.io import commit
from vaerdict.models.ppca import LambdaPPCA
from vaerdict.noise import seeded
from vaerdict.objectives import iwelbo
from vaerdict.report import render
from vaerdict.report.tables import Table
from vaerdict_paper.experiments import bivariate
from vaerdict_paper.experiments.bivariate import (
    LOADINGS,
    MEANS,
    PRESETS,
    PROPOSALS,
    TRUE_LAMBDA,
    VARIANCES,
    Choice,
    Example,
    Preset,
    scramblings,
)
from vaerdict_paper.pages import bivariate as page
from vaerdict_paper.pages import bivariate_bounds, bivariate_random
from vaerdict_paper.pages.bivariate_figures import MEANS as MEANS_TEXT
from vaerdict_paper.pages.claims import ClaimVerdict, judged
from vaerdict_paper.theory.gaussians import Gaussian, gaussian_reverse_kl

QUICK = PRESETS["quick"]
TINY = Preset(loadings=("moderate",), n_points=64, n_scramblings=2, n_grid=7, n_zoom=3, n_random=3, n_random_grid=5)


@cache
def panel(stage: str, means: str | None = None, loading: str = "entangled", preset: Preset = QUICK) -> dict:
    wanted = {"stage": stage, "means": means, "loading": loading}
    (task,) = [t for t in bivariate.tasks(preset) if wanted.items() <= t.items()]
    (row,) = bivariate.work(task)["panels"]
    return row


def example_of(loading: str, preset: Preset) -> Example:
    (points,) = scramblings(preset, 1, seed=1)
    with torch.no_grad():
        return Example.of(torch.tensor(LOADINGS[loading], dtype=torch.float64), points)


# ------------------------------------------------------------------------------------------------ panels A and B
def test_ellipses_are_the_closed_forms_of_two_dimensions():
    shapes = panel("approximation")
    by = {row["proposal"]: row for row in shapes["proposals"]}
    rho = shapes["posterior"]["correlation"]
    root = math.sqrt(1 + 8 * rho**2)
    expected = {"VAE": 1 - rho**2, "WW": 1.0, "CHI": 2 * (1 - rho**2) / (3 - root)}
    for name, ratio in expected.items():
        assert by[name]["variance_ratio"] == pytest.approx([ratio, ratio])
    for name, ratio in expected.items():  # eigenvalues of the posterior in units of q are (1 +- rho) / ratio
        norm = max(abs((1 + sign * rho) / ratio - 1) for sign in (1, -1))
        assert by[name]["a_norm"] == pytest.approx(norm)
        assert by[name]["a_norm_se"] == pytest.approx(0, abs=1e-12)
    assert expected["VAE"] < max(by["IWAE"]["variance_ratio"]) < 1
    assert by["IWAE"]["a_norm_se"] > 0
    (claims,) = judged(page._shape_claims(shapes))
    assert [claim.verdict for claim in claims] == [ClaimVerdict.HOLDS] * 2


def test_the_figure_has_a_clearly_correlated_posterior_and_the_loadings_their_documented_correlations():
    preset = Preset(loadings=tuple(LOADINGS), n_points=64, n_scramblings=2)
    rhos = [panel("approximation", loading=name, preset=preset)["posterior"]["correlation"] for name in LOADINGS]
    assert [round(rho, 2) for rho in rhos] == [-0.86, -0.67, -0.37]


def test_shape_claims_can_fail():
    rows = [{"proposal": name, "variance_ratio": [1.0, 1.1], "a_norm": float(name != "VAE")} for name in PROPOSALS]
    (claims,) = judged(page._shape_claims({"proposals": rows}))
    assert [claim.verdict for claim in claims] == [ClaimVerdict.FAILS] * 2


# ------------------------------------------------------------------------------------------------ panels C and D
@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_with_one_particle_the_slack_is_the_reverse_kl(means, proposal):
    """Over 100 scramblings of a net; the mean of the KL over x is that at the points x = C (+-sqrt 2, 0) and so on."""
    example = example_of("moderate", Preset(k=1, n_points=128))
    model, start = LambdaPPCA(example.base, 0.4), LambdaPPCA(example.base, 0.0)
    with torch.no_grad():
        x = math.sqrt(2) * torch.cat([example.root, -example.root], 1).mT  # exact for functions quadratic in x
        p = model.posterior(x)
        loc = (model if means == "exact" else start).posterior(x).loc
        q = Gaussian.diagonal(loc, (1 / example.precision[proposal]).expand_as(loc))
        kl = gaussian_reverse_kl(Gaussian(p.loc, p.covariance()), q).mean().item()
        nets = scramblings(Preset(k=1, n_points=128), 100, seed=2)
        each = [Example(example.base, points, example.precision) for points in nets]
        slack = torch.tensor([e.slack(0.4, proposal, means) for e in each])
    assert_mean(slack, kl, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(slack + 0.1, kl, rate=1e-6)


@pytest.mark.parametrize("means", MEANS)
def test_slack_is_that_of_simulated_observations(means):
    example = example_of("entangled", Preset())
    model, lam = LambdaPPCA(example.base, TRUE_LAMBDA), 0.5
    with torch.no_grad():
        x = model.simulate(20_000, generator=seeded(3))[0]
        at = LambdaPPCA(example.base, lam)
        loc = (at if means == "exact" else LambdaPPCA(example.base, 0.0)).posterior(x).loc
        eps = torch.randn(5, *x.shape, generator=seeded(4), dtype=x.dtype)
        for name in PROPOSALS:
            q = Elliptical(loc, Diagonal(example.precision[name].rsqrt().expand_as(loc)))
            z = loc + q.root.apply(eps)
            slack = at.log_evidence(x) - iwelbo(at.log_joint(x, z) - q.log_prob(z))
            assert_mean(slack, example.slack(lam, name, means), rate=1e-6)
            with pytest.raises(AssertionError, match="standard errors"):
                assert_mean(1.2 * slack, example.slack(lam, name, means), rate=1e-6)


def test_the_evidence_is_exact_and_selects_the_truth():
    example = example_of("triangular", TINY)
    with torch.no_grad():
        x = math.sqrt(2) * torch.cat([example.root, -example.root], 1).mT
        for lam in (-0.7, 0.0, TRUE_LAMBDA):
            exact = LambdaPPCA(example.base, lam).log_evidence(x).mean().item()
            assert example.evidence(lam) == pytest.approx(exact, rel=1e-12)
    for means in MEANS:
        (row,) = [r for r in panel("selection", means)["selection"] if r["proposal"] == "EVIDENCE"]
        assert abs(row["bias"]) < 1e-4
        assert row["sensitivity"] == 0


@pytest.mark.parametrize("means", MEANS)
def test_curves_lie_below_the_evidence_and_their_maxima_in_the_zoom(means):
    panels = panel("selection", means)
    curves = panels["curves"]
    for name in PROPOSALS:
        assert (torch.tensor(curves["EVIDENCE"]["value"]) > torch.tensor(curves[name]["value"])).all()
        assert all(0 < error < 1 for error in curves[name]["mcse"])
    for row in panels["selection"]:
        assert panels["zoom_grid"][0] <= row["lambda"] <= panels["zoom_grid"][-1]
        assert not row["at_edge"]
        top = max(panels["zoom"][row["proposal"]]["value"])
        assert top >= max(curves[row["proposal"]]["value"]) - 0.05


def test_the_claim_on_bias_holds_with_exact_means_and_is_reversed_with_frozen_ones():
    for means, sign in (("exact", 1), ("frozen", -1)):
        (claim,) = [c for c in panel("selection", means)["claims"] if "higher bias" in c["claim"]]
        assert all(sign * m["margin"] > 0 for m in claim["margins"].values())
        assert sign * claim["margins"]["CHI - VAE"]["margin"] > 10 * claim["margins"]["CHI - VAE"]["se"]


def test_margins_are_paired_by_scrambling():
    noise = (0.0, 0.01, 0.02)
    levels = {"EVIDENCE": 0.0, "VAE": 0.1, "IWAE": -0.2, "WW": 0.3, "CHI": 0.4}
    choices = {
        name: [Choice(TRUE_LAMBDA + math.copysign(abs(level) + e, level), level, 1.0) for e in noise]
        for name, level in levels.items()
    }
    slope, flat, bias = (claim["margins"] for claim in bivariate.claims(choices))
    assert bias["WW - IWAE"] == {"margin": pytest.approx(0.1), "se": pytest.approx(0, abs=1e-12)}
    assert slope["WW - IWAE"]["margin"] == pytest.approx(0.1)
    assert flat["CHI - VAE"] == {"margin": 0, "se": 0}
    choices["WW"] = [Choice(TRUE_LAMBDA + 0.3 + 2 * e, 0.3, 1.0) for e in noise]
    assert bivariate.claims(choices)[2]["margins"]["WW - VAE"]["se"] == pytest.approx(0.01 / 3**0.5)


# ---------------------------------------------------------------------------------------------- random loadings
def test_random_loadings_have_the_stated_variance_and_do_not_depend_on_how_they_are_split(monkeypatch):
    for variance in VARIANCES:
        loadings = bivariate.random_loadings(Preset(n_random=5_000), variance, 0)
        assert_mean(loadings.square(), variance, rate=1e-6)

    def rows_by_batch() -> list[list[dict]]:
        return [bivariate.work(task)["random"] for task in bivariate.tasks(TINY) if task["stage"] == "random"]

    rows = [row for batch in rows_by_batch() for row in batch]
    monkeypatch.setattr(bivariate, "_BATCH", 2)
    assert len(split := rows_by_batch()) == 2 * len(VARIANCES)
    assert [row for batch in split for row in batch] == rows
    assert len({row["correlation"] for row in rows}) == len(rows) == TINY.n_random * len(VARIANCES)


def test_a_row_of_random_loadings_is_what_the_figure_shows_of_the_same_loadings():
    preset = Preset(loadings=("moderate",), n_points=256, n_scramblings=2, n_grid=25, n_random_grid=25)
    points, _ = scramblings(preset, 2, 0)
    base = torch.tensor(LOADINGS["moderate"], dtype=torch.float64)
    with torch.no_grad():
        example = Example.of(base, points)
        row = bivariate.random_row(preset, example)
        shapes = bivariate.approximation([example, example])
        selected = bivariate.selection(preset, [example, example], "frozen")
    assert row["correlation"] == pytest.approx(shapes["posterior"]["correlation"], rel=1e-5)
    assert row["a_norm"] == pytest.approx([q["a_norm"] for q in shapes["proposals"]], rel=1e-5)
    assert row["frozen"]["lambda"] == pytest.approx([r["lambda"] for r in selected["selection"][1:]], rel=1e-5)
    assert row["frozen"]["slope"] == pytest.approx([r["sensitivity"] for r in selected["selection"][1:]], rel=1e-5)
    gap = row["frozen"]["bias"][PROPOSALS.index("CHI")] - row["frozen"]["bias"][PROPOSALS.index("IWAE")]
    assert gap == pytest.approx(selected["claims"][2]["margins"]["CHI - IWAE"]["margin"], abs=1e-5)


# ---------------------------------------------------------------------------------------------------- interface
def test_tasks_survive_json_and_repeat():
    tasks = bivariate.tasks(TINY, seeds=2)
    assert len(tasks) == 2 * (1 + len(MEANS) + len(VARIANCES))
    sent = [bivariate.work(json.loads(json.dumps(task))) for task in tasks]
    assert json.dumps(sent) == json.dumps([bivariate.work(task) for task in tasks])
    assert json.dumps(sent[:6]) != json.dumps(sent[6:])


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(SettingError, match="no loadings tangled; choose from entangled"):
        Preset(loadings=("entangled", "tangled"))
    with pytest.raises(SettingError, match="n_scramblings=1 gives no standard error"):
        Preset(n_scramblings=1)


def test_a_quick_run_has_a_manifest_of_what_produced_it(command, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "quick", TINY)
    arguments = ("reproduce", "bivariate", "--out", tmp_path, "--workers", 1)
    assert command(*arguments)[0] == 0
    stored = json.loads((tmp_path / "manifest.json").read_text())
    assert stored["command"] == ["vaerdict", *map(str, arguments)]
    assert stored["commit"] == commit()
    loadings = [torch.tensor(LOADINGS["moderate"], dtype=torch.float64)]
    loadings += [bivariate.random_loadings(TINY, variance, 0) for variance in VARIANCES]
    assert stored["data_sha256"] == hashlib.sha256(b"".join(w.numpy().tobytes() for w in loadings)).hexdigest()
    assert stored["settings"]["n_points"] == 64
    assert stored["seconds"].keys() == json.loads((tmp_path / "results.json").read_text())["seconds"].keys()
    assert (tmp_path / "report.html").exists()


# --------------------------------------------------------------------------------------------------------- page
def bivariate_results() -> dict[str, Any]:
    names = PROPOSALS
    covariance = [[1.0, 0.6], [0.6, 1.0]]
    shape = {
        "stage": "approximation", "loading": "../entangled", "means": None, "seed": 0,
        "posterior": {"covariance": covariance, "correlation": 0.6},
        "proposals": [
            {"proposal": q, "covariance": [[v, 0], [0, v]], "variance_ratio": [v, v], "a_norm": 1 / v, "a_norm_se": 0.0}
            for q, v in zip(names, (0.5, 0.9, 1.0, 1.3), strict=True)
        ],
    }  # fmt: skip
    margins = {"WW - VAE": {"margin": 0.1, "se": 0.01}, "CHI - VAE": {"margin": -0.2, "se": 0.01}}
    curves = {q: {"value": [0.0, 1.0, 0.5], "mcse": [0.1] * 3} for q in ("EVIDENCE", *names)}
    choice = {
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
        "zoom": curves, "selection": [{"proposal": q, **choice} for q in curves],
        "claims": [{"claim": "WW and CHI select worse", "margins": margins}],
    }  # fmt: skip
    return {
        "experiment": "bivariate",
        "preset": "quick",
        "settings": {"n_scramblings": 16},
        "seeds": [0],
        "panels": [shape, chosen],
        "random": [random_row(index) for index in range(20)],
    }


def random_row(index: int) -> dict[str, Any]:
    """Loadings on which, with exact means, WW and CHI err the most in 15 of 20, and with frozen ones in none."""
    errors = {True: [0.1, 0.2, 0.3, 0.4], False: [0.2, 0.3, 0.1, 0.4]}
    sizes = {"slope": [1.0] * 4, "range": [1.0, 2.0, 3.0, 4.0]}
    return {
        "variance": 1.0, "seed": 0, "loading": [[1, 0], [0, 1]], "correlation": index / 20,
        "variance_ratio": [0.5, 0.9, 1.0, 1.3], "a_norm": [3.0, 2.0, 1.0, 2.0],
        "exact": {**sizes, "bias": errors[index < 15]}, "frozen": {**sizes, "bias": [0.4, 0.3, 0.2, 0.1]},
    }  # fmt: skip


def test_page_has_its_panels_and_claims(tmp_path):
    run = run_in(tmp_path / "in" / "run", bivariate_results())
    seen, _ = outline(render(run))
    figures = [
        "approximation-entangled.svg",
        "random-errors.svg",
        "random-widths.svg",
        "selection-entangled-exact.svg",
    ]
    assert sorted(path.name for path in tmp_path.rglob("*.svg")) == figures  # and none outside of the folder
    assert sorted(path.name for path in (run / "figures").glob("*.svg")) == figures
    assert "2 hold and 1 does not hold" in seen.text
    assert "CHI minus VAE: \N{MINUS SIGN}0.2000 (se 0.0100, 16 scramblings, p < 0.0001)" in seen.text


def test_shares_of_random_loadings_have_exact_intervals_and_decide_their_claims():
    rows = [random_row(index) for index in range(20)]
    claims = {claim.text: claim for claim in judged(bivariate_random.random_claims(rows))[0]}
    assert len(claims) == len(MEANS) * 3
    verdicts = [
        claims[f"On most random loadings, {bivariate.CLAIMS[key]} ({MEANS_TEXT[means]})."].verdict
        for means, key in (("exact", "bias"), ("exact", "range"), ("exact", "slope"), ("frozen", "bias"))
    ]
    assert verdicts == [ClaimVerdict.HOLDS, ClaimVerdict.HOLDS, ClaimVerdict.FAILS, ClaimVerdict.FAILS]
    table = bivariate_random._claims_table(rows)
    cells = {row["statement"]: table.columns[1].text(row["1"]) for row in table.rows}
    assert cells["variance: VAE < WW < CHI"] == "100 (83 to 100)"  # 1 - .025^(1/20)
    assert cells[f"error of λ: WW and CHI > VAE and IWAE ({MEANS_TEXT['exact']})"] == "75 (51 to 91)"
    assert cells[f"error of λ: WW > IWAE ({MEANS_TEXT['frozen']})"] == "0 (0 to 17)"
    errors = bivariate_random._errors_table(rows)
    best = {row["proposal"]: (row["error-1"].value, row["least-1"].value) for row in errors.rows}
    assert best[f"CHI ({MEANS_TEXT['frozen']})"] == (0.1, 1.0)
    assert best[f"WW ({MEANS_TEXT['exact']})"] == (0.3, 0.25)
    assert "75 (51 to 91) with means at the λ in question, 0 (0 to 17)" in bivariate_random.random_summary(rows)


def test_a_run_without_random_loadings_has_a_page(tmp_path):
    results = bivariate_results()
    del results["random"]
    seen, _ = outline(render(run_in(tmp_path, results)))
    assert "Random loadings" not in seen.text


def test_records_that_cannot_be_drawn_are_named(tmp_path):
    with pytest.raises(DataError, match="no 'panels'"):
        render(run_in(tmp_path, {"experiment": "bivariate"}))
    results = bivariate_results()
    del results["panels"][1]["grid"]
    with pytest.raises(DataError, match="'grid'"):
        render(run_in(tmp_path, results))


def test_what_the_bounds_promise_for_the_proposals():
    shape = bivariate_results()["panels"][0]  # correlation 0.6 and variances 0.5 to 1.3 of the proposals
    _, promises, printed = bivariate_bounds.bounds_blocks(shape)
    assert isinstance(promises, Table)
    assert isinstance(printed, Table)
    rows = {row["proposal"]: row for row in promises.rows}
    assert rows["WW"]["kl"].value == pytest.approx(-0.5 * math.log(1 - 0.6**2))
    assert rows["WW"]["chi"].value == pytest.approx(1 / (1 - 0.6**2) - 1)
    assert rows["VAE"]["chi"] == "infinite"  # the posterior's largest variance is 1.6, twice that of the proposal is 1
    assert rows["WW"]["a_norm"].value == pytest.approx(0.6)
    root, gamma = math.sqrt(3) * 21, 4 * 0.6
    expected = 8 * gamma * math.log10(root) + rows["WW"]["kl"].value / math.log(10)
    assert rows["WW"]["corrected"].value == pytest.approx(expected, abs=1e-6)
    for row in printed.rows:
        assert row["printed"].value < row["truth"].value <= row["corrected"].value * (1 + 1e-12)
