"""Result files to tables, figures and one self-contained web page: a framework that knows no experiment."""

from vaerdict.report.document import brief, markdown, text
from vaerdict.report.render import load, read_record, read_run, render, well_formed, write_page

__all__ = ["brief", "load", "markdown", "read_record", "read_run", "render", "text", "well_formed", "write_page"]
