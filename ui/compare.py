"""Compare: one prompt, decoded several ways one after the other, then replayed side by side on one clock.

Two lanes never run at once: they would slow each other down. Each starts with the prompt read and nothing learnt, is timed
by its own steps, and is recorded; the page replays the records at their true speed, and says that it does.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specdec.prompt import Prompt
from specdec.request import Decoding
from specdec.serving.line import GaveUp
from ui.audits import is_near_tie, why_differing
from ui.errors import explain
from ui.limits import Clock, LimitError
from ui.pump import Pump
from ui.replies import Preparing, Replies, Waiting
from ui.settings import Settings
from ui.trace import Json, Recorder
from ui.turns import Stops, in_line
from ui.visitors import TooManyError

LANES: tuple[Decoding, ...] = ("plain", "linear", "tree")


@dataclass(frozen=True, slots=True)
class Lane:
    """One way of decoding, recorded."""

    decoding: Decoding
    recorder: Recorder

    @property
    def token_ids(self) -> list[int]:
        """Everything it emitted."""
        return [token for record in self.recorder.records for token in record["token_ids"]]

    def to_json(self) -> Json:
        """As the page replays it: the records, and the figures over all of them."""
        return {"decoding": self.decoding, "steps": self.recorder.records, "figures": self.recorder.stats.to_json()}


class Comparisons:
    """Runs comparisons for the page, one at a time, and in turn with everybody's replies."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._stops = Stops()

    def run(self, tab: str, text: str, decodings: Sequence[str], settings: Settings) -> Iterator[str]:
        """Compare ``decodings`` on one prompt; yields payloads for the page's race."""
        settings = self._replies.limits.settings(settings)
        try:
            with self._replies.pending.place():
                self._replies.check(text, settings)
                yield from self._run(tab, text, decodings, settings)
        except (TooManyError, LimitError) as error:
            yield _payload(error=explain(error))

    def _run(self, tab: str, text: str, decodings: Sequence[str], settings: Settings) -> Iterator[str]:
        lanes = [Lane(decoding, self._recorder()) for decoding in LANES if decoding in decodings]
        if not text.strip() or len(lanes) < 2:
            yield _payload(error="A comparison needs a prompt and at least two lanes.")
            return
        told: Json = {"status": "The engine is getting ready …"}
        difference: Json | None = None
        with self._stops.begin(tab) as stop:
            try:
                yield _payload(**told)
                for events in Pump(partial(self._race, text, lanes, settings, stop)).batches():
                    for event in events:
                        match event:
                            case Waiting(ahead):
                                told = {"status": f"{in_line(ahead).capitalize()} …"}
                            case Preparing(words):
                                told = {"status": f"{words.capitalize()} …"}
                            case Lane():
                                told = _status(lanes, event, settings.max_tokens)
                            case _:
                                difference = event
                    yield _payload(**told)
                if stop.is_set() or difference is None:
                    yield _payload(status="Stopped.")
                else:
                    yield _payload(lanes=[lane.to_json() for lane in lanes], agreement=difference)
            except Exception as error:
                yield _payload(error=explain(error))

    def stop(self, tab: str) -> None:
        """End the tab's comparison, if one is running."""
        self._stops.stop(tab)

    def _recorder(self) -> Recorder:
        """Of steps and figures; the page knows what was asked."""
        return Recorder({}, {}, [], lambda token_ids: self._replies.engine.token_texts(token_ids))

    def _race(
        self, text: str, lanes: list[Lane], settings: Settings, stop: threading.Event, put: Callable[[Any], None]
    ) -> None:
        """Decode lane after lane while no reply is written; puts the lane at each of its steps, and last the agreement."""
        replies, decoder = self._replies, self._replies.decoder
        messages = [{"role": "system", "content": settings.system_prompt}] if settings.system_prompt else []
        with (
            suppress(GaveUp),
            replies.turn(stop.is_set, lambda ahead: put(Waiting(ahead)), alone=True),
            replies.service.telling(lambda words: put(Preparing(words))),
        ):
            prompt = replies.fit([*messages, {"role": "user", "content": text}], settings.max_tokens)
            clock = Clock(stop, replies.limits.seconds)
            for lane in lanes:
                chosen = replace(settings, decoding=lane.decoding)
                for step in decoder.steps(decoder.conversation(remember=False), prompt, chosen, clock.ends, details=True):
                    lane.recorder.add(step)
                    put(lane)
            agreement = None if clock.ends() else self._agreement(prompt, lanes, settings, clock)
            if clock.late:
                raise LimitError(f"this page's limit is {replies.limits.seconds:.0f} seconds: ask for fewer tokens")
            if agreement is not None:
                put(agreement)

    def _agreement(self, prompt: Prompt, lanes: list[Lane], settings: Settings, clock: Clock) -> Json | None:
        """Whether the lanes give the same text; else which lanes agree with the first, and where the others begin to differ.

        For each difference: how near a tie the target saw there, and why the choice may differ. None once ``clock`` ends it.
        """
        said: dict[tuple[int, ...], list[str]] = {}
        for lane in lanes:
            said.setdefault(tuple(lane.token_ids), []).append(lane.decoding)
        (reference, agreeing), *others = said.items()
        if not others:
            return {"same": True, "tokens": len(reference)}
        positions = [_parting(reference, token_ids) for token_ids, _ in others]
        report = self._replies.decoder.audit(prompt, reference[: max(positions) + 1], settings, clock.ends)
        if clock.ends():
            return None
        margins: list[float] = report.margins.tolist()
        dtype = self._replies.engine.model.dtype
        apart = [
            {
                "lanes": names,
                "position": position,
                "margin": margins[position],
                "why": why_differing(dtype, is_near_tie(margins[position], settings.temperature)),
            }
            for (_, names), position in zip(others, positions, strict=True)
        ]
        return {"same": False, "lanes": agreeing, "apart": apart}


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    """Where two replies begin to differ: the first token that is not the same, else the last one that both have."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter - 1)


def _status(lanes: Sequence[Lane], lane: Lane, max_tokens: int) -> Json:
    return {
        "status": f"Lane {lanes.index(lane) + 1} of {len(lanes)}: {lane.decoding}",
        "tokens": lane.recorder.stats.tokens,
        "done": round((lanes.index(lane) + lane.recorder.stats.tokens / max_tokens) / len(lanes), 3),
    }


def _payload(**content: Any) -> str:
    payload = {**content, "nonce": secrets.token_hex(4)}
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
