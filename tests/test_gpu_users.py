"""What users call gives the same answer on a GPU: differential expression, calibration, classifier, scvi-tools models.

Every test runs on the CPU too, so that it is known to execute where there is no GPU. There a second run of differential
expression, calibration or classifier repeats the first to equal bits. On a GPU random numbers of training differ, and
with them the trained model: tolerances are then wide enough for another seed on the CPU, which is tested. Where the
model is given, only rounding differs.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import vaerdict as vd
from test_de_pipeline import FAST, MODEL, simulated
from vaerdict import de
from vaerdict.core import Proposal
from vaerdict.inference import posterior
from vaerdict.models.scvi import ScviModel, from_scvi
from vaerdict.noise import seeded
from vaerdict.optional import isolated
from vaerdict.proposals import defensive
from vaerdict.refinement import refine

pd = pytest.importorskip("pandas")
pytest.importorskip("anndata")

T = TypeVar("T")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]

TRAINED = {"correlation": 0.95, "difference": 0.3}
"""Between fold changes of models that were trained with other random numbers: at least, and on average at most."""


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


def on(device: str, compute: Callable[[], T]) -> T:
    """What is computed on a device; on a GPU, after memory there was used for it."""
    if device != "cuda":
        return compute()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = compute()
    assert torch.cuda.max_memory_allocated() > before
    return result


def assert_repeats(device: str, result: Any, expected: Any) -> None:
    """On the CPU the table of a second run has the values of the first, but for the time it took."""
    if device == "cpu":
        names = [name for name in expected.columns if not str(name).startswith("seconds")]
        pd.testing.assert_frame_equal(result[names], expected[names], check_exact=True)


# ------------------------------------------------------------------------------------------ differential expression
@cache
def checked(device: str, seed: int = 0) -> de.DEResult:
    """Called from the counts, with a model trained on the device beside them."""
    settings: dict[str, Any] = {"device": device, "seed": seed, **MODEL}
    return on(device, lambda: de.differential_expression(simulated(), "group", "A", "B", **settings))


def test_the_counts_decide_as_on_the_cpu_and_the_trained_model_agrees(device):
    expected, result = checked("cpu"), checked.__wrapped__(device)
    assert_repeats(device, result.table, expected.table)
    by_counts = [name for name in expected.table.columns if not name.startswith("model_")]
    pd.testing.assert_frame_equal(result.table[by_counts], expected.table[by_counts], check_exact=True)
    assert_same_model(result, expected)
    assert result.results["model"]["role"] == "checks"
    assert all(row["share_ok"] > 0.8 for row in result.results["model"]["diagnostics"])


def assert_same_model(result: de.DEResult, expected: de.DEResult) -> None:
    lfc, other = (each.table["model_lfc"].to_numpy() for each in (result, expected))
    assert np.corrcoef(lfc, other)[0, 1] >= TRAINED["correlation"]
    assert np.abs(lfc - other).mean() <= TRAINED["difference"]


def test_another_seed_is_within_the_tolerance_and_another_comparison_is_not():
    assert_same_model(checked("cpu", 1), checked("cpu"))
    turned = de.differential_expression(simulated(), "group", "B", "A", **MODEL)
    with pytest.raises(AssertionError):
        assert_same_model(turned, checked("cpu"))


@cache
def scvi_model() -> Any:
    scvi, adata = pytest.importorskip("scvi"), simulated(n=150)
    with isolated(0):
        scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
        model = scvi.model.SCVI(adata, n_hidden=32, n_latent=4)
        model.train(max_epochs=30, accelerator="cpu", enable_progress_bar=False, logger=False)
    return model


@cache
def with_given_model(device: str) -> de.DEResult:
    model = scvi_model()
    settings: dict[str, Any] = {"model": model, "device": device, **FAST}
    return on(device, lambda: de.differential_expression(model.adata, "group", "A", "B", **settings))


def test_a_given_model_is_used_with_the_same_noise(device):
    expected, result = with_given_model("cpu"), with_given_model.__wrapped__(device)
    assert_repeats(device, result.table, expected.table)
    by_model = [name for name in expected.table.columns if name.startswith("model_")]
    by_counts = [name for name in expected.table.columns if name not in by_model]
    pd.testing.assert_frame_equal(result.table[by_counts], expected.table[by_counts], check_exact=True)
    # modes are found to a tenth of a nat, and the noise of a cell does not depend on the device
    np.testing.assert_allclose(result.table["model_lfc"], expected.table["model_lfc"], atol=0.05)
    for name in ("model_mean_a", "model_mean_b"):
        np.testing.assert_allclose(result.table[name], expected.table[name], rtol=0.02)
    assert next(scvi_model().module.parameters()).device.type == "cpu"  # the user's model stays where it was


# ------------------------------------------------------------------------------------------ calibration
@cache
def calibrated(device: str) -> de.Calibration:
    options: dict[str, Any] = {"splits": 2, "spikes": 1, "seed": 0, "device": device, **MODEL}
    return on(device, lambda: de.calibrate(simulated(n=120, genes=30), "group", ["A"], **options))


def test_a_calibration_gives_the_same_splits_and_calls(device):
    expected, result = calibrated("cpu"), calibrated.__wrapped__(device)
    assert_repeats(device, result.table, expected.table)
    by_counts = [name for name in expected.table.columns if not name.startswith(("seconds", "model"))]
    pd.testing.assert_frame_equal(result.table[by_counts], expected.table[by_counts], check_exact=True)
    assert result.verdict == expected.verdict


# ------------------------------------------------------------------------------------------ the classifier
PREDICTED = {"mean": 0.03, "agree": 0.97}
"""Mean absolute difference of probabilities, at most, and share of equal classes, at least, after training anew."""


def blobs(n: int = 150) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = np.arange(n) % 3
    return np.array([[-4.0, 0.0], [4.0, 0.0], [0.0, 6.0]])[y] + rng.normal(size=(n, 2)), y


@cache
def classifier(device: str, seed: int = 0) -> vd.SelectiveClassifier:
    pytest.importorskip("sklearn")
    settings: dict[str, Any] = {"epochs": 20, "proposals": (), "n_draws": 100, "hidden": (32,), "n_particles": 5}
    return on(device, lambda: vd.SelectiveClassifier(device=device, random_state=seed, **settings).fit(*blobs()))


def assert_same_classes(a: vd.SelectiveClassifier, b: vd.SelectiveClassifier) -> None:
    X, y = blobs()
    assert np.abs(a.predict_proba(X) - b.predict_proba(X)).mean() <= PREDICTED["mean"]
    assert (a.predict(X) == b.predict(X)).mean() >= PREDICTED["agree"]
    assert (a.predict(X) == y).mean() >= PREDICTED["agree"]


def test_a_classifier_decides_the_same(device):
    pytest.importorskip("sklearn")
    expected, result = classifier("cpu"), classifier.__wrapped__(device)
    assert_repeats(device, *(pd.DataFrame(each.predict_proba(blobs()[0])) for each in (result, expected)))
    assert_same_classes(result, expected)
    assert_same_classes(classifier("cpu", 1), classifier("cpu"))


def test_a_classifier_answers_the_same_on_the_device_that_it_is_read_onto(device, tmp_path):
    pytest.importorskip("sklearn")
    path = classifier("cpu").save(tmp_path / "reader")
    again = vd.SelectiveClassifier.load(path, device=device)
    assert again.device == device
    # the same weights; 100 draws with other random numbers
    X, _ = blobs()
    prob = on(device, lambda: again.predict_proba(X))
    assert np.abs(prob - classifier("cpu").predict_proba(X)).mean() <= PREDICTED["mean"]


# ------------------------------------------------------------------------------------------ scvi-tools
@cache
def wrapped(**settings: Any) -> ScviModel:
    scvi, adata = pytest.importorskip("scvi"), simulated(n=60, genes=12)
    with isolated(0):
        scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
        model = scvi.model.SCVI(adata, n_hidden=16, n_latent=3, **settings)
        model.train(max_epochs=5, accelerator="cpu", enable_progress_bar=False, logger=False)
    return from_scvi(model)


@pytest.mark.parametrize("settings", [{}, {"use_observed_lib_size": False}], ids=["z", "z and library"])
def test_a_wrapped_model_has_the_same_densities(settings, device):
    on_cpu = wrapped(**settings)
    x = on_cpu.observations()
    z, log_q = on_cpu.encoder.draw(x, 20, generator=seeded(1))
    expected = on_cpu.log_joint(x, z)
    moved = move(on_cpu, device)
    z_there = moved_latents(z, device)
    with torch.no_grad():
        log_joint = moved.log_joint(x.to(device), z_there)
        again = moved.encoder.log_prob(z_there, x.to(device))
    assert log_joint.device.type == device
    torch.testing.assert_close(log_joint.cpu(), expected, rtol=1e-5, atol=1e-2)  # sums of float32
    torch.testing.assert_close(again.cpu(), log_q, rtol=1e-4, atol=1e-3)


def test_posteriors_of_a_wrapped_model_agree(device):
    """Rate of false alarms: 180 means and six standard errors of a difference, below 1e-6."""
    on_cpu = wrapped()
    means = []
    for model, where in ((on_cpu, "cpu"), (move(on_cpu, device), device)):
        x = model.observations().to(where)
        local: Proposal = refine(model, x, model.encoder).distribution
        answer = posterior(model, x, defensive({"REFINED": local}, model.prior), 2000, seed=seeded(3, where))
        means.append([answer.expect(lambda z, i=i: z[..., i].double()) for i in range(3)])
    for here, there in zip(*means, strict=True):
        error = (here.mcse.square() + there.mcse.cpu().square()).sqrt()
        assert ((here.value - there.value.cpu()).abs() <= 6 * error + 1e-3).all()


def move(model: ScviModel, device: str) -> ScviModel:
    """A copy of the model on a device."""
    return deepcopy(model).to(device)


def moved_latents(z: Any, device: str) -> Any:
    """Latents on a device: a tensor, or a named tuple of them."""
    return z.to(device) if isinstance(z, torch.Tensor) else type(z)(*(part.to(device) for part in z))
