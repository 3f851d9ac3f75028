"""Result files to tables, figures and one self-contained web page; trains nothing."""

from vaerdict.report.render import markdown, render, text, update_readme

__all__ = ["markdown", "render", "text", "update_readme"]
