"""Sphinx configuration: `make docs` builds the site into docs/_build/html."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markdownify import markdownify

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
templates_path = ["_templates"]
default_role = "code"  # docstrings write `names` in single backticks
suppress_warnings = ["config.cache"]  # sphinx_gallery_conf holds a function

autosummary_generate = True
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
toc_object_entries_show_parents = "hide"
napoleon_custom_sections = ["Reference", "References"]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

sphinx_gallery_conf = {
    "examples_dirs": "../examples/tutorials",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"/plot_",
    "within_subsection_order": TUTORIALS.index,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "capture_repr": (),
    "write_computation_times": False,  # its tables load scripts from other hosts
    "min_reported_time": 10**6,
    "matplotlib_animations": False,
    "remove_config_comments": True,
}

html_theme = "pydata_sphinx_theme"
html_title = f"hookdrop {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_js_files = ["matrix.js"]
html_favicon = "_static/logo.svg"
html_sidebars = {"**": ["sidebar-nav-bs"]}
html_context = {"default_mode": "auto"}
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": html_title, "image_light": "_static/logo.svg", "image_dark": "_static/logo.svg"},
    "navigation_with_keys": False,
    "collapse_navigation": True,
    "header_links_before_dropdown": 7,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc", "markdown"],
}
copybutton_selector = "div:not(.highlight-text, .highlight-none) > div.highlight pre"
copybutton_exclude = ".linenos, .gp, .go"


def setup(app: Any) -> None:
    """Write a Markdown twin of each page beside its HTML, and llms.txt, a list of all pages for language models."""
    app.connect("html-page-context", write_markdown)
    app.connect("build-finished", write_llms_txt)


def write_markdown(app: Any, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Write NAME.md beside NAME.html, with links to the other Markdown pages."""
    if doctree is None or app.builder.name != "html":
        return
    body = re.sub(r'<a class="headerlink".*?</a>|<(script|style|svg|button).*?</\1>', "", context["body"], flags=re.S)
    text = markdownify(body, heading_style="ATX", code_language_callback=code_language)
    twin = Path(app.outdir, f"{name}.md")
    twin.parent.mkdir(parents=True, exist_ok=True)
    twin.write_text(re.sub(r"(\]\((?!\w+:|[^)]*_downloads)[^)\s]*)\.html", r"\1.md", text).strip() + "\n")
    context["metatags"] += f'<link rel="alternate" type="text/markdown" href="{twin.name}">'


def code_language(code: Any) -> str:
    """The language of a code block, in the class of its container."""
    names = [name for parent in code.parents for name in parent.get("class", ()) if name.startswith("highlight-")]
    return names[0].removeprefix("highlight-").replace("default", "python") if names else ""


def write_llms_txt(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        pages = [(name, Path(app.outdir, f"{name}.md").read_text()) for name in sorted(app.env.found_docs)]
        lines = [
            f"- [{text.partition(chr(10))[0].lstrip('# ')}]({name}.md): {first_sentence(text)}" for name, text in pages
        ]
        head = f"# {project}\n\n> {first_sentence(dict(pages)['index'])}\n\n## Pages\n"
        (Path(app.outdir) / "llms.txt").write_text("\n".join([head, *lines]) + "\n")


def first_sentence(text: str) -> str:
    """The first sentence of the first paragraph, without links and roles."""
    text = re.sub(r"^(```|:::).*?^\1$|<!--.*?-->", "", text, flags=re.M | re.S)
    paragraph = next((part for part in re.split(r"\n\s*\n", text.strip()) if not re.match(r"[#<|!]|[-*] ", part)), "")
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)|\{[\w:]+\}", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.:]) ", plain)[0]
