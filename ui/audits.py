"""The audit button: the last reply, checked by the target itself."""

from __future__ import annotations

import threading
from functools import partial

import torch

from specdec.audit import Audit
from ui.chats import Chat
from ui.errors import explain
from ui.replies import Replies

PREFIX = "audit"
GOOD = PREFIX + " ✓"
"""How a line begins that says that all is well."""


def check(replies: Replies, chat: Chat, stop: threading.Event) -> str:
    """Audit the chat's latest reply, when the engine is free; one line about what came out."""
    finished = chat.finished
    if finished is None:
        return f"{PREFIX}: there is no reply from this session to check; regenerate it first"
    try:
        work = partial(replies.decoder.audit, finished.prompt, finished.token_ids, finished.settings, stop.is_set)
        report = replies.turns.run(work, stop.is_set, lambda ahead: None)
    except Exception as error:
        return f"{PREFIX}: {explain(error)}"
    verdict = GOOD if report.first_difference is None else PREFIX
    return f"{verdict}: {describe(report, finished.settings.temperature > 0, replies.engine.model.dtype)}"


def describe(report: Audit, sampled: bool, dtype: torch.dtype) -> str:
    """The verdict in one line."""
    choice = "draw under the same noise" if sampled else "choice"
    line = f"{report.own:,} of {report.tokens:,} tokens are the target's own {choice}"
    if report.first_difference is None:
        return f"{line}; the text is exactly what plain decoding says"
    name = str(dtype).removeprefix("torch.")
    exact = dtype in (torch.float32, torch.float64)
    why = "this should not happen in" if exact else "rounding tips near ties in"
    return f"{line}; the largest shortfall is {report.largest_shortfall:.3f} logits ({why} {name})"
