"""The audit button: the last reply, checked by the target itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import suppress

import torch

from specdec.audit import Audit
from specdec.devices import dtype_name
from specdec.serving.line import GaveUp
from ui.chats import Chat, Finished
from ui.errors import explain
from ui.limits import Clock, LimitError
from ui.pump import Pump
from ui.replies import Replies
from ui.turns import in_line

PREFIX = "audit"
GOOD = PREFIX + " ✓"
"""How a line begins that says that all is well."""
_NEAR_TIE = 0.5
"""Logits; where the target's first two choices are that near, rounding may tip them (bfloat16, measured: up to 0.375)."""
_EXACT = (torch.float32, torch.float64)


def check(replies: Replies, chat: Chat) -> Generator[str, None, None]:
    """Audit the chat's latest reply, when the engine is free: one line at a time about how it stands, the verdict last.

    Closed before that, it gives its place in the queue up.
    """
    finished = chat.finished
    if finished is None:
        yield f"{PREFIX}: there is no reply from this session to check; regenerate it first"
        return
    stop = threading.Event()
    clock = Clock(stop, replies.limits.seconds)

    def work() -> Audit:
        report = replies.decoder.audit(finished.prompt, finished.token_ids, finished.settings, clock.ends)
        if clock.late:
            raise LimitError(f"this page's limit is {replies.limits.seconds:.0f} seconds")
        return report

    def produce(put: Callable[[int | Audit], None]) -> None:
        with suppress(GaveUp), replies.turn(stop.is_set, put):
            put(work())

    line = f"{PREFIX}: the target reads the reply again …"
    try:
        for events in Pump(produce).batches():
            for event in events:
                line = _line(event, finished, replies.engine.model.dtype)
            yield line
    except Exception as error:
        yield f"{PREFIX}: {explain(error)}"
    finally:
        stop.set()


def _line(event: int | Audit, finished: Finished, dtype: torch.dtype) -> str:
    if isinstance(event, int):
        return f"{PREFIX}: {in_line(event)}"
    verdict = GOOD if event.first_difference is None else PREFIX
    return f"{verdict}: {describe(event, finished.settings.temperature, dtype)}"


def is_near_tie(gap: float, temperature: float) -> bool:
    """Whether rounding may tip two choices that lie ``gap`` apart in scores, which ``temperature`` stretched."""
    return gap * (temperature or 1.0) <= _NEAR_TIE


def why_differing(dtype: torch.dtype, near: bool) -> str:
    """Why a pass of another shape chose another token; ``near``: the target's first two choices were a near tie."""
    return f"{'rounding tips near ties' if _rounds(dtype, near) else 'this should not happen'} in {dtype_name(dtype)}"


def _rounds(dtype: torch.dtype, near: bool) -> bool:
    return near and dtype not in _EXACT


def describe(report: Audit, temperature: float, dtype: torch.dtype) -> str:
    """The verdict in a line for everybody, and below it one with the figures."""
    verb, choice = ("draw", "draw under the same noise") if temperature else ("choose", "choice")
    if differing := report.tokens - report.own:
        near = is_near_tie(report.largest_shortfall, temperature)
        why = why_differing(dtype, near)
        tied = ", where its two best are all but tied and rounding decides" if _rounds(dtype, near) else ""
        verdict = f"the same tokens, but for {differing:,}{tied}"
    else:
        verdict = "every one of its tokens itself"
        exact = "the text is exactly what plain decoding says"
        why = exact if dtype in _EXACT else f"in {dtype_name(dtype)} a plain run may still tip near ties the other way"
    return (
        f"the model read this reply again, without guessing, and would {verb} {verdict}.\n"
        f"{report.own:,} of {report.tokens:,} tokens are the target's own {choice}; "
        f"the largest shortfall is {report.largest_shortfall:.3f} logits ({why})"
    )
