"""The audit button: the last reply, checked by the target itself."""

from __future__ import annotations

import threading

from specdec.audit import Audit, audit
from ui.chats import Chat
from ui.replies import Replies, explain

PREFIX = "audit: "
GOOD = "✓ "
"""Before a line that says that all is well."""


def check(replies: Replies, chat: Chat, stop: threading.Event) -> str:
    """Audit the chat's latest reply, when the engine is free; one line about what came out."""
    finished = chat.finished
    if finished is None:
        return PREFIX + "there is no reply from this session to check; regenerate it first"
    try:
        with replies.turns.turn(stop.is_set, lambda ahead: None):
            arguments = finished.settings.arguments()
            report = audit(replies.engine, finished.prompt, finished.token_ids, stop.is_set, **arguments)
    except Exception as error:
        return PREFIX + explain(error)
    mark = GOOD if report.first_difference is None else ""
    return mark + PREFIX + describe(report, sampled=finished.settings.temperature > 0)


def describe(report: Audit, sampled: bool) -> str:
    """The verdict in one line."""
    choice = "draw under the same noise" if sampled else "choice"
    line = f"{report.own:,} of {report.tokens:,} tokens are the target's own {choice}"
    if report.first_difference is None:
        return f"{line}; the text is exactly what plain decoding says"
    return (
        f"{line}; the largest shortfall is {report.largest_shortfall:.3f} logits: near ties that rounding in this number "
        "format tips either way (float32 has none)"
    )
