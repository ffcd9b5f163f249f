"""The site: Sphinx, with MyST for Markdown and Furo's pages, which load nothing from elsewhere."""

from agfa import __version__

project = "agfa"
release = __version__
extensions = ["myst_parser"]
myst_heading_anchors = 3
highlight_language = "text"
html_theme = "furo"
html_title = f"agfa {__version__}"
html_show_copyright = False
html_copy_source = False
