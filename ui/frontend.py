"""The panel's browser files: where they are, in which order they load, and under which addresses the page serves them."""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path
from urllib.parse import quote

import gradio as gr
import plotly

ASSETS = Path(__file__).parent / "assets"
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
STYLE = ASSETS / "panel.css"
PAGE = ASSETS / "page.html"
EXAMPLE = ASSETS / "demo-trace.json"
_NOUNS = (
    *("theme", "words", "history", "feed", "layout", "zoom", "details", "tree"),
    *("playback", "scrubber", "strip", "charts", "export", "controls", "slim", "panel"),
)
SCRIPTS = tuple(ASSETS / f"{noun}.js" for noun in _NOUNS)
"""In loading order: plain scripts, each adding its noun to the page's `specdec` object."""


@cache
def serve_assets() -> None:
    """Let Gradio serve the files above, and nothing else."""
    gr.set_static_paths([*SCRIPTS, STYLE, PAGE, EXAMPLE, PLOTLY])


def address(file: Path) -> str:
    """The address of a served file; it changes with the file, so that no browser keeps an old one."""
    return f"gradio_api/file={quote(file.resolve().as_posix())}?v={file.stat().st_mtime_ns:x}"


def addresses() -> dict[str, object]:
    """What the panel fetches by itself: for its exports, its charts, and the recorded example."""
    return {
        "style": address(STYLE),
        "scripts": [address(PLOTLY), *map(address, SCRIPTS)],
        "page": address(PAGE),
        "plotly": address(PLOTLY),
        "example": address(EXAMPLE) if EXAMPLE.exists() else None,
    }


def head() -> str:
    """Stylesheet and scripts as a component's ``head``; Gradio loads each once, in order, before ``js_on_load``."""
    link = f'<link rel="stylesheet" href="{escape(address(STYLE))}">'
    return link + "".join(f'<script src="{escape(address(script))}"></script>' for script in SCRIPTS)
