"""Sphinx configuration: `make docs` builds the site into docs/_build/html."""

from __future__ import annotations

import hookdrop

TUTORIALS = [f"plot_{name}.py" for name in ("masks", "schedules", "finetune", "mc_dropout", "observe")]

project = "hookdrop"
author = "the hookdrop authors"
copyright = author
version = release = hookdrop.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "_templates", "gallery"]
default_role = "code"  # docstrings write `names` in single backticks
suppress_warnings = ["config.cache"]  # sphinx_gallery_conf holds a function

autosummary_generate = True
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_custom_sections = ["Reference", "References"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

sphinx_gallery_conf = {
    "examples_dirs": "../examples/tutorials",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"/plot_",
    "within_subsection_order": TUTORIALS.index,
    "download_all_examples": False,
    "show_memory": False,
    "min_reported_time": 10**6,
    "matplotlib_animations": False,
    "remove_config_comments": True,
}

html_theme = "pydata_sphinx_theme"
html_title = f"hookdrop {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_show_sourcelink = False
html_extra_path = ["llms.txt"]
html_theme_options = {
    "navigation_with_keys": False,
    "show_nav_level": 1,
    "header_links_before_dropdown": 7,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
copybutton_exclude = ".linenos, .gp, .go"
