"""The page to try a model on, put together of its template, style and script."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

import matplotlib as mpl
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup


def page() -> tuple[str, str]:
    """The page, which asks nobody but this server for anything, and the policy that holds it to that."""
    here = files("agfa.inference")
    style, *scripts = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "worst.js"))
    colours = {
        name: base64.b64encode(mpl.colormaps[name](range(256), bytes=True)[:, :3].tobytes()).decode()
        for name in ("viridis", "twilight")
    }
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        (here / "page.html.j2").read_text(encoding="utf-8")
    )
    html = template.render(scripts=map(Markup, scripts), style=Markup(style), colours=colours)
    rules = (
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, scripts))}",
        f"style-src {_hash(style)}",
        "img-src blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return html, "; ".join(rules)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
