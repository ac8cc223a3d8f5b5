"""The live panel: draws how a reply is speculated, step by step, while it streams and afterwards.

Create it once, then yield strings to it::

    panel = live_panel()                              # a gr.HTML; shows the recorded example until told otherwise

    def respond(message):                             # an event handler with outputs=[..., panel], show_progress="hidden"
        feed = PanelFeed(model, settings, prompt, engine.token_texts)
        yield feed.start()                            # before the engine starts: "Reading the prompt ..."
        ...
        yield feed.steps(new_steps)                   # all Steps since the last yield, at most 20-30 times a second
        ...
        yield feed.end()                              # always the last: finished, stopped or cut off (``reason``)
        # on failure instead of end():
        yield feed.error("one line for the reader")

``model`` and ``settings`` are flat dicts for display, ``prompt`` the chat messages. ``feed.note(text)`` shows a line above
the tree until the next step ("waiting: 1 reply is ahead ..."); a Step's own ``note`` is told in the sentence about it.
``feed.recorder.trace()`` is the reply as a trace, ``feed.recorder.stats`` its figures. Besides a feed's strings the panel
takes `replay(trace, label)`, `complaint(line)` and "" (back to the recorded example).

Payloads may be coalesced on their way (the browser sees only the latest value) or come twice. So every message carries a
sequence number and travels in several consecutive payloads, and the last payload of a reply brings all its steps. Of a long
reply it does not; a page that lacks some of its steps asks for them by the component's ``select`` event, to be answered with
``feed.end(reason, whole=True)``.

For other pages: `head()` loads the scripts; ``new specdec.TreeView(host)`` draws a record of a trace into any
element inside one of class "specdec" (``.show(record, beat)``); ``new specdec.Panel(host)`` is the whole panel
(``.receive(payload)``).
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gradio as gr
import plotly

from specdec.step import Step
from ui.trace import Json, Recorder, TokenText, TraceError, load_trace

ASSETS = Path(__file__).parent / "assets"
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
STYLE = ASSETS / "panel.css"
PAGE = ASSETS / "page.html"
EXAMPLE = ASSETS / "demo-trace.json"
_NOUNS = (
    *("theme", "words", "history", "feed", "layout", "zoom", "details", "tree"),
    *("playback", "scrubber", "strip", "charts", "export", "controls", "slim", "panel"),
)
SCRIPTS = tuple(ASSETS / f"{noun}.js" for noun in _NOUNS)
"""In loading order: plain scripts, each adding its noun to the page's `specdec` object."""
REPEATS = 2
"""In how many consecutive payloads a message travels."""
MAX_WHOLE = 1_000_000
"""Characters of JSON up to which the last payload brings the whole reply unasked."""

_TEMPLATE = '<div class="specdec-frame"><div class="specdec-host">The live panel needs JavaScript.</div></div>'
_ON_LOAD = """
const host = element.querySelector('.specdec-host');
const panel = new specdec.Panel(host, {
    assets: props.assets, openTrace: (text) => server.open_trace(text), askAgain: () => trigger('select'), slim: props.slim });
host.panel = panel;
watch('value', () => panel.receive(props.value));
panel.receive(props.value);
"""


def live_panel(elem_id: str = "specdec-panel", opener: Callable[[str], str] | None = None, slim: str | None = None) -> gr.HTML:
    """The panel as a component; its value is a payload string.

    ``opener`` stands in for `open_trace`, under the same name. ``slim`` selects an element of class "specdec" elsewhere on the
    page that shows the newest step in one line.
    """
    serve_assets()
    return gr.HTML(
        value="",
        html_template=_TEMPLATE,
        js_on_load=_ON_LOAD,
        head=head(),
        apply_default_css=False,
        elem_id=elem_id,
        server_functions=[opener or open_trace],
        assets=addresses(),
        slim=slim,
    )


@cache
def serve_assets() -> None:
    """Let Gradio serve the files above, and nothing else."""
    gr.set_static_paths([*SCRIPTS, STYLE, PAGE, EXAMPLE, PLOTLY])


def address(file: Path) -> str:
    """The address of a served file; it changes with the file, so that no browser keeps an old one."""
    return f"gradio_api/file={quote(file.resolve().as_posix())}?v={file.stat().st_mtime_ns:x}"


def addresses() -> dict[str, object]:
    """What the panel fetches by itself: for its exports, its charts, and the recorded example."""
    return {
        "style": address(STYLE),
        "scripts": [address(PLOTLY), *map(address, SCRIPTS)],
        "page": address(PAGE),
        "plotly": address(PLOTLY),
        "example": address(EXAMPLE) if EXAMPLE.exists() else None,
    }


def head() -> str:
    """Stylesheet and scripts as a component's ``head``; Gradio loads each once, in order, before ``js_on_load``."""
    link = f'<link rel="stylesheet" href="{escape(address(STYLE))}">'
    return link + "".join(f'<script src="{escape(address(script))}"></script>' for script in SCRIPTS)


class PanelFeed:
    """One reply on its way to the panel: each method returns the payload to yield."""

    def __init__(
        self, model: Mapping[str, Any], settings: Mapping[str, Any], prompt: Sequence[Mapping[str, str]], token_text: TokenText
    ) -> None:
        self.recorder = Recorder(model, settings, prompt, token_text)
        self._run = secrets.token_hex(8)
        self._sent = 0
        self._recent: deque[str] = deque(maxlen=REPEATS)
        self._size = 0

    @property
    def is_long(self) -> bool:
        """Whether the end brings the steps along only when asked."""
        return self._size > MAX_WHOLE

    def start(self, model: Mapping[str, Any] | None = None) -> str:
        """The run begins: model, settings and prompt; ``model``: if it is another than at first."""
        if model is not None:
            self.recorder.header["model"] = dict(model)
        return self._payload({"kind": "start", **self.recorder.header})

    def steps(self, steps: Sequence[Step]) -> str:
        """New steps, all that came since the last payload."""
        return self._payload({"kind": "steps", "steps": [self.recorder.add(step) for step in steps]})

    def note(self, text: str) -> str:
        """A line to show above the tree until the next step; "" takes it away."""
        return self._payload({"kind": "note", "text": text})

    def error(self, text: str, whole: bool = False) -> str:
        """The reply failed; ``text`` is one line for the reader. What was drawn stays; ``whole`` as in `end`."""
        return self._last({"kind": "error", "text": text}, whole)

    def end(self, reason: str | None = None, whole: bool = False) -> str:
        """The reply is over: by itself, at a limit, or stopped by the user; ``reason`` where the last step does not tell.

        ``whole``: with all its steps, also where it is long.
        """
        records = self.recorder.records
        reason = reason or (records[-1]["finish_reason"] if records else None)
        return self._last({"kind": "end", "finish_reason": reason or "cancelled"}, whole)

    def _last(self, message: Json, whole: bool) -> str:
        steps = {"steps": self.recorder.records} if whole or not self.is_long else {}
        return self._payload({**message, **steps})

    def _payload(self, message: Json) -> str:
        text = _compact({"seq": self._sent, **message})
        self._sent += 1
        self._size += len(text)
        self._recent.append(text)
        return f'{{"run":"{self._run}","messages":[{",".join(self._recent)}]}}'


def replay(trace: Json, label: str = "replay") -> str:
    """A payload that shows a whole trace, labelled as what it is."""
    return _compact({"trace": trace, "label": label, "nonce": secrets.token_hex(4)})


def complaint(line: str) -> str:
    """A payload that shows one line and leaves the rest as it is."""
    return _compact({"error": line, "nonce": secrets.token_hex(4)})


def open_trace(text: str) -> str:
    """The text of a file that the user opened, as a payload; called from the panel's menu."""
    try:
        return replay(load_trace(str(text)))
    except TraceError as error:
        return complaint(f"This file cannot be opened: {error}")


def to_html(trace: Json) -> str:
    """A page that replays the trace: opens from disk, needs no network."""
    scripts = (path.read_text(encoding="utf-8") for path in (PLOTLY, *SCRIPTS))
    parts = {
        "style": STYLE.read_text(encoding="utf-8"),
        "scripts": "\n".join(scripts).replace("</script", "<\\/script"),
        "trace": json.dumps(trace).replace("<", "\\u003c"),
    }
    page = PAGE.read_text(encoding="utf-8")
    for name, text in parts.items():
        before, after = page.split(f"<!--{name}-->")
        page = before + text + after
    return page


def _compact(value: Json) -> str:
    # ASCII: half a surrogate pair must not break the transport. No NaN: the browser could not read it.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
