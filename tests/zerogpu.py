"""A ZeroGPU Space in miniature: the real `spaces` package, its device server played here, and CUDA played by the CPU.

Run as a script with the folder of a model, it chats there through the page's handlers and through a served page, and prints
as JSON what came of it. In the parent process every use of CUDA raises, as there; only a forked child gets the weights.
"""

from __future__ import annotations

import base64
import functools
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import psutil

QUESTION, SECOND = "the cat sat on the mat", "and then the dog"
VALUES = ("tree", "auto", 0, 1, 0, 60, "")
LONG = "one two three four five six seven eight nine ten " * 3
READS = 8
"""Tokens per chunk of the prompt."""
TOKEN = f"a.{base64.urlsafe_b64encode(b'{}').decode()}.c"

calls: list[tuple[str, dict[str, str]]] = []
warm = False
"""Whether the platform lends a GPU on which the last child still sits."""


class DeviceServer(BaseHTTPRequestHandler):
    """Lends a GPU to whoever asks."""

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        calls.append((url.path.strip("/"), dict(parse_qsl(url.query))))
        lent = {"idle": warm, "nvidiaIndex": 0, "nvidiaUUID": "none", "allowToken": f"token {len(calls)}"}
        body = json.dumps(lent).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def enter() -> None:
    """Be a ZeroGPU Space from now on."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), DeviceServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.NamedTemporaryFile("w", delete=False) as cgroup:
        cgroup.write("0::/space\n")
    os.environ |= {
        "SPACE_ID": "someone/space",
        "SPACES_ZERO_GPU": "true",
        "SPACES_ZERO_DEVICE_API_URL": f"http://127.0.0.1:{server.server_port}",
        "ZEROGPU_PROC_SELF_CGROUP_PATH": cgroup.name,
        "OMP_NUM_THREADS": "1",
    }
    import torch

    torch.version.cuda = "12.8"  # what a CPU build of torch lacks and `spaces` looks at
    torch._C._cuda_init = None
    torch.cuda._is_in_bad_fork = bool
    import spaces.zero.torch as zero
    from spaces.zero.torch import patching

    def move(callback: Any = None) -> None:
        del callback
        for weight, original in patching.cuda_aliases.items():
            weight.data = original

    zero.pack = lambda: 0
    zero.init = lambda uuid: None
    zero.move = move


def main(folder: str) -> dict[str, Any]:
    """Everything that is to be looked at, by name."""
    global warm
    enter()
    import gradio as gr
    from browser import served
    from gradio.context import LocalContext
    from gradio_client import Client

    import app  # first of all that is ours, as on the Space
    import specdec.packing
    import specdec.scheduler
    import specdec.target
    from specdec.serving.service import Service
    from ui.handlers import ChatHandlers
    from ui.page import build
    from ui.settings import Settings
    from ui.state import Message
    from ui.visitors import PUBLIC

    specdec.target.PREFILL_CHUNK = specdec.scheduler.PREFILL_CHUNK = READS
    specdec.packing._is_faster = lambda layer: True
    engine = app._engine(app.parser().parse_args(["--model", folder, "--dtype", "float32"]))
    passes, delay, doomed = multiprocessing.Value("i", 0), multiprocessing.Value("d", 0.0), multiprocessing.Value("b", 0)
    forward = type(engine.model).forward

    @functools.wraps(forward)
    def watched(*arguments: Any, **named: Any) -> Any:
        if doomed.value:
            os._exit(1)
        time.sleep(delay.value)
        with passes.get_lock():
            passes.value += 1
        return forward(*arguments, **named)

    type(engine.model).forward = watched
    service = Service(engine)
    handlers = ChatHandlers(service, PUBLIC)
    page = build(service, limits=PUBLIC)
    header = next(block.value for block in page.blocks.values() if getattr(block, "elem_id", None) == "top")
    packed = len(engine.target._packed._packed)
    found: dict[str, Any] = {"device in the parent": handlers.model_facts["device"], "packed in the parent": packed}
    found["header"] = header

    def ask(tab: str, text: str, values: tuple[Any, ...] = VALUES, until: Callable[[Message], bool] | None = None) -> Message:
        request = gr.Request(session_hash=tab)
        with closing(handlers.send(text, request, *values)) as frames:
            for _ in frames:
                reply = handlers.tabs.chat(tab).messages[-1]
                if until is not None and until(reply):
                    until = None
                    handlers.stop(request)
                    found["passes at stop"] = passes.value
        return handlers.tabs.chat(tab).messages[-1]

    def told(reply: Message) -> dict[str, Any]:
        return {"state": reply.state, "text": reply.text, "notices": reply.notices, "footer": reply.footer}

    class Headers(dict[str, str]):
        """Headers as a request has them."""

    LocalContext.request.set(SimpleNamespace(headers=Headers({"x-ip-token": TOKEN})))
    found["chat"] = [told(ask("a", QUESTION)), told(ask("a", SECOND))]
    found["conversation"] = handlers.tabs.chat("a").conversation
    list(handlers.audit(gr.Request(session_hash="a")))
    found["audit"] = handlers.tabs.chat("a").messages[-1].notices[-1]
    *_, race = handlers.comparisons.run("a", QUESTION, ["plain", "linear", "tree"], Settings.read(*VALUES))
    found["agreement"] = json.loads(race)["agreement"]
    found["wrong"] = told(ask("b", QUESTION, ("guess", *VALUES[1:])))
    ask("c", QUESTION, (*VALUES[:5], 1000, ""))

    delay.value = 0.05
    stopped = ask("d", QUESTION, until=lambda reply: bool(reply.text))
    time.sleep(0.5)
    found["stopped"] = {**told(stopped), "passes after": passes.value - found["passes at stop"]}
    before = passes.value
    stopped = ask("e", LONG, until=lambda reply: reply.footer.startswith("reading"))
    time.sleep(0.5)
    found["stopped reading"] = {**told(stopped), "passes": passes.value - before}
    delay.value = 0

    doomed.value = 1
    found["died"] = told(ask("f", QUESTION))
    doomed.value = 0
    found["after death"] = told(ask("f", SECOND))

    warm = True
    children = [name for name, _ in calls].count("allow")
    found["warm"] = [told(ask("g", QUESTION)), told(ask("h", SECOND))]
    found["warm children"] = [name for name, _ in calls].count("allow") - children
    warm = False

    with served(page) as url, closing(Client(url, verbose=False)) as one, closing(Client(url, verbose=False)) as other:
        jobs = [client.submit(QUESTION, max_tokens=60, api_name="/chat") for client in (one, other)]
        found["served"] = [job.result(timeout=120) for job in jobs]
        found["served"].append(one.predict(SECOND, max_tokens=60, api_name="/chat"))
    found["calls"] = calls
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(main(sys.argv[1])), flush=True)
    finally:
        for child in psutil.Process().children(recursive=True):  # they wait for work for ever, and keep our output open
            child.kill()
    os._exit(0)
