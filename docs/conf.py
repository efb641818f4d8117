"""The settings of the site; docs/contributing/index.md says how to build it."""

import fastload

project = "fastload"
version = release = fastload.__version__
copyright = "the fastload authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"fastload {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_js_files = ["labels.js"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r".*")]  # types in signatures; links between pages are all checked

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
default_role = "literal"  # `name` in docstrings
napoleon_google_docstring = True
napoleon_numpy_docstring = False
