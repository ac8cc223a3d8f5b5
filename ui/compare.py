"""Compare: one prompt, decoded several ways one after the other, then replayed side by side on one clock; and its tab.

Two lanes never run at once: they would slow each other down. Each starts with the prompt read and nothing learnt, is timed
by its own steps, and is recorded; the page replays the records at their true speed (``assets/race.js``), and says that it does.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any

import gradio as gr

from specdec.prompt import Prompt
from specdec.request import Decoding
from specdec.serving.line import GaveUp
from ui import panel
from ui.audit import is_near_tie, why_differing
from ui.errors import explain
from ui.examples import EXAMPLES
from ui.replies import Preparing, Replies, Waiting, in_line
from ui.settings import Settings
from ui.stop import Clock, Stops
from ui.stream import Producer, in_own_thread
from ui.trace import Json, Recorder
from ui.visitors import LimitError, TooManyError

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
                for events in Producer(partial(self._race, text, lanes, settings, stop)).batches():
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


SCRIPT = panel.ASSETS / "race.js"
_ON_LOAD = """
const race = new specdec.Race(element.querySelector('.race'));
watch('value', () => race.receive(props.value));
race.receive(props.value);
"""
_WHY = (
    "One prompt is decoded in several ways, **one after the other**, on this device. Then the runs are replayed side by side "
    "on one clock, which starts when the prompt has been read. Plain drafts nothing, linear drafts one chain of tokens, tree "
    "drafts several branches. Drafting changes the time, not the text: every token is the model's own choice."
)


class CompareTab:
    """Builds the tab's components inside the surrounding ``gr.Tab`` and wires them."""

    def __init__(self, comparisons: Comparisons, listening: Callable[[], bool]) -> None:
        self._comparisons = comparisons
        gr.set_static_paths([SCRIPT])
        with gr.Column(elem_id="compare"):
            gr.Markdown(_WHY, elem_id="compare-why")
            with gr.Row(elem_id="compare-prompts"):
                ready = [(gr.Button(f"{example.title}\n{example.expectation}"), example) for example in EXAMPLES]
            prompt = gr.Textbox(EXAMPLES[0].prompt, label="Prompt", lines=3, max_lines=8, elem_id="compare-prompt")
            with gr.Row(elem_id="compare-fields"):
                lanes = gr.CheckboxGroup(list(LANES), value=list(LANES), label="Lanes", min_width=280)
                budget = gr.Dropdown(["auto", "4", "8", "16", "32", "64"], value="auto", label="Node budget", min_width=110)
                max_tokens = gr.Number(128, precision=0, label="Max tokens", min_width=100)
                temperature = gr.Number(0, step=0.1, label="Temperature", min_width=100)
                seed = gr.Number(0, precision=0, label="Seed", min_width=80)
            with gr.Row(elem_id="compare-buttons"):
                run = gr.Button("Run the comparison", variant="primary", elem_id="compare-run")
                stop = gr.Button("Stop", elem_id="compare-stop", interactive=False)
            race = gr.HTML(
                value="",
                html_template='<div class="specdec-frame"><div class="race specdec"></div></div>',
                js_on_load=_ON_LOAD,
                head=f'{panel.head()}<script src="{escape(panel.address(SCRIPT))}"></script>',
                apply_default_css=False,
                elem_id="race",
            )
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        for button, example in ready:
            button.click(lambda text=example.prompt: text, outputs=prompt, queue=False, **quiet)
        run.click(
            in_own_thread(self.run, listening),
            [prompt, lanes, budget, max_tokens, temperature, seed],
            [race, run, stop],
            concurrency_limit=None,
            **quiet,
        )
        stop.click(self.stop, queue=False, **quiet)

    def run(
        self,
        prompt: str,
        request: gr.Request,
        lanes: list[str],
        budget: str,
        max_tokens: float,
        temperature: float,
        seed: float,
    ) -> Generator[tuple[Any, Any, Any], None, None]:
        """Run one comparison."""
        asked = Settings.read("tree", budget, temperature, 1.0, seed, max_tokens, "")
        settings = replace(asked, max_tokens=min(max(asked.max_tokens, 16), 512))  # all lanes are replayed from one payload
        for payload in self._comparisons.run(request.session_hash or "", prompt, lanes, settings):
            yield payload, gr.update(interactive=False), gr.update(interactive=True)
        yield gr.skip(), gr.update(interactive=True), gr.update(interactive=False)

    def stop(self, request: gr.Request) -> None:
        """End it."""
        self._comparisons.stop(request.session_hash or "")
