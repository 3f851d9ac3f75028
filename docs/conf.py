"""Settings of the site (`make docs`): Sphinx with myst-nb. Nothing is fetched when it is built or read."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import vaerdict as vd

project = "vaerdict"
author = "The vaerdict developers"
project_copyright = author
release = version = vd.__version__

extensions = [
    "mathml",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["figures", "_ext", "_templates"]
templates_path = ["_templates"]

# pages
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # tests/test_tutorials.py runs the notebooks and compares their outputs
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # these would be fetched
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# docstrings
default_role = "code"
autosummary_generate = True
shutil.rmtree(Path(__file__).parent / "generated", ignore_errors=True)  # pages of names that are gone would warn
autodoc_member_order = "bysource"
# added by scikit-learn
autodoc_default_options = {"exclude-members": "set_fit_request, set_predict_request, set_score_request"}
autodoc_type_aliases = {name: name for name in ("Observations", "UserQuery", "Randomness")}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = True
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# theme
html_theme = "sphinx_book_theme"
html_context = {"default_mode": "auto"}
html_title = "vaerdict"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "navbar_persistent": [],  # the search is in the sidebar
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def keep_first_line(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Keep napoleon from taking the first line of a property for its type where it has a colon."""
    if what in ("property", "attribute", "data"):
        lines[:0] = ["..", ""]


def named(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Write functions that are defaults, and aliases of types, by their names."""
    return signature and re.sub(r"<function ([\w.]+)>|TypeAliasForwardRef\('(\w+)'\)", r"\1\2", signature), returns


def setup(app: Sphinx) -> None:
    """Connect what changes signatures, and docstrings before napoleon does."""
    app.connect("autodoc-process-signature", named)
    app.connect("autodoc-process-docstring", keep_first_line, priority=100)
