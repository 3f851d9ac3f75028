"""What notebooks show: short texts, HTML in which names are escaped, plots as axes, and scanpy's plots of a result."""

from __future__ import annotations

import warnings
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vaerdict as vd
from test_de_pipeline import MODEL, simulated
from vaerdict import de
from vaerdict.core import DataError, SettingError, WeightError

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("anndata")
HOSTILE = "<script>alert(1)</script> $x_1$ & 'more'"


@pytest.fixture(autouse=True)
def figures():
    """Figures are drawn without a screen and closed after each test."""
    from matplotlib import pyplot

    before = matplotlib.get_backend()
    pyplot.switch_backend("Agg")
    yield pyplot
    pyplot.close("all")
    pyplot.switch_backend(before)


def drawn(ax: Any) -> Any:
    """The axes, after everything on them was drawn."""
    ax.figure.canvas.draw()
    return ax


def well_formed(html: str) -> str:
    """The HTML, of which every element is closed."""
    stack: list[str] = []

    class Check(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert stack.pop() == tag

    Check().feed(html)
    assert not stack
    return html


# -------------------------------------------------------------------------------------------------------- DEResult
@pytest.fixture(scope="module")
def result() -> de.DEResult:
    return de.differential_expression(simulated(), "group", pairs=[("A", "B"), ("A", None)], sample_key="sample")


@pytest.fixture(scope="module")
def hostile() -> tuple[Any, de.DEResult]:
    adata = simulated()
    adata.var_names = [HOSTILE, *adata.var_names[1:]]
    adata.obs["group"] = adata.obs["group"].map({"A": HOSTILE, "B": "b" * 500, "C": "C"})
    return adata, de.differential_expression(adata, "group", HOSTILE, "b" * 500)


def test_a_result_is_shown_in_a_few_lines(result):
    lines = repr(result).splitlines()
    assert lines[0].startswith("DEResult: 2 contrasts, 40 of 40 genes")
    row = result.results["contrasts"][0]
    n, up = row["n_discoveries"], row["n_up"]
    genes = f"{n} genes" if n != 1 else "1 gene"
    assert lines[1] == f"  A vs B: {genes} called at an FDR of 0.05, {up} higher in A, {n - up} in B"
    assert len(lines) == 3


def test_html_of_a_result_names_genes_and_escapes_names(result, hostile):
    html = well_formed(result._repr_html_())
    assert "<td>A vs B</td>" in html
    assert all(f"{gene}" in html for gene in result.discoveries("A vs B")["gene"].head(3))
    html = well_formed(hostile[1]._repr_html_())
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "b" * 500 not in repr(hostile[1])


def test_the_volcano_shows_every_gene_and_names_the_first(result, figures):
    ax = drawn(result.plot_volcano())
    points = sum(len(part.get_offsets()) for part in ax.collections)
    called = result.discoveries("A vs B")
    assert points == 40
    assert {text.get_text() for text in ax.texts} == set(called["gene"].head(10))
    assert f"higher in A ({(called['lfc_mean'] > 0).sum()})" in ax.get_legend_handles_labels()[1]
    mine = figures.subplots()[1]
    assert result.plot_volcano("A vs rest", n_labels=0, ax=mine) is mine
    assert not mine.texts
    with pytest.raises(SettingError, match="no contrast 'B vs A' was compared; there are A vs B, A vs rest"):
        result.plot_volcano("B vs A")


def test_a_gene_is_drawn_in_both_groups_with_its_samples(result, tmp_path):
    ax = drawn(result.plot_gene("g0", simulated()))
    row = result.table.set_index(["contrast", "gene"]).loc[("A vs B", "g0")]
    assert f"g0: LFC {row['lfc_mean']:+.2f}" in ax.get_title()
    labels = [tick.get_text().splitlines() for tick in ax.get_xticklabels()]
    assert [name for name, _ in labels] == ["A", "B"]
    assert all(cells.startswith("80 cells, ") for _, cells in labels)
    dots = [part for part in ax.collections if len(part.get_offsets()) == 4]
    assert len(dots) == 2  # four samples of either group
    loaded = de.DEResult.load(result.save(tmp_path))
    assert drawn(loaded.plot_gene("g0", simulated(), "A vs rest")).get_xticklabels()[1].get_text().startswith("rest")
    with pytest.raises(SettingError, match="gene 'nothing' was not tested in A vs B"):
        result.plot_gene("nothing", simulated())
    with pytest.raises(DataError, match="adata has no cells of 'A'"):
        result.plot_gene("g0", simulated()[1::3])


def test_plots_take_names_literally(hostile):
    adata, result = hostile
    assert drawn(result.plot_volcano()).get_title().replace("\\", "").startswith("<script>")
    assert "$x_1$" in drawn(result.plot_gene(HOSTILE, adata)).get_title().replace("\\", "")


# ---------------------------------------------------------------------------------------------------------- scanpy
VALUES = ("scores", "logfoldchanges", "pvals", "pvals_adj", "log10_pvals", "log10_pvals_adj")
PLOTS = ("", "_violin", "_stacked_violin", "_heatmap", "_dotplot", "_matrixplot", "_tracksplot")


def plotted(adata: Any, figures: Any, values: tuple[str, ...]) -> None:
    """Every plot of scanpy for ranked genes."""
    scanpy = pytest.importorskip("scanpy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scanpy about itself
        for name in PLOTS:
            getattr(scanpy.pl, f"rank_genes_groups{name}")(adata, n_genes=3, show=False)
            figures.close("all")
        for name in ("_dotplot", "_matrixplot"):
            for value in values:
                draw = getattr(scanpy.pl, f"rank_genes_groups{name}")
                draw(adata, n_genes=3, values_to_plot=value, min_logfoldchange=0.3, show=False)
                figures.close("all")


@pytest.mark.parametrize(
    ("pairs", "contrast", "n_cells"),
    [
        ([("A", None), ("B", None), ("C", None)], None, 240),
        ([("A", "B")], None, 160),
        ([("A", None)], None, 240),
        ([("A", "B"), ("A", "C")], "A vs C", 160),
        ([("A", "B"), ("C", None)], None, 160),
    ],
)
def test_every_plot_of_scanpy_works(figures, pairs, contrast, n_cells):
    adata = simulated()
    adata.X[:, 7] = 0  # a gene that is not tested
    result = de.differential_expression(adata, "group", pairs=pairs)
    filled = result.to_scanpy(adata, contrast=contrast, copy=True)
    assert filled.n_obs == n_cells
    assert "rank_genes_groups" not in adata.uns
    assert len(filled.uns["rank_genes_groups"]["names"]) == 40
    plotted(filled, figures, VALUES)


def test_plots_of_all_cells_work_where_some_were_not_compared(figures):
    adata = simulated()
    result = de.differential_expression(adata, "group", "A", "B")
    assert result.to_scanpy(adata) is None
    assert list(adata.obs["rank_genes_groups"].cat.categories) == ["A", "B", "not compared"]
    plotted(adata, figures, ())


def test_the_second_group_has_the_ranking_of_the_first_turned_round():
    adata = simulated()
    de.differential_expression(adata, "group", "A", "B").to_scanpy(adata)
    ranking = adata.uns["rank_genes_groups"]
    change = [dict(zip(ranking["names"][g], ranking["logfoldchanges"][g], strict=True)) for g in "AB"]
    assert change[0] == pytest.approx({gene: -lfc for gene, lfc in change[1].items()})
    np.testing.assert_array_equal(ranking["pts"]["A"], ranking["pts_rest"]["B"])
    with pytest.raises(DataError, match="genes that were tested are not in adata, such as 'g0'"):
        de.differential_expression(adata, "group", "A", "B").to_scanpy(adata[:, 5:].copy())


def test_contrasts_that_share_their_first_group_need_a_name_for_a_copy():
    adata = simulated()
    result = de.differential_expression(adata, "group", pairs=[("A", "B"), ("A", "C")])
    with pytest.raises(SettingError, match="name one of them with contrast="):
        result.to_scanpy(adata, copy=True)
    result.to_scanpy(adata)
    assert adata.uns["rank_genes_groups"]["names"].dtype.names == ("A vs B", "A vs C")


def test_latents_are_ready_for_neighbours_and_umap():
    adata = simulated(n=120)
    result = de.differential_expression(adata, "group", "A", "B", **MODEL)
    result.to_scanpy(adata)
    assert "X_vaerdict" not in adata.obsm  # cells of C have no latents
    order = np.random.default_rng(0).permutation(120)
    compared = result.to_scanpy(adata[order].copy(), copy=True)
    assert compared.obsm["X_vaerdict"].shape[0] == 80
    assert np.isfinite(compared.obsm["X_vaerdict"]).all()
    place = result.obs.index.get_loc(compared.obs_names[0])
    np.testing.assert_array_equal(compared.obsm["X_vaerdict"][0], result.latent[place])
    scanpy = pytest.importorskip("scanpy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scanpy.pp.neighbors(compared, use_rep="X_vaerdict", n_neighbors=5)
        scanpy.tl.umap(compared)
    assert compared.obsm["X_umap"].shape == (80, 2)


# ------------------------------------------------------------------------------------------- posteriors and answers
@pytest.fixture(scope="module")
def model() -> Any:
    return vd.models.PPCA(torch.eye(3, 2), noise_scale=1.0)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.tensor([[1.0, 0.0, 0.0], [-2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])


def test_a_posterior_is_shown_in_two_lines_and_a_table(model, x):
    posterior = vd.posterior(model, x, model.posterior(x), n=400, seed=0)
    first, second = repr(posterior).splitlines()
    assert first == "Posterior: 3 observations, 400 particles each"
    assert second.startswith("  ok 3; k-hat")
    assert well_formed(posterior._repr_html_()).count("<tr>") == 4


@pytest.mark.parametrize("tolerance", [None, 0.05])
def test_a_posterior_is_drawn(model, x, tolerance):
    proposals = model.posterior(x, inflate=1.2)
    posterior = vd.posterior(model, x, proposals, n=2000, tolerance=tolerance, seed=0)
    ax = drawn(posterior.plot())
    assert (ax.get_ylabel(), sum(len(part.get_offsets()) for part in ax.collections)) == ("k-hat", 3)
    ax = drawn(posterior.plot(1))
    assert ax.get_title() == "observation 1: ok"
    means = ax.collections[-1].get_offsets()[:, 1]
    assert means.tolist() == pytest.approx(posterior.expect(lambda z: z).value[1].tolist(), abs=1e-6)
    exact = model.posterior(x)
    sd = exact.forward(x).stddev[1] if hasattr(exact, "forward") else None
    low, high = ax.collections[0].get_segments()[0][:, 1]
    assert sd is None or high - low == pytest.approx(2 * 1.645 * float(sd[0]), rel=0.15)


def test_an_answer_is_shown_and_remains_a_tuple(model, x):
    answer = vd.expect(model, x, lambda z: (z[..., 0] > 0).double(), model.posterior(x), n=400, seed=0)
    assert repr(answer).splitlines()[0] == "Answer: 3 observations, ok 3"
    assert f"first value {float(answer.value[0]):.3g} ± " in repr(answer)
    html = well_formed(answer._repr_html_())
    assert html.count("<tr>") == 4
    assert answer.reason[0].replace("<", "&lt;") in html
    assert answer[0] is answer.value
    latents = vd.expect(model, x, lambda z: z.repeat_interleave(3, -1), model.posterior(x), n=400, seed=0)
    assert "... (6 values)" in repr(latents)


def test_what_was_not_answered_cannot_be_drawn(model, x):
    posterior = vd.posterior(model, x, model.posterior(x), n=400, seed=0)
    failed = SimpleNamespace(**{name: getattr(posterior, name) for name in ("z", "verdict")}, failed=torch.ones(3) > 0)
    from vaerdict.inference import shown

    with pytest.raises(WeightError, match="observation 2 was not answered"):
        shown.plot_latents(failed, posterior.log_w, 2, None)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- calibration
@pytest.mark.parametrize(("spikes", "ylabel"), [(2, "share of false calls"), (0, "share of splits with a false call")])
def test_a_calibration_is_shown_and_drawn(spikes, ylabel):
    calibration = de.calibrate(simulated(n=120), "group", ["A"], splits=2, spikes=spikes, n_draws=100)
    lines = repr(calibration).splitlines()
    assert lines[0] == "Calibration: halves of A; FDR not resolved"
    assert any("of the splits have a false call" in line for line in lines)
    assert (spikes == 0) or "of the changes are found" in lines[1]
    assert "not resolved" in well_formed(calibration._repr_html_()).lower()
    ax = drawn(calibration.plot())
    assert ax.get_ylabel() == ylabel
    assert "as stated" in ax.get_legend_handles_labels()[1]
