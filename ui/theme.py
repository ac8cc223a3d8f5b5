"""The page's appearance: name, icon, theme, stylesheet and script."""

from __future__ import annotations

from typing import Any

from gradio.themes import Base
from gradio.themes.utils import colors, sizes
from gradio.themes.utils.fonts import LocalFont

from ui import panel

TITLE = "Token Tree Chat"
FAVICON = panel.ASSETS / "favicon.svg"
_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src *; "  # Gradio is inline and evaluates
    "frame-src 'none'; object-src 'none'; form-action 'self'"
)
"""A second defence behind `ui.markdown`: even an active tag in a reply could load nothing from another site."""
_INK, _PAPER = "#1a1e24", "#ffffff"  # as in the panel's palette
_ACCENT, _ACCENT_DARK = "#0b7a5c", "#57d4ac"
_INK_DARK, _PAPER_DARK = "#e9ebee", "#191c21"


def launch_arguments() -> dict[str, Any]:
    """Arguments of ``launch``."""
    script = (panel.ASSETS / "page.js").read_text(encoding="utf-8")
    return {
        "theme": _theme(),
        "css_paths": [panel.ASSETS / "page.css"],
        "head": f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta http-equiv="x-dns-prefetch-control" content="off">'  # nor is a name in a link looked up before a click
        f"<script>{script}</script>",
        "favicon_path": FAVICON,
        "footer_links": [],
    }


def _theme() -> Base:
    """A light and a dark palette. The fonts come with Gradio, so nothing is fetched from another site."""
    theme = Base(
        primary_hue=colors.emerald,
        neutral_hue=colors.slate,
        text_size=sizes.text_md,
        radius_size=sizes.radius_md,
        spacing_size=sizes.spacing_md,
        font=(LocalFont("IBM Plex Sans", weights=(400, 700)), "ui-sans-serif", "system-ui", "sans-serif"),
        font_mono=(LocalFont("IBM Plex Mono", weights=(400, 700)), "ui-monospace", "Menlo", "Consolas", "monospace"),
    )
    return theme.set(
        body_background_fill="#f7f8f8",
        body_background_fill_dark="#111317",
        body_text_color=_INK,
        body_text_color_dark=_INK_DARK,
        body_text_color_subdued="#59636e",
        body_text_color_subdued_dark="#a2abb6",
        background_fill_primary=_PAPER,
        background_fill_primary_dark=_PAPER_DARK,
        background_fill_secondary="#f5f6f8",
        background_fill_secondary_dark="#23272e",
        border_color_primary="#e4e7eb",
        border_color_primary_dark="#2c3239",
        block_background_fill=_PAPER,
        block_background_fill_dark=_PAPER_DARK,
        block_border_color="#e4e7eb",
        block_border_color_dark="#2c3239",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_title_text_color=_INK,
        block_title_text_color_dark=_INK_DARK,
        block_title_text_size="*text_sm",
        block_label_text_color="#59636e",
        block_label_text_color_dark="#a2abb6",
        color_accent=_ACCENT,
        slider_color=_ACCENT,
        slider_color_dark=_ACCENT_DARK,
        checkbox_background_color_selected=_ACCENT,
        checkbox_background_color_selected_dark=_ACCENT,
        checkbox_border_color_selected=_ACCENT,
        checkbox_border_color_selected_dark=_ACCENT,
        checkbox_label_background_fill="transparent",
        checkbox_label_background_fill_dark="transparent",
        checkbox_label_background_fill_selected="#e2f4ed",
        checkbox_label_background_fill_selected_dark="#11372c",
        checkbox_label_text_color_selected=_INK,
        checkbox_label_text_color_selected_dark=_INK_DARK,
        block_info_text_color="#59636e",
        block_info_text_color_dark="#a2abb6",
        block_shadow="none",
        input_background_fill=_PAPER,
        input_background_fill_dark="#1f2329",
        input_border_color="#d5dae0",
        input_border_color_dark="#363d46",
        input_border_color_focus="#2456c8",
        input_border_color_focus_dark="#8fb3ff",
        input_placeholder_color="#68727c",
        input_placeholder_color_dark="#929ca7",
        button_primary_background_fill=_INK,
        button_primary_background_fill_dark=_INK_DARK,
        button_primary_background_fill_hover="#39424d",
        button_primary_background_fill_hover_dark=_PAPER,
        button_primary_text_color=_PAPER,
        button_primary_text_color_dark=_INK,
        button_secondary_background_fill=_PAPER,
        button_secondary_background_fill_dark="#23272e",
        button_secondary_border_color="#d5dae0",
        button_secondary_border_color_dark="#363d46",
        code_background_fill="#f5f6f8",
        code_background_fill_dark="#121519",
        color_accent_soft="#eef2ff",
        color_accent_soft_dark="#222b3d",
    )
