"""A framework for reports: result files to tables, figures and one self-contained web page."""

from vaerdict.report.document import brief, markdown, text
from vaerdict.report.records import read_record, read_run, well_formed
from vaerdict.report.render import load, render, write_page

__all__ = ["brief", "load", "markdown", "read_record", "read_run", "render", "text", "well_formed", "write_page"]
