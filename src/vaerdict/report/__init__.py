"""Result files to tables, figures and one self-contained web page; trains nothing."""

from vaerdict.report.render import markdown, plain, render, update_readme

__all__ = ["markdown", "plain", "render", "update_readme"]
