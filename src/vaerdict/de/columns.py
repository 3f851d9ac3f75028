"""Every column of de.csv and calibrate.csv: its name, what it holds, and how the page shows it.

To add a column, add it here and fill it where it is computed; the command's help, the documentation and the page
follow.
"""

from __future__ import annotations

from typing import NamedTuple


class TableColumn(NamedTuple):
    """A column of a result file.

    `title` is its heading on the page, empty where the page does not show it; `{a}` and `{b}` stand for the names of
    the groups. `kind` says how it prints: text, flag, lfc, prob or small. `extra` columns are shown on demand.
    `stage` names what computes it: always there, or only with a prior, a model or other names of genes.
    """

    name: str
    meaning: str
    title: str = ""
    kind: str = "text"
    extra: bool = False
    stage: str = ""


MODEL, PRIOR, SYMBOLS = "model", "prior", "symbols"
"""Stages whose columns are in the table only where they were asked for."""

DE = (
    TableColumn("contrast", "name of the contrast"),
    TableColumn("group_a", "first group: fold changes are of it over the second"),
    TableColumn("group_b", "second group; `rest` for all other cells"),
    TableColumn("gene", "name of the gene", "gene"),
    TableColumn("gene_id", "the gene in var_names, where gene_symbols names it otherwise", stage=SYMBOLS),
    TableColumn("lfc_mean", "posterior mean of the log2 fold change, group_a over group_b", "LFC", "lfc"),
    TableColumn("lfc_median", "posterior median of the log2 fold change", "LFC median", "lfc", extra=True),
    TableColumn("lfc_low", "lower end of its 90 % credible interval", "LFC low", "lfc"),
    TableColumn("lfc_high", "upper end of its 90 % credible interval", "LFC high", "lfc"),
    TableColumn(
        "prob_de",
        "posterior probability that the LFC is beyond delta on its side: the larger of the next two",
        "P(DE)",
        "prob",
    ),
    TableColumn("prob_up", "posterior probability that LFC is at least delta", "P(up)", "prob", extra=True),
    TableColumn("prob_down", "posterior probability that LFC is at most -delta", "P(down)", "prob", extra=True),
    TableColumn(
        "lfsr", "local false sign rate: probability that the LFC is zero or of the other sign", "lfsr", "small"
    ),
    TableColumn(
        "q_value",
        "smallest posterior expected FDR at which the gene is called, and at least its lfsr",
        "q",
        "small",
    ),
    TableColumn(
        "is_de",
        "whether the gene is called: its q_value is small enough and its interval leaves out 0",
        "called",
        "flag",
    ),
    TableColumn("mcse", "Monte-Carlo error of prob_de; zero where it is computed exactly", "MCSE", "small", extra=True),
    TableColumn("mean_a", "share of the counts of group_a that are of the gene", "mean in {a}", "small"),
    TableColumn("mean_b", "share of the counts of group_b that are of the gene", "mean in {b}", "small"),
    TableColumn("seen_a", "share of the cells of group_a in which the gene is seen", "seen in {a}", "prob"),
    TableColumn("seen_b", "share of the cells of group_b in which the gene is seen", "seen in {b}", "prob"),
    TableColumn("lfc_counts", "posterior mean of the LFC by the counts alone", "LFC by counts", "lfc", True, PRIOR),
    TableColumn("lfsr_counts", "lfsr by the counts alone", "lfsr by counts", "small", True, PRIOR),
    TableColumn(
        "lfc_predicted",
        "LFC that the prior expects of new cells, learned without the counts of the gene; empty where there is none",
        "LFC predicted",
        "lfc",
        True,
        PRIOR,
    ),
    TableColumn("prior_shift", "lfc_mean - lfc_counts: how far the prior moved it", "moved by", "lfc", True, PRIOR),
    TableColumn("by_prior", "whether the gene is called, and not by the counts alone", "by prior", "flag", True, PRIOR),
    TableColumn("model_lfc", "mean log2 fold change by the model alone", "model LFC", "lfc", True, MODEL),
    TableColumn(
        "model_mean_a", "mean proportion in group_a by the model alone", "model mean in {a}", "small", True, MODEL
    ),
    TableColumn(
        "model_mean_b", "mean proportion in group_b by the model alone", "model mean in {b}", "small", True, MODEL
    ),
)
"""The columns of de.csv, one row for each contrast and gene."""

CALIBRATE = (
    TableColumn(
        "kind",
        "null (halves of a group, nothing changed), mixed (halves of two groups pooled, nothing changed), spike "
        "(halves of a group, changes planted) or undone (two groups, the change of some genes undone)",
    ),
    TableColumn("group", "the group whose cells were split, or the two groups"),
    TableColumn("split", "number of the split"),
    TableColumn("within", "the cell type whose cells were compared, where each has its own FDR"),
    TableColumn("method", "reported: what `vaerdict de` reports; otherwise the name of a rival"),
    TableColumn("question", "what the method tests: any change, or a change beyond delta"),
    TableColumn("replicates", "cells or samples"),
    TableColumn("level", "the FDR at which genes were called"),
    TableColumn("n_genes", "genes compared, over all contrasts"),
    TableColumn(
        "n_true",
        "number of genes that changed: at all, or by at least delta, as the question is; unknown where changes were "
        "undone",
    ),
    TableColumn("n_unchanged", "number of genes known not to have changed so: all others, or those undone"),
    TableColumn("n_called", "number of genes called"),
    TableColumn("n_false", "number of genes called among those known not to have changed so"),
    TableColumn(
        "fdp",
        "their share of the genes called, zero where none is called; where changes were undone it is a lower bound, "
        "because calls of other genes cannot be judged",
    ),
    TableColumn("tpr", "share of the changed genes that were called; unknown where changes were undone"),
    TableColumn("expected_fdr", "the FDR stated for the genes called; none by p-values"),
)
"""The columns of calibrate.csv, one row for each split, list of genes with an FDR of its own, method and level."""


def names(columns: tuple[TableColumn, ...], *stages: str) -> list[str]:
    """The names of the columns that are always there and of those that `stages` compute, in order."""
    return [column.name for column in columns if not column.stage or column.stage in stages]


def column_table(columns: tuple[TableColumn, ...]) -> str:
    """The columns as a Markdown table, for the documentation."""
    return "\n".join(["| column | holds |", "|---|---|", *(f"| `{c.name}` | {c.meaning} |" for c in columns)])


def column_help(columns: tuple[TableColumn, ...], file: str) -> str:
    """The columns as text for the help of a command."""
    return f"[bold]Columns of {file}[/bold]\n\n" + "\n\n".join(f"{c.name}: {c.meaning}" for c in columns)


NOT_TESTED = (
    TableColumn("contrast", "name of the contrast"),
    TableColumn("gene", "name of the gene"),
    TableColumn("cells_seen", "cells of either side in which the gene is seen"),
    TableColumn("reason", "why the gene was not tested"),
)
"""The columns of not_tested.csv, one row for each contrast and gene that was not tested."""
