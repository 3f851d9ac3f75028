"""The audit of an encoder: exact posteriors are trusted, others are not, and what they got wrong is found."""

from __future__ import annotations

import csv
import json
import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributions as td
from torch import Tensor

import vaerdict as vd
from page_checks import NASTY, outline
from vaerdict.auditing import movement, summary
from vaerdict.auditing.blocks import Work, examine
from vaerdict.auditing.neighbours import share_kept
from vaerdict.auditing.observed import space_of
from vaerdict.auditing.page import from_run
from vaerdict.auditing.quantities import Quantity, as_quantities
from vaerdict.auditing.verdict import verdict
from vaerdict.core import DataError, SettingError, ShapeError
from vaerdict.diagnostics import Verdict
from vaerdict.distributions import Elliptical, Triangular
from vaerdict.engines import Threads
from vaerdict.noise import row_keys, seeded

N, D, P = 300, 3, 8
LOADING = torch.randn(P, D, generator=seeded(0), dtype=torch.float64)
MODEL = vd.models.PPCA(LOADING, 1.0).requires_grad_(False)
X, _ = MODEL.simulate(N, generator=seeded(1))
LABELS = ["few" if i % 4 == 0 else NASTY for i in range(N)]


class Encoder:
    """The exact posterior, with its first latent shifted by so many standard deviations and its scale multiplied."""

    def __init__(self, shift: float = 0.0, scale: float = 1.0) -> None:
        self.shift, self.scale = shift, scale

    def forward(self, x: Tensor) -> Elliptical:
        q = MODEL.posterior(x)
        assert isinstance(q.root, Triangular)
        moved = q.loc.clone()
        moved[..., 0] += self.shift * q.covariance()[..., 0, 0].sqrt()
        return Elliptical(moved, Triangular(self.scale * q.root.tril))

    def draw(self, x: Tensor, k: int, *, generator: Any) -> vd.Draws:
        return self.forward(x).draw(x, k, generator=generator)

    def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
        return self.forward(x).log_prob(z)


def reconstruction(z: Tensor) -> Tensor:
    return z @ LOADING.mT


@cache
def audited(shift: float = 0.0, scale: float = 1.0) -> vd.Audit:
    return vd.audit(
        MODEL, X, Encoder(shift, scale), quantities={"features": reconstruction}, groups=LABELS, n=400, n_searched=3
    )


def quantity(audit: vd.Audit, name: str) -> dict[str, Any]:
    return next(row for row in audit.results["quantities"] if row["name"] == name)


# ------------------------------------------------------------------------------------------------------ verdicts
def test_an_exact_encoder_is_trusted():
    audit = audited()
    assert audit.verdict is Verdict.OK
    assert bool(audit.reliable.all())
    assert set(audit.results["verdict"].values()) >= {"OK"}
    for row in audit.results["quantities"]:
        assert row["share_near"] == 1
        # a false alarm needs |difference| > 3 errors; 1 in 370 for normal errors, and these are estimated
        assert row["share_moved"] < 0.02
        assert row["sd_ratio"] == pytest.approx(1, abs=0.03)
    torch.testing.assert_close(audit.mean, MODEL.posterior(X).loc, atol=0.35, rtol=0)
    assert audit.results["search"]["n_missed"] == 0


@pytest.mark.parametrize("shift", [0.8, 2.0])
def test_a_shifted_encoder_moves_by_its_shift(shift):
    audit = audited(shift)
    latents = quantity(audit, "latent")
    assert latents["features"][0]["feature"] == "z1"
    assert latents["features"][0]["rms_sd"] == pytest.approx(shift, abs=6 * latents["features"][0]["rms_sd_error"])
    assert latents["features"][1]["rms_sd"] < 0.05
    sd = MODEL.posterior_covariance()[0, 0].sqrt().item()
    first = latents["features"][0]
    assert abs(first["shift"] + shift * sd) < 5 * first["shift_error"]  # a rate of 6e-7
    # the mean of the first feature of x moves by its loading
    moved = {row["feature"]: row for row in quantity(audit, "features")["features"]}
    for j in range(P):
        row = moved[str(j + 1)]
        assert abs(row["shift"] + shift * sd * LOADING[j, 0].item()) < 5 * row["shift_error"]
    assert latents["median_sd"] == pytest.approx(shift / math.sqrt(D), abs=0.02)
    assert audit.verdict is (Verdict.CAUTION if shift < 1 else Verdict.REFUSE)


def test_a_narrow_encoder_is_not_reliable_and_its_scale_is_found():
    audit = audited(0.0, 0.4)
    assert audit.results["encoder"]["share_reliable"] < 0.5
    assert audit.results["verdict"]["encoder"] == "REFUSE"
    assert quantity(audit, "latent")["sd_ratio"] == pytest.approx(0.4, abs=0.02)
    assert quantity(audit, "latent")["share_near"] == 1  # the means are right
    # E log p(x | z): the encoder's misses part of the spread of z
    inner = LOADING.mT @ LOADING
    expected = -0.5 * torch.trace(inner @ MODEL.posterior_covariance()) * (1 - 0.4**2)
    row = quantity(audit, "reconstruction")["features"][0]
    assert abs(row["shift"] - expected.item()) < 5 * row["shift_error"]
    assert audit.verdict is not Verdict.OK


def test_what_refined_inference_cannot_answer_is_refused():
    results = audited().results
    parts = results | {"refined": results["refined"] | {"share_reliable": 0.3}}
    assert verdict(parts)["verdict"] == "REFUSE"
    assert "could not be checked" in verdict(parts)["reason"]
    missed = verdict(results | {"search": {"n": 10, "n_missed": 1}})
    assert missed["verdict"] == "CAUTION"
    assert "1 of 10" in missed["reason"]


# ------------------------------------------------------------------------------------------------------ evidence
@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (0.8, 1.0), (0.0, 0.4)])
def test_bounds_bracket_the_exact_evidence(shift, scale):
    audit, exact = audited(shift, scale), MODEL.log_evidence(X)
    record = audit.results["evidence"]
    error = record["error"]
    assert record["n"] == N
    assert record["lower"] - 5 * error <= exact.mean().item() <= record["upper"] + 5 * error
    assert record["upper"] - record["lower"] < 0.02
    assert record["elbo"] <= record["iwelbo"] + 5 * error <= record["lower"] + 10 * error
    # ELBO: minus the divergence of two normals
    divergence = 0.5 * (D * (scale**2 - 1) + shift_square(shift)) - D * math.log(scale)
    spread = audit.columns["elbo"] - exact
    assert abs(spread.mean().item() + divergence) < 5 * spread.std().item() / math.sqrt(N)
    score = (audit.columns["lower"] - exact) / audit.columns["lower_se"]
    assert score.abs().max() < 6


def shift_square(shift: float) -> float:
    """Squared Mahalanobis length of the shift of the first latent."""
    covariance = MODEL.posterior_covariance()
    vector = torch.zeros(D, dtype=torch.float64)
    vector[0] = shift * covariance[0, 0].sqrt()
    return float(vector @ torch.linalg.solve(covariance, vector))


def test_simulated_pairs_bracket_too():
    record = audited(0.8).results["simulated"]
    assert record["n_pairs"] == 200
    assert -0.01 < record["width"] < 0.02
    assert record["share_uncovered"] == 0
    x, z = MODEL.simulate(50, generator=seeded(3))
    work = Work(
        space_of(MODEL, x), x, Encoder(), row_keys(x), {}, torch.zeros(50, dtype=torch.long), 1, 200, 400, 0, latents=z
    )
    right = summary.simulated_record(examine(work, torch.arange(50)).columns, 200)
    given = vd.audit(Chain(), CHAIN, vd.Prior(Chain.prior), n=400, n_searched=0, n_pairs=60, sample_x=chained)
    record = given.results["simulated"]
    assert record["n_pairs"] == 60
    assert abs(record["width"]) < 0.02 + 5 * record["width_error"]
    assert right["lower"] - 0.02 < MODEL.log_evidence(x).mean() < right["upper"] + 0.02


# --------------------------------------------------------------------------------------------------------- parts
def test_groups_are_listed_with_their_names_and_numbers():
    rows = {row["group"]: row for row in audited(0.8).results["groups"]}
    assert {name: row["n"] for name, row in rows.items()} == {"few": 75, NASTY: 225}
    total = sum(row["n"] * row["share_reliable"] for row in rows.values()) / N
    assert total == pytest.approx(audited(0.8).results["encoder"]["share_reliable"])
    unlabelled = vd.audit(
        MODEL, X[:9], MODEL.posterior(X[:9]), groups=["a", None, float("nan")] * 3, n=80, n_searched=0
    )
    assert [row["group"] for row in unlabelled.results["groups"]] == ["(no label)", "a"]
    assert unlabelled.results["simulated"] is None  # the encoder is made for these observations


def test_answers_do_not_depend_on_blocks_and_engines():
    whole = vd.audit(MODEL, X[:40], Encoder(), n=80, n_searched=2, n_pairs=0, block=40, engine=Threads(1))
    parts = vd.audit(MODEL, X[:40], Encoder(), n=80, n_searched=2, n_pairs=0, block=7, engine=Threads(2))
    for name, column in whole.columns.items():
        torch.testing.assert_close(column, parts.columns[name], equal_nan=True)
    other = vd.audit(MODEL, X[:40], Encoder(), n=80, n_searched=0, n_pairs=0, seed=1)
    assert not torch.equal(whole.columns["lower"], other.columns["lower"])


def test_neighbours_kept():
    points = torch.randn(50, 4, generator=seeded(0))
    assert share_kept(points, 2 * points + 1, 5).mean() == 1
    mixed = share_kept(points, points[torch.randperm(50, generator=seeded(1))], 5).mean().item()
    assert mixed == pytest.approx(5 / 49, abs=0.06)
    record = audited().results["neighbours"]
    assert record["kept_between_halves"] - 0.02 < record["kept"] <= 1


def test_movement_by_hand():
    z = torch.randn(4000, 2, 1, generator=seeded(0), dtype=torch.float64)
    sample = movement.Sample(z, z[..., 0], torch.zeros(4000, 2).double(), *torch.zeros(3, 2).double())
    tilted = sample._replace(log_w=0.5 * z[..., 0])  # the posterior is N(0.5, 1)
    moved = movement.movement([z[:10], z[10:]], [z[:10], z[10:]], sample, tilted)
    assert bool(((moved.value - moved.plugin - 0.5).abs() < 5 * moved.error).all())
    torch.testing.assert_close(moved.variance, torch.ones(2, 1).double(), atol=0.15, rtol=0)
    # the variance of w (f - 0.5) under q is 1.25 exp(0.25), that of f is 1
    expected = torch.full_like(moved.error, math.sqrt((1.25 * math.exp(0.25) + 1) / 4000))
    torch.testing.assert_close(moved.error, expected, rtol=0.2, atol=0)


# --------------------------------------------------------------------------------------------------------- files
def test_files_of_a_run(tmp_path):
    audit = audited(0.8)
    page = audit.report(tmp_path / "run", data_sha256="0" * 64)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"results.json", "manifest.json", "audit.csv", "audit.md", "report.html", "figures"}
    stored = json.loads((tmp_path / "run" / "results.json").read_text())
    assert stored["verdict"] == audit.results["verdict"]
    with (tmp_path / "run" / "audit.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == N
    assert rows[1]["group"] == NASTY
    assert float(rows[0]["latent_moved_sd"]) == pytest.approx(0.8 / math.sqrt(D), abs=0.4)
    structure, source = outline(page)
    assert "<script>alert" not in source
    assert structure is not None
    assert from_run(tmp_path / "run").title == "Audit of the encoder of PPCA"
    (tmp_path / "run" / "results.json").write_text(json.dumps({"experiment": "audit", "noun": "cells"}))
    with pytest.raises(DataError, match="lacks something"):
        from_run(tmp_path / "run")


def test_the_block_for_a_model_card():
    card = audited(2.0).to_markdown()
    assert card.startswith("### Audit of the encoder of PPCA\n")
    assert "REFUSE" in card
    assert "| latent | refuse |" in card
    assert "<script>" not in card
    assert str(audited(2.0)).startswith("Audit of the encoder of PPCA")


def test_a_page_without_answers(tmp_path):
    audit = vd.audit(MODEL, X[:4], MODEL.posterior(X[:4]), n=80, n_searched=0)
    hopeless = {name: torch.full_like(t, 2) if name == "verdict" else t for name, t in audit.columns.items()}
    hopeless["khat"] = torch.full_like(hopeless["khat"], torch.inf)
    results = audit.results | {
        "evidence": summary.evidence_record(hopeless, 20),
        "refined": summary.proposal_record(hopeless, "", 40) | {"n_repeated": 4},
        "quantities": [
            row | {"features": [], "median_sd": math.nan, "share_near": 0.0} for row in audit.results["quantities"]
        ],
    }
    results["verdict"] = verdict(results)
    page = vd.Audit(results, hopeless).report(tmp_path)
    assert "could not be checked" in page.read_text()


# ------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"proposal": None}, SettingError, "no attribute `encoder` or `guide`"),
        ({"proposal": 3.0}, SettingError, "no draw and no log_prob"),
        ({"groups": ["a"]}, ShapeError, "1 labels for 300"),
        ({"names": ["a"]}, ShapeError, "1 entries for 300"),
        ({"n": 0}, SettingError, "n=0"),
        ({"n": 40}, SettingError, "too few"),
        ({"quantities": [1]}, SettingError, "must map names"),
        ({"quantities": {"latent": reconstruction}}, SettingError, "choose another"),
        ({"quantities": {"bad": lambda z: z.sum()}}, ShapeError, "must begin with"),
        ({"quantities": {"bad": Quantity(reconstruction, features=["a"])}}, ShapeError, "1 features are named"),
        ({"quantities": {"bad": lambda z: z.log()}}, ValueError, "not finite"),
    ],
)
def test_bad_input_is_refused(arguments, error, message):
    settings: dict[str, Any] = {"proposal": Encoder(), "n": 80, "n_searched": 0, "n_pairs": 0} | arguments
    with pytest.raises(error, match=message):
        vd.audit(MODEL, X, settings.pop("proposal"), **settings)


def test_an_encoder_that_breaks_is_reported_not_raised():
    class Broken(Encoder):
        def log_prob(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.where((x[..., 0] > 0), super().log_prob(z, x), torch.nan)

        def draw(self, x: Tensor, k: int, *, generator: Any) -> vd.Draws:
            z = super().draw(x, k, generator=generator).z
            return vd.Draws(z, self.log_prob(z, x))

    audit = vd.audit(MODEL, X[:30], Broken(), n=80, n_searched=0, n_pairs=0)
    broken = X[:30, 0] <= 0
    assert bool((audit.columns["khat_encoder"][broken] == math.inf).all())
    assert bool(audit.columns["elbo"][broken].isnan().all())
    assert not bool(audit.reliable[broken].any())


# ------------------------------------------------------------------------------------------------- other models
class Chain:
    """Two latents and an observation with its variance: z2 ~ N(0, 1), z1 ~ N(z2, 1), x ~ N(z1, v)."""

    prior = vd.JointPrior(
        z2=td.Independent(td.Normal(torch.zeros(1), torch.ones(1)), 1),
        z1=lambda z2: td.Independent(td.Normal(z2, torch.ones(1)), 1),
    )

    def log_joint(self, x: dict[str, Tensor], z: Any) -> Tensor:
        likelihood = td.Normal(z.z1[..., 0], x["variance"].sqrt()).log_prob(x["value"])
        return likelihood + self.prior.log_prob(z, x)


CHAIN = {"value": torch.linspace(-2, 2, 30), "variance": torch.full((30,), 0.5)}


def chained(z: Any, generator: torch.Generator) -> dict[str, Tensor]:
    noise = torch.randn(len(z.z1), generator=generator)
    return {"value": z.z1[:, 0] + math.sqrt(0.5) * noise, "variance": torch.full((len(noise),), 0.5)}


def test_several_latents_and_structured_observations():
    x = CHAIN
    audit = vd.audit(
        Chain(),
        x,
        vd.Prior(Chain.prior),
        quantities={"distance": lambda z, x: (z.z1[..., 0] - x["value"]).unsqueeze(-1)},
        n=400,
        n_searched=2,
    )
    assert quantity(audit, "latent")["n_outputs"] == 2
    assert {row["feature"] for row in quantity(audit, "latent")["features"]} == {"z2[1]", "z1[1]"}
    # z1 has the prior variance 2, and is half as far as x from z2
    exact = torch.stack([0.4 * x["value"], 0.8 * x["value"]], -1)
    torch.testing.assert_close(audit.mean.float(), exact, atol=0.25, rtol=0)
    evidence = td.Normal(0.0, math.sqrt(2.5)).log_prob(x["value"]).mean().item()
    record = audit.results["evidence"]
    assert record["lower"] - 5 * record["error"] < evidence < record["upper"] + 5 * record["error"]
    row = quantity(audit, "distance")["features"][0]
    assert abs(row["value"]) < 5 * row["shift_error"]


def test_an_estimate_that_leaves_the_support_is_averaged_inside():
    class Box:
        """X is normal about z, which is uniform on (0, 1): the posterior is a truncated normal."""

        prior = td.Independent(td.Uniform(torch.zeros(1), torch.ones(1)), 1)

        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return td.Normal(z[..., 0], 0.2).log_prob(x[:, 0]) + self.prior.log_prob(z)

    x = torch.full((20, 1), 0.1)
    wide = vd.as_proposal(lambda x: td.Independent(td.Normal(x, 0.2), 1))
    audit = vd.audit(Box(), x, wide, n=400, n_searched=0)
    row = quantity(audit, "latent")["features"][0]
    assert 0 < row["plugin"] < 1
    assert abs(row["shift"]) < 5 * row["shift_error"]  # inside the box the estimate is exact
    low, high = td.Normal(0.0, 1.0).cdf(torch.tensor([-0.5, 4.5])).tolist()
    density = td.Normal(0.0, 1.0).log_prob(torch.tensor([-0.5, 4.5])).exp().tolist()
    exact = 0.1 + 0.2 * (density[0] - density[1]) / (high - low)
    assert abs(row["value"] - exact) < 5 * row["shift_error"]


def test_discrete_latents_alone_are_refused():
    class Coin:
        prior = td.Categorical(torch.ones(2))

        def log_joint(self, x: Tensor, z: Tensor) -> Tensor:
            return td.Normal(z.float(), 1.0).log_prob(x[:, 0]) + self.prior.log_prob(z)

    with pytest.raises(SettingError, match="discrete"):
        vd.audit(Coin(), torch.zeros(3, 1), Encoder())


def test_quantities_of_a_model():
    class Expressing:
        classes = ("a", "b")

        def expression(self, z, x=None):
            assert x is not None
            return z

        def class_probabilities(self, z):
            return z

    found = as_quantities(None, Expressing())
    assert list(found) == ["normalised expression", "class probabilities"]
    z = torch.ones(2, 3, 2)
    expression = found["normalised expression"]
    torch.testing.assert_close(expression.checked(expression.f(z, z), z), 1e4 * z)
    assert found["class probabilities"].names(2) == ["a", "b"]
