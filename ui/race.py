"""The Compare tab: fields to set a comparison up, and the race that replays it (``assets/race.js``)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from html import escape
from typing import Any

import gradio as gr

from ui import frontend
from ui.compare import LANES, Comparisons
from ui.prompts import EXAMPLES
from ui.pump import apart
from ui.settings import Settings

SCRIPT = frontend.ASSETS / "race.js"
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
                head=f'{frontend.head()}<script src="{escape(frontend.address(SCRIPT))}"></script>',
                apply_default_css=False,
                elem_id="race",
            )
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        for button, example in ready:
            button.click(lambda text=example.prompt: text, outputs=prompt, queue=False, **quiet)
        run.click(
            apart(self.run, listening),
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
