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

from specdec.devices import dtype_name
from specdec.prompt import Prompt
from specdec.request import Decoding
from specdec.text import token_texts
from ui.errors import explain
from ui.limits import Clock, LimitError
from ui.pump import Pump
from ui.replies import Replies, Waiting
from ui.settings import Settings
from ui.trace import Json, Recorder
from ui.turns import GaveUp

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
        self._stops: dict[str, threading.Event] = {}

    def run(self, tab: str, text: str, decodings: Sequence[str], settings: Settings) -> Iterator[str]:
        """Compare ``decodings`` on one prompt; yields payloads for the page's race."""
        self.stop(tab)
        settings = self._replies.limits.settings(settings)
        stop = self._stops[tab] = threading.Event()
        lanes = [Lane(decoding, self._recorder(text, decoding, settings)) for decoding in LANES if decoding in decodings]
        if not text.strip() or len(lanes) < 2:
            yield _payload(error="A comparison needs a prompt and at least two lanes.")
            return
        yield _payload(status="The engine is getting ready …")
        difference: Json | None = None
        try:
            for events in Pump(partial(self._race, text, lanes, settings, stop)).batches():
                for event in events:
                    if isinstance(event, Waiting):
                        yield _payload(status=f"Waiting: {event.ahead} before this one …")
                    elif isinstance(event, dict):
                        difference = event
                if not events or isinstance(events[-1], Lane):
                    yield _payload(**_status(lanes))
            if stop.is_set() or difference is None:
                yield _payload(status="Stopped.")
            else:
                yield _payload(lanes=[lane.to_json() for lane in lanes], agreement=difference)
        except Exception as error:
            yield _payload(error=explain(error))
        finally:
            stop.set()
            if self._stops.get(tab) is stop:
                del self._stops[tab]

    def stop(self, tab: str) -> None:
        """End the tab's comparison, if one is running."""
        if stop := self._stops.pop(tab, None):
            stop.set()

    def _recorder(self, text: str, decoding: str, settings: Settings) -> Recorder:
        facts = {**settings.facts(), "decoding": decoding}
        prompt = [{"role": "user", "content": text}]
        name = {"name": self._replies.engine.name}
        return Recorder(name, facts, prompt, lambda token_ids: token_texts(self._replies.engine.tokenizer, token_ids))

    def _race(
        self, text: str, lanes: list[Lane], settings: Settings, stop: threading.Event, put: Callable[[Any], None]
    ) -> None:
        """Decode lane after lane (in the engine's thread); puts the lane at each of its steps, and last the agreement."""
        replies, decoder = self._replies, self._replies.decoder
        messages = [{"role": "system", "content": settings.system_prompt}] if settings.system_prompt else []

        def work() -> None:
            prompt = replies.fit([*messages, {"role": "user", "content": text}], settings.max_tokens)
            for lane in lanes:
                chosen, clock = replace(settings, decoding=lane.decoding), Clock(stop, replies.limits.seconds)
                for step in decoder.steps(decoder.conversation(remember=False), prompt, chosen, clock.ends, details=True):
                    lane.recorder.add(step)
                    put(lane)
                if clock.late:
                    raise LimitError(f"this page's limit is {replies.limits.seconds:.0f} seconds a lane: ask for fewer tokens")
            if not stop.is_set():
                put(self._agreement(prompt, lanes, settings))

        with suppress(GaveUp):
            self._replies.turns.run(work, stop.is_set, lambda ahead: put(Waiting(ahead)))

    def _agreement(self, prompt: Prompt, lanes: list[Lane], settings: Settings) -> Json:
        """Whether the lanes say the same; else where they part, and how near a tie the target saw there."""
        reference = lanes[0].token_ids
        for lane in lanes[1:]:
            token_ids = lane.token_ids
            if token_ids == reference:
                continue
            position = next((i for i, (a, b) in enumerate(zip(reference, token_ids, strict=False)) if a != b), None)
            if position is None:  # one ends where the other goes on
                position = min(len(reference), len(token_ids)) - 1
            report = self._replies.decoder.audit(prompt, tuple(reference[: position + 1]), settings, lambda: False)
            return {
                "same": False,
                "lanes": [lanes[0].decoding, lane.decoding],
                "position": position,
                "margin": float(report.margins[-1]),
                "dtype": dtype_name(self._replies.engine.model.dtype),
            }
        return {"same": True, "tokens": len(reference)}


def _status(lanes: Sequence[Lane]) -> Json:
    begun = [lane for lane in lanes if lane.recorder.records] or [lanes[0]]
    lane, place = begun[-1], len(begun)
    return {"status": f"Lane {place} of {len(lanes)}: {lane.decoding}", "tokens": lane.recorder.stats.tokens}


def _payload(**content: Any) -> str:
    payload = {**content, "nonce": secrets.token_hex(4)}
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
