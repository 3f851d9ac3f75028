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
from vaerdict.io import commit
from vaerdict.report import render
from vaerdict_paper.experiments import bivariate
from vaerdict_paper.experiments.bivariate import LOADINGS, MEANS, PRESETS, PROPOSALS, TRUE_LAMBDA, Example, Preset
from vaerdict_paper.pages import bivariate as page
from vaerdict_paper.pages.claims import ClaimVerdict
from vaerdict_paper.theory.gaussians import Gaussian, gaussian_reverse_kl

QUICK = PRESETS["quick"]


@cache
def panel(stage: str, means: str | None = None, loading: str = "entangled", preset: Preset = QUICK) -> dict:
    wanted = {"stage": stage, "means": means, "loading": loading}
    (task,) = [t for t in bivariate.tasks(preset) if wanted.items() <= t.items()]
    (row,) = bivariate.work(task)["panels"]
    return row


def holds(row: dict, text: str) -> bool:
    (claim,) = [c for c in row["claims"] if text in c["claim"]]
    return claim["holds"]


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
    assert expected["VAE"] < max(by["IWAE"]["variance_ratio"]) < 1
    assert all(row["mean"] == shapes["posterior"]["mean"] for row in shapes["proposals"])
    assert [claim.verdict for claim in page._shape_claims(shapes)] == [ClaimVerdict.HOLDS] * 2


def test_the_figure_has_a_clearly_correlated_posterior_and_the_loadings_their_documented_correlations():
    preset = Preset(loadings=tuple(LOADINGS), n_data=10, n_draws=200)
    rhos = [panel("approximation", loading=name, preset=preset)["posterior"]["correlation"] for name in LOADINGS]
    assert [round(rho, 2) for rho in rhos] == [-0.86, -0.67, -0.37]


def test_shape_claims_can_fail():
    rows = [{"proposal": name, "variance_ratio": [1.0, 1.1], "a_norm": float(name != "VAE")} for name in PROPOSALS]
    assert [claim.verdict for claim in page._shape_claims({"proposals": rows})] == [ClaimVerdict.FAILS] * 2


# ------------------------------------------------------------------------------------------------ panels C and D
@pytest.mark.parametrize("means", MEANS)
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_with_one_particle_the_bound_is_the_evidence_less_the_reverse_kl(means, proposal):
    with torch.no_grad():
        example = Example.of(Preset(k=1, n_data=20_000, n_draws=500), "moderate", seed=1)
        lam, start = example.model(0.4), example.model(0.0)
        p = lam.posterior(example.x)
        loc = (lam if means == "exact" else start).posterior(example.x).loc
        q = Gaussian.diagonal(loc, (1 / example.precision[proposal]).expand_as(loc))
        kl = gaussian_reverse_kl(Gaussian(p.loc, p.covariance()), q)
        rest = example.bound(0.4, proposal, means) - (example.evidence(0.4) - kl)
    assert_mean(rest, 0.0, rate=1e-6)
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(rest + 0.1, 0.0, rate=1e-6)


def test_the_evidence_selects_the_truth_with_the_standard_error_of_maximum_likelihood():
    (row,) = [r for r in panel("selection", "exact")["selection"] if r["proposal"] == "EVIDENCE"]
    assert abs(row["bias"]) < 4 * row["lambda_se"]
    assert row["sensitivity"] == 0
    base = torch.tensor(LOADINGS["entangled"], dtype=torch.float64)

    def marginal(lam: torch.Tensor) -> torch.Tensor:
        weight = torch.where(torch.eye(2) > 0, base, lam.exp() * base)
        return weight @ weight.T + torch.eye(2) / (1 - lam**2)

    lam = torch.tensor(TRUE_LAMBDA, dtype=torch.float64)
    slope = torch.autograd.functional.jacobian(marginal, lam)
    score = torch.linalg.solve(marginal(lam), slope)
    fisher = 0.5 * (score @ score).diagonal().sum().item()
    assert row["lambda_se"] == pytest.approx((QUICK.n_data * fisher) ** -0.5, rel=0.15)


@pytest.mark.parametrize("means", MEANS)
def test_curves_lie_below_the_evidence_and_their_maxima_in_the_zoom(means):
    panels = panel("selection", means)
    curves = panels["curves"]
    for curve in curves.values():
        slack = torch.tensor(curves["EVIDENCE"]["value"]) - torch.tensor(curve["value"])
        assert (slack > -4 * torch.tensor(curve["mcse"])).all()
        assert all(0 < error < 1 for error in curve["mcse"])
    for row in panels["selection"]:
        assert panels["zoom_grid"][0] <= row["lambda"] <= panels["zoom_grid"][-1]
        assert not row["at_edge"]
        top = max(panels["zoom"][row["proposal"]]["value"])
        assert top >= max(curves[row["proposal"]]["value"]) - 0.05


def test_the_claim_on_bias_holds_with_exact_means_and_is_reversed_with_frozen_ones():
    exact, frozen = panel("selection", "exact"), panel("selection", "frozen")
    assert holds(exact, "higher bias")
    assert holds(exact, "slope of their slack")
    assert not holds(frozen, "higher bias")
    for row, sign in ((exact, 1), (frozen, -1)):
        (claim,) = [c for c in row["claims"] if "higher bias" in c["claim"]]
        assert all(sign * m["margin"] > 4 * m["se"] for m in claim["margins"].values())


def test_margins_are_paired_and_a_claim_holds_only_where_all_are_positive():
    noise = torch.linspace(-1, 1, 101)
    size = {"VAE": (0.1, noise), "IWAE": (0.2, noise), "WW": (0.3, noise), "CHI": (0.4, 2 * noise)}
    claim = bivariate._margins("c", size)
    assert claim["holds"]
    assert claim["margins"]["WW - IWAE"] == {"margin": pytest.approx(0.1), "se": 0.0}
    assert claim["margins"]["CHI - VAE"]["se"] == pytest.approx(noise.std().item() / 101**0.5)
    assert not bivariate._margins("c", {**size, "WW": (0.15, noise)})["holds"]


# ---------------------------------------------------------------------------------------------------- interface
def test_tasks_survive_json_and_repeat():
    preset = Preset(loadings=("triangular",), n_data=200, n_grid=9, n_zoom=3, n_draws=200)
    tasks = bivariate.tasks(preset, seeds=2)
    assert len(tasks) == 2 * (1 + len(MEANS))
    sent = [bivariate.work(json.loads(json.dumps(task))) for task in tasks]
    assert json.dumps(sent) == json.dumps([bivariate.work(task) for task in tasks])
    assert json.dumps(sent[:3]) != json.dumps(sent[3:])


def test_unknown_loadings_are_refused():
    with pytest.raises(SettingError, match="no loadings tangled; choose from entangled"):
        Preset(loadings=("entangled", "tangled"))


def test_a_quick_run_has_a_manifest_of_what_produced_it(command, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "quick", Preset(loadings=("moderate",), n_data=200, n_grid=9, n_zoom=3, n_draws=200))
    arguments = ("reproduce", "bivariate", "--out", tmp_path, "--workers", 1)
    assert command(*arguments)[0] == 0
    stored = json.loads((tmp_path / "manifest.json").read_text())
    assert stored["command"] == ["vaerdict", *map(str, arguments)]
    assert stored["commit"] == commit()
    x = Example.of(PRESETS["quick"], "moderate", 0).x
    assert stored["data_sha256"] == hashlib.sha256(x.numpy().tobytes()).hexdigest()
    assert stored["settings"]["n_data"] == 200
    assert stored["seconds"].keys() == json.loads((tmp_path / "results.json").read_text())["seconds"].keys()
    assert (tmp_path / "report.html").exists()


# --------------------------------------------------------------------------------------------------------- page
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
        "claims": [{"claim": "WW and CHI select worse", "holds": False, "margins": margins}],
    }  # fmt: skip
    return {
        "experiment": "bivariate",
        "preset": "quick",
        "settings": {"n_data": 400},
        "seeds": [0],
        "panels": [shape, chosen],
    }


def test_page_has_its_panels_and_claims(tmp_path):
    run = run_in(tmp_path / "in" / "run", bivariate_results())
    seen, _ = outline(render(run))
    figures = ["approximation-entangled.svg", "selection-entangled-exact.svg"]
    assert sorted(path.name for path in tmp_path.rglob("*.svg")) == figures  # and none outside of the folder
    assert sorted(path.name for path in (run / "figures").glob("*.svg")) == figures
    assert "2 hold and 1 does not hold" in seen.text
    assert "CHI minus VAE: \N{MINUS SIGN}0.2000 (se 0.0100, 400 observations)" in seen.text


def test_records_that_cannot_be_drawn_are_named(tmp_path):
    with pytest.raises(DataError, match="no 'panels'"):
        render(run_in(tmp_path, {"experiment": "bivariate"}))
    results = bivariate_results()
    del results["panels"][1]["grid"]
    with pytest.raises(DataError, match="'grid'"):
        render(run_in(tmp_path, results))
