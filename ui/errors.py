"""Errors as one line for the user of the page."""

from __future__ import annotations

import logging

import gradio as gr

from specdec.errors import MemoryFullError, NotANumberError
from specdec.prompt import PromptError
from specdec.request import RequestError
from ui.visitors import LimitError, TooManyError

log = logging.getLogger(__name__)


def explain(error: Exception) -> str:
    """One line about what went wrong. What the user cannot correct is logged in full."""
    if isinstance(error, gr.Error):  # from a Space's machinery, or explained already where it happened
        return str(error.message) if error.title == "Error" else f"{error.title}: {error.message}. The chat goes on: try again."
    line = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryFullError | NotANumberError | PromptError | RequestError | LimitError | TooManyError):
        return line[:1].upper() + line[1:]
    log.error("the engine failed", exc_info=error)
    return f"The engine failed ({type(error).__name__}: {line}). The chat goes on: try again, or change the settings."
