"""The audit: the target reads the last reply again and checks every token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import suppress

import torch

from specdec.audit import Audit
from specdec.devices import dtype_name
from specdec.serving.line import GaveUp
from ui.errors import explain
from ui.replies import Replies, in_line
from ui.state import Chat, Finished
from ui.stop import Clock
from ui.stream import Producer
from ui.visitors import LimitError

PREFIX = "audit"
GOOD = PREFIX + " ✓"
"""How a line begins that reports no difference."""
_NEAR_TIE = 0.5
"""Logits. Rounding may swap the target's first two choices if they are this near (measured in bfloat16: up to 0.375)."""
_EXACT = (torch.float32, torch.float64)


def check(replies: Replies, chat: Chat) -> Generator[str, None, None]:
    """Audit the chat's latest reply when the engine is free. Yields one line at a time about its progress, the verdict last.

    If it is closed before that, it gives up its place in the queue.
    """
    finished = chat.finished
    if finished is None:
        yield f"{PREFIX}: this reply is from an earlier session and cannot be checked. Press Retry, then audit the new reply."
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
        for events in Producer(produce).batches():
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
    """Whether rounding may swap two choices whose scores, divided by ``temperature``, lie ``gap`` apart."""
    return gap * (temperature or 1.0) <= _NEAR_TIE


def why_differing(dtype: torch.dtype, near: bool) -> str:
    """Why a pass of another shape chose another token; ``near``: the target's first two choices were a near tie."""
    return f"{'rounding decides near ties' if _rounds(dtype, near) else 'this should not happen'} in {dtype_name(dtype)}"


def _rounds(dtype: torch.dtype, near: bool) -> bool:
    return near and dtype not in _EXACT


def describe(report: Audit, temperature: float, dtype: torch.dtype) -> str:
    """The verdict in one line, and below it the figures."""
    verb, choice = ("draw", "draw with the same seed") if temperature else ("choose", "choice")
    if differing := report.tokens - report.own:
        near = is_near_tie(report.largest_shortfall, temperature)
        why = why_differing(dtype, near)
        where, those = ("1 position", "There") if differing == 1 else (f"{differing:,} positions", "At those")
        tied = f" {those} its top two choices are nearly tied." if _rounds(dtype, near) else ""
        verdict = f"the model alone would {verb} the same token at all but {where}.{tied}"
    else:
        verdict = f"the model alone would {verb} the same token at every position."
        exact = "the text is exactly that of plain decoding"
        why = exact if dtype in _EXACT else f"in {dtype_name(dtype)} rounding may still change near ties in a plain run"
    return (
        f"{verdict}\n"
        f"{report.own:,} of {report.tokens:,} tokens are the target's own {choice}. "
        f"The largest distance from the target's first choice is {report.largest_shortfall:.3f} logits ({why})."
    )
