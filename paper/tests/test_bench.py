"""Benchmarks: counts and tables are checked against known numbers; speeds are not tested."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

import vaerdict as vd
from page_checks import NASTY
from vaerdict.core import DataError, SettingError
from vaerdict.datasets import appendix
from vaerdict.report import load, markdown, render
from vaerdict.report.tables import ABSENT, Table
from vaerdict_paper import benchmarks
from vaerdict_paper.benchmarks import de, gpu, roofline, samplers, scaling
from vaerdict_paper.benchmarks.timing import (
    ABLATION,
    LIKE,
    OTHER,
    comparison,
    interleaved,
    median_seconds,
    one_thread,
    watched,
)
from vaerdict_paper.pages import bench as report
from vaerdict_paper.pages import comparisons

CPU = torch.device("cpu")
CEILINGS = roofline.Ceilings("a device", 1e12, 1e11, 1e9, 1e4, 1e6)
HARDWARE = {"machine": "x", "cores": 4, "threads": 2, "accelerator": "GPU of renown"}


def test_operators_are_counted_with_their_flops_and_bytes():
    a, b = torch.ones(100, 50, requires_grad=True), torch.ones(50, 20)

    def step() -> None:
        torch.autograd.grad((a @ b).sum(), a)

    demands = roofline.demand(step, CPU)
    assert demands.flop == 2 * (2 * 100 * 50 * 20)  # forward, and backward to a only
    # the product reads both and writes 100 x 20; its sum reads that and writes one number; filling writes one and
    # expanding is free; the backward pass reads one number expanded to 100 x 20, and b, and writes the gradient of a
    product, total, seed, back = 5000 + 1000 + 2000, 2000 + 1, 1 + 1, 1 + 1000 + 5000
    assert demands.bytes == 4 * (product + total + seed + back)
    assert demands.kernels == 4
    assert demands.kernel_s is None


def test_batched_products_count():
    a, b = torch.ones(3, 4, 5), torch.ones(3, 5, 6)
    assert roofline.demand(lambda: torch.baddbmm(torch.ones(3, 4, 6), a, b), CPU).flop == 3 * 2 * 4 * 5 * 6


@pytest.mark.parametrize(
    ("demands", "bound"),
    [
        (roofline.Demand(int(5e11), 10, 10, None), "compute"),
        (roofline.Demand(10, int(5e8), 10, None), "memory"),
        (roofline.Demand(10, 10, 500_000, None), "launches"),
    ],
)
def test_a_step_is_bound_by_the_ceiling_that_it_comes_nearest_to(demands, bound):
    near = roofline.shares(demands, 1.0, CEILINGS, tf32=True, recorded=True)
    assert near.bound == bound
    assert max(near) == pytest.approx(0.5)


def test_shares_depend_on_precision_and_graphs():
    demands = roofline.Demand(int(1e10), 0, 100, None)
    slow, fast = (roofline.shares(demands, 1.0, CEILINGS, tf32=on, recorded=on) for on in (False, True))
    assert slow.compute == pytest.approx(10 * fast.compute)
    assert slow.launches == pytest.approx(100 * fast.launches)


def test_ceilings_of_a_cpu_are_positive_and_leave_the_precision_unchanged():
    before = torch.backends.cuda.matmul.allow_tf32
    limits = roofline.ceilings(CPU, quick=True)
    assert min(limits.flops_fp32, limits.bytes, limits.launches) > 0
    assert "CPU" in limits.device
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_stacks_of_every_grid_take_a_step():
    makers = [make for grid in (gpu._mnist, gpu._genes, gpu._ppca) for make in grid(gpu.SMALL, CPU)]
    grids = []
    for make in makers[2:4] + makers[6:8] + makers[-1:]:
        work = make()
        before = [t.clone() for t in work.state]
        losses = work.step(work.index)
        assert losses.isfinite().all()
        assert losses.shape[-1] == work.members
        assert any(not torch.equal(old, new) for old, new in zip(before, work.state, strict=True))
        grids.append(work.grid)
    assert grids == ["MNIST", "MNIST", "genes", "genes", "pPCA"]


def test_the_paper_grids_have_their_sizes():
    members = [make.args[0] for make in gpu._mnist(gpu.FULL._replace(images=10_000), CPU)]
    assert [len(keys) for keys in members] == [10, 20, 5, 20, 5, 20]  # 20 models, 240 proposals in stacks of 20
    stacks = [make.keywords.get("stacks", 1) for make in gpu._mnist(gpu.FULL._replace(images=10_000), CPU)]
    assert sum(n * len(keys) for n, keys in zip(stacks, members, strict=True)) == 20 + 240


def test_a_row_extrapolates_to_the_grid():
    work = next(gpu._ppca(gpu.SMALL, CPU))()
    row = gpu._row(work, CEILINGS, CPU)
    assert row["grid_s"] == pytest.approx(row["step_s"] * 6 * 100)
    assert row["epoch_s"] == pytest.approx(6 * row["step_s"])
    assert row["graph_s"] is None
    assert not row["recorded"]
    assert row["flops"] == pytest.approx(row["flop"] / row["step_s"])


def test_a_power_law_is_fitted_with_its_error():
    sizes = [1, 2, 4, 8, 16]
    exact = scaling.power_law(sizes, [3 * n**1.5 for n in sizes])
    assert exact.exponent == pytest.approx(1.5)
    assert exact.se == pytest.approx(0, abs=1e-12)
    bent = scaling.power_law(sizes, [1 + n for n in sizes])
    assert 0.5 < bent.exponent < 1
    assert bent.se > 0.02
    assert math.isnan(scaling.power_law([1, 2], [1, 2]).se)


def test_the_standard_error_of_an_exponent_is_that_of_least_squares():
    stats = pytest.importorskip("scipy.stats")
    sizes, seconds = [1, 2, 4, 8, 16], [1.0, 2.2, 3.7, 8.5, 15.0]
    expected = stats.linregress(torch.tensor(sizes).log().numpy(), torch.tensor(seconds).log().numpy())
    fit = scaling.power_law(sizes, seconds)
    assert fit.exponent == pytest.approx(expected.slope, rel=1e-5)
    assert fit.se == pytest.approx(expected.stderr, rel=1e-4)


def test_sizes_span_a_factor_of_sixteen_and_every_task_runs():
    assert max(scaling.FACTORS) == 16 * min(scaling.FACTORS)
    tasks = {(case.what, case.over) for case in scaling._cases(quick=False)}
    assert {over for _, over in tasks} == {"cells", "genes", "particles", "draws", "observations"}
    quick = scaling._cases(quick=True)
    for case in (*quick[:2], quick[5], *quick[-2:]):
        case.make(case.base)()


def test_processor_time_is_measured_too():
    with watched() as watch:
        sum(range(300_000))
    assert watch.wall > 0
    assert watch.cpu > 0
    calls = []
    seconds = median_seconds(lambda: calls.append(1), 3, cpu=True)
    assert len(calls) == 4  # the first is not counted
    assert 0 <= seconds < 1


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_every_row_is_saved_and_an_interrupted_run_says_so(monkeypatch):
    monkeypatch.setattr(scaling, "run", lambda *, quick, progress: iter([{"case": "a"}, {"case": "b"}]))
    saved = []
    result = benchmarks.run("scaling", save=lambda so_far: saved.append((so_far["complete"], len(so_far["rows"]))))
    assert saved == [(False, 1), (False, 2)]
    assert result["complete"]
    assert [row["case"] for row in result["rows"]] == ["a", "b"]
    assert result["versions"]["torch"]


def test_an_unavailable_benchmark_has_a_reason(monkeypatch):
    monkeypatch.setattr("vaerdict_paper.benchmarks.psis.PACKAGES", ("no_such_package",))
    assert benchmarks.unavailable("psis") == "needs no_such_package"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" in str(benchmarks.unavailable("gpu"))
    assert benchmarks.unavailable("scaling") is None
    with pytest.raises(SettingError, match="no benchmark 'nothing'"):
        benchmarks.unavailable("nothing")


# ------------------------------------------------------------------------------------------------------ the report
def _result(name: str, rows: list[dict], **more: object) -> dict:
    versions = {"python": "3", "vaerdict": "1", "torch": "2.13", "numpy": "2", "scipy": "1", "scvi": "1.4.2"}
    return {"benchmark": name, "hardware": HARDWARE, "versions": versions, "rows": rows, **more}


def _compared(kind: str, peer: str, differs: str | None = None, ratio: float = 5.0) -> dict:
    times = {"ours_s": 2.0, "peer": peer, "peer_s": 2.0 * ratio, "ratio": ratio}
    spread = {"ratio_low": ratio - 1, "ratio_high": ratio + 1, "repeats": 3}
    return {"kind": kind, "case": "grid", "differs": differs, **times, **spread}


def _de_rows() -> list[dict]:
    shared = {"fdr_mae": 1.0, "fdp": 0.0, "tpr": 0.5, "auprc": 0.9, "khat": 0.4, "ess_share": 0.2, "n_latents": 50}
    asked = [
        ("scvi-tools, default", de.PAIRS, 0.05, 5000),
        ("scvi-tools, importance", de.PAIRS, 16.0, 5000),
        (de.MODEL_STAGE, de.PAIRS, 0.5, 100),
        (de.COUNTS, de.CENTRED_MEANS, 0.1, None),
    ]
    return [
        {"method": m, "between": between, "latents": "some", "cpu_s": s, "lfc_draws": draws, **shared}
        for m, between, s, draws in asked
    ]


def _sampler_rows() -> list[dict]:
    costs = {
        ("AIS-500", "linear", "prior"): (1000.0, 10.0),
        ("AIS-500", "sigmoid", "prior"): (500.0, 5.0),
        ("AIS-100", "sigmoid", "prior"): (250.0, 2.0),
        ("AIS-100", "sigmoid", "encoder"): (50.0, 0.5),
        ("SMC", "adaptive", "prior"): (100.0, 0.2),
        ("SMC", "adaptive", "encoder"): (25.0, 0.05),
    }
    shared = {"case": "pPCA", "se_empirical": 0.05, "bias": 0.0, "bias_se": 0.01}
    return [
        {**shared, "method": m, "schedule": schedule, "start": start, "gradients": g, "seconds": s}
        for (m, schedule, start), (g, s) in costs.items()
    ]


def _scale_rows() -> list[dict]:
    at = {"cells": 1000, "genes": 20, "question": "any change", "stopped": None}
    return [
        {**at, "method": "vaerdict de", "cpu_s": 2.0, "peak_gb": 1.0, "wall_s": 2.5, "n_called": 7},
        {**at, "method": "vaerdict de --prior none", "cpu_s": 0.5, "peak_gb": 1.0, "wall_s": 0.5, "n_called": 7},
        {**at, "method": "scanpy Wilcoxon", "cpu_s": 3.0, "reading_s": 0.5, "peak_gb": 2.0, "n_called": 12},
        {**at, "method": "edgepython QL", "stopped": "did not finish in 120 CPU s"},
    ]


def test_peers_peers_that_do_something_else_and_ablations_have_tables_of_their_own():
    rows = [_compared(LIKE, "the same"), _compared(OTHER, "another", "skips a step"), _compared(ABLATION, "loop", "it")]
    results = [_result("ppca", rows), _result("samplers", _sampler_rows()), _result("de", _de_rows())]
    results.append(_result("de-scale", _scale_rows()))
    like, other, ablation = report.document(results, part="ratios").sections[0].blocks
    assert isinstance(like, Table)
    assert isinstance(other, Table)
    assert isinstance(ablation, Table)
    assert [(row["peer"], row["ratio"]) for row in like.rows] == [("the same", 5.0)]
    assert like.rows[0]["range"] == "4.00 to 6.00"
    peers = {row["peer"]: row for row in other.rows}
    assert set(peers) == {"another", "scvi-tools, default", "scvi-tools, importance", "scanpy Wilcoxon"}
    assert peers["scvi-tools, importance"]["ratio"] == 32.0
    assert peers["scvi-tools, default"]["differs"]
    assert peers["scanpy Wilcoxon"]["ratio"] == 1.5
    assert {"loop", "vaerdict de --prior none"} < {row["peer"] for row in ablation.rows}
    assert not {"like for like", "peer"} & {row["kind"] for row in ablation.rows}
    shown = markdown(report.document(results, part="ratios"))
    assert "our own code with one thing changed" in shown
    assert "| skips a step |" in shown


def test_a_default_of_a_peer_that_is_faster_than_ours_is_shown():
    (section,) = report.document([_result("de", _de_rows())], part="ratios").sections
    (row,) = (row for row in section.blocks[0].rows if row["peer"] == "scvi-tools, default" and "stage" in row["case"])
    assert row["ratio"] == pytest.approx(0.1)


def test_samplers_are_compared_with_one_change_at_a_time():
    table = report.document([_result("samplers", _sampler_rows())], part="samplers").sections[0].blocks[1]
    assert isinstance(table, Table)
    ratios = {row["change"]: (row["gradients_ratio"], row["seconds_ratio"]) for row in table.rows}
    assert ratios == {
        "schedule of AIS": (2.0, 2.0),
        "number of temperatures": (2.0, 2.5),
        "sampler, from the prior": (2.5, 10.0),  # 200 in seconds with start, schedule and temperatures changed too
        "sampler, from the encoder": (2.0, 10.0),
        "start of AIS": (5.0, 4.0),
        "start of SMC": (4.0, 4.0),
    }
    seconds = [(row["peer_s"], row["ours_s"]) for row in comparisons.comparisons(_result("samplers", _sampler_rows()))]
    assert seconds == [(10.0, 5.0), (5.0, 2.0), (2.0, 0.2), (0.5, 0.05), (2.0, 0.5), (0.2, 0.05)]
    for row in table.rows:
        before, after = (row[side].split(", ") for side in ("before", "after"))
        changed = sum(a != b for a, b in zip(before, after, strict=True))
        assert changed == (2 if "sampler" in row["change"] else 1)  # a sampler brings its schedule


def test_every_mode_of_scvi_tools_that_is_paired_is_measured():
    assert {peer for _, _, peer, _, _ in comparisons._PAIRS} == set(de.MODES)


def test_the_counts_are_scored_by_changes_either_way_of_all_genes(monkeypatch):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("anndata")
    data = appendix(0, n_cells=80, n_genes=8)
    truth = data.lfc(0, 1)
    changed = truth.abs() >= de.DELTA
    half = 0.5 * changed.double().numpy()  # of the probability of a change, on either side
    columns = {"prob_up": half, "prob_down": half, "lfc_mean": truth.numpy(), "lfc_low": 0.0, "lfc_high": 0.0}
    table = pandas.DataFrame({"gene": [f"g{i}" for i in range(8)], **columns})
    tested = table.drop(index=int(changed.double().argmax()))  # without one gene that changes
    monkeypatch.setattr(vd, "differential_expression", lambda *_, **__: SimpleNamespace(table=tested))
    row = de._by_counts(data, 0)
    n_changed = int(changed.sum())
    assert n_changed == 6
    assert row["tpr"] == pytest.approx((n_changed - 1) / n_changed)
    assert row["fdp"] == 0


@pytest.mark.slow
def test_the_rows_of_samplers_and_de_make_comparisons():
    rows = list(samplers.run(quick=True))
    assert {row["case"] for row in samplers.changes(rows)} == {row["case"] for row in rows}
    pytest.importorskip("scvi")
    made = list(comparisons.comparisons({"benchmark": "de", "rows": de.run(quick=True)}))
    assert len(made) == len(comparisons._PAIRS)
    assert all(row["ratio"] > 0 for row in made)


def test_seconds_of_samplers_on_a_gpu_are_in_their_own_table_alone():
    rows = [{**row, "device": "GPU of renown"} for row in _sampler_rows()]
    assert not list(comparisons.comparisons({"benchmark": "samplers", "rows": rows}))
    assert len(report.document([_result("samplers", rows)], part="samplers").sections[0].blocks) == 2


def test_a_method_without_an_answer_says_why():
    result = _result("de-scale", _scale_rows())
    assert "did not finish in 120 CPU s" in markdown(report.document([result], part="de-scale"))
    sentences = report.document([result], part="de-scale").summary
    assert "1,000 cells of 20 genes, vaerdict de: 2 CPU s, at most 1.0 GiB." in sentences
    assert "1,000 cells of 20 genes, edgepython QL: did not finish in 120 CPU s." in sentences


def test_stages_show_what_an_evaluation_is_worth():
    row = {"model": "counts", "stage": "SMC", "ess_share": 0.5, "draws": 1024, "evaluations": 2048.0, "seconds": 2.0}
    shown = markdown(report.document([_result("escalation", [{**row, "observations": 10}])], part="escalation"))
    assert "| 2048 | 250 | 2.00 | 2560 |" in shown


def test_tables_name_machine_versions_commit_and_date():
    known = {"commit": {"sha": "abcdef0123", "dirty": True}, "measured": "2026-01-02"}
    result = _result("ppca", [_compared(ABLATION, "eager", "stacking")], **known)
    (table,) = report.document([result], part="ppca").sections[0].blocks
    assert isinstance(table, Table)
    assert "2 threads of 4 CPU cores, torch 2.13, commit abcdef0 with changes, 2026-01-02" in table.caption
    assert "renown" not in table.caption  # it uses no GPU
    table = report.document([_result("samplers", _sampler_rows())], part="samplers").sections[0].blocks[0]
    assert "renown" in table.caption
    assert "commit" not in table.caption
    (everything,) = report.document([result], part="ratios").sections[0].blocks
    assert everything.rows[0]["versions"] == "torch 2.13, scvi 1.4.2"


# ------------------------------------------------------------------------------------------------------ rows
def test_both_sides_take_turns_and_the_ratio_is_of_rounds():
    order, clock = [], iter([1.0, 10.0, 30.0, 2.0, 3.0, 3.0])

    def work(name: str) -> float:
        order.append(name)
        return next(clock)

    seconds = interleaved({name: lambda name=name: work(name) for name in "ab"}, 3, warm=False, measured=True)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [1.0, 2.0, 3.0], "b": [10.0, 30.0, 3.0]}
    row = comparison(LIKE, "case", "peer", seconds["a"], seconds["b"])
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (10.0, 1.0, 15.0)
    assert (row["ours_s"], row["peer_s"], row["repeats"]) == (2.0, 10.0, 3)


def test_what_a_call_returns_is_its_time_only_if_it_measures_it():
    works = {"a": lambda: 1e6}
    assert max(interleaved(works, 3)["a"]) < 1e3
    assert interleaved(works, 3, measured=True) == {"a": [1e6] * 3}


@pytest.mark.parametrize("kind", [OTHER, ABLATION])
def test_a_comparison_that_is_not_like_for_like_says_what_differs(kind):
    with pytest.raises(SettingError, match="needs differs="):
        comparison(kind, "case", "peer", [1.0], [2.0])


def test_a_result_says_what_produced_it(monkeypatch):
    monkeypatch.setattr(scaling, "run", lambda *, quick, progress: iter([]))
    result = benchmarks.run("scaling")
    assert {"command", "commit", "measured", "hardware", "versions", "complete"} <= result.keys()
    assert result["commit"] is None or len(result["commit"]["sha"]) == 40
    assert result["measured"].count("-") == 2
    assert "processor" in result["hardware"]


def _gpu_rows() -> list[dict]:
    ceilings = {"kind": "ceilings", "device": "GPU", "flops_tf32": 4e14, "flops_fp32": 5e13, "bytes": 4e12}
    stack = {"kind": "stack", "grid": "MNIST", "members": 10, "step_s": 0.01, "graph_s": 0.01, "bound": "compute"}
    return [
        {**ceilings, "launches": 2e5, "launches_recorded": 1e6},
        {**stack, "case": "models by WW", "grid_s": 30.0},
        {**stack, "case": "models by CHI", "grid_s": 40.0},
        {**stack, "case": "proposals by CHI", "grid_s": 5.0},
        {**stack, "grid": "pPCA", "case": "models, 5 particles", "grid_s": 1.5, "trained_s": 2.0, "device": "GPU"},
        {**stack, "grid": "pPCA", "case": "models, 200 particles", "grid_s": 3.0, "trained_s": 3.5, "device": "GPU"},
    ]


def test_grids_have_extrapolated_and_measured_seconds(tmp_path):
    bench = tmp_path / "bench"
    benchmarks.write_result(bench, "gpu", _result("gpu", _gpu_rows(), complete=False))
    shown = markdown(load(bench))
    assert f"| MNIST | models | 70.0 | {ABSENT} | {ABSENT} |" in shown
    assert "Interrupted, with the rows measured until then: gpu." in shown
    assert "MNIST: a workload for timing" in shown
    assert "| 400.0 |" in shown  # TFLOP/s
    assert "| pPCA | models | 4.5 | 5.5 | GPU |" in shown


def test_the_scaling_table_prints_exponents():
    row = {"case": "training", "over": "cells", "low": 10, "high": 160, "seconds_low": 0.1, "seconds_high": 1.5}
    shown = markdown(report.document([_result("scaling", [{**row, "exponent": 0.976, "exponent_se": 0.013}])]))
    assert "| training | cells | 10 | 160 | 0.1000 | 1.5000 | 0.98 | 0.01 |" in shown


def test_many_cells_are_summarised_in_a_sentence_each():
    row = {"cells": 100_000, "genes": 1000, "seconds_per_epoch": 14.06, "seconds_de": 99.2, "peak_host_gb": 1.44}
    on_cpu, on_gpu = (
        report.document([_result("million", [{**row, "peak_device_gb": memory}])]).summary[-1]
        for memory in (None, 11.3)
    )
    assert "100,000 cells of 1,000 genes on 2 CPU threads: 14.1 s per epoch of training, 99 s" in on_cpu
    assert on_cpu.endswith("at most 1.4 GiB.")
    assert "genes on GPU of renown" in on_gpu
    assert on_gpu.endswith("11.3 GiB of the GPU.")


def test_what_became_slower_is_named():
    rows = [
        {"case": "khat", "before_s": 1.0, "now_s": 1.05, "ratio": 0.95},
        {"case": "psis", "before_s": 1.0, "now_s": 1.25, "ratio": 0.8},
    ]
    sentence = report.document([_result("against", rows, before="abc123", of="psis")]).summary[-1]
    assert sentence == "Since abc123 1 of 2 timings of psis are slower by more than 10%: psis (0.80)."


def test_a_folder_of_results_has_a_page_with_their_machine(tmp_path):
    row = _compared(ABLATION, NASTY, "stacking")
    benchmarks.write_result(tmp_path, "ppca", _result("ppca", [row]))
    assert json.loads((tmp_path / "results.json").read_text()) == {"experiment": "bench"}
    shown = markdown(load(tmp_path))
    assert "2 threads of 4 CPU cores" in shown
    assert "| 5.00 | 4.00 to 6.00 |" in shown
    assert NASTY not in render(tmp_path).read_text()
    benchmarks.write_result(tmp_path, "ppca", {**_result("ppca", []), "rows": 3})
    with pytest.raises(DataError, match="run the experiment again"):
        load(tmp_path)
