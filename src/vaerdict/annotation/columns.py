"""Every column of cells.csv: its name and what it holds. The help of the command and the documentation follow."""

from __future__ import annotations

from vaerdict.de.columns import TableColumn

CELLS = (
    TableColumn("cell", "name of the cell in the query"),
    TableColumn("call", "`label`, `novel` (of no type of the reference) or `undecided`"),
    TableColumn("label", "most probable type of the reference, also where the call is another"),
    TableColumn("prob", "probability of that type, given that the cell is of one of them"),
    TableColumn(
        "p_novel",
        "conformal p-value: share of calibration cells that look at least as novel; empty where the rate is refused",
    ),
    TableColumn("q_novel", "smallest false discovery rate at which the cell is called novel; empty likewise"),
    TableColumn("unit", "cluster in which the cell was judged"),
    TableColumn(
        "verdict",
        "`ok`: the false discovery rate of novel calls holds; `caution`: a label, but the query differs from the "
        "reference on which its probability was calibrated, or no cell could have been called novel; `refuse`: "
        "undecided, and the query differs",
    ),
)
"""The columns of cells.csv, one row for each cell of the query."""
