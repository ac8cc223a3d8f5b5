"""Token Tree Chat: ``python app.py`` loads a model, serves the page on this machine, and opens it in the browser."""

from __future__ import annotations

import gc

gc.disable()  # what imports make stays, and looking for garbage among it takes a second

from ui.space import ON_SPACE, ON_ZEROGPU

# isort: split
import argparse
import logging
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from specdec.engine import SpeculativeEngine
from specdec.errors import LoadError
from specdec.target import UnsupportedModelError
from ui import zerogpu
from ui.limits import PRIVATE, PUBLIC
from ui.look import TITLE, look
from ui.models import chat_engine
from ui.page import build
from ui.trace import TraceError, load_trace, to_html
from ui.turns import ENGINE_THREAD, leave_a_core

gc.enable()

LOCAL = ("127.0.0.1", "localhost", "::1")


class StartError(Exception):
    """The app cannot start; the message is one line for the user."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="A chat app whose engine is tree-speculative decoding, drawn live in the browser.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="M",
        help="a hub id (Qwen/Qwen2.5-0.5B-Instruct), a local folder, or a .gguf file; without it: Qwen2.5-1.5B-Instruct on a "
        "CUDA GPU, else the small embedded model, fetched once",
    )
    model.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    model.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="number format of the weights"
    )
    model.add_argument("--trust-remote-code", action="store_true", help="let a model from the hub run Python code of its own")
    page = parser.add_argument_group("page")
    page.add_argument("--host", default=LOCAL[0], help="address to serve on; any but a local one opens it to the network")
    page.add_argument("--port", type=int, default=7860, help="port to serve on")
    page.add_argument("--auth", metavar="USER:PASSWORD", help="ask visitors for this name and password")
    model.add_argument(
        "--study",
        action="store_true",
        help="study the model's vocabulary while idle (some minutes, once per model): faster drafts",
    )
    page.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        help="remember across chats, in a file on this machine, with a switch in the page; by default only where the page "
        "is served to this machine alone",
    )
    page.add_argument("--trace", metavar="FILE", help="draw a saved reply instead, as a page that needs no model and no server")
    page.add_argument("--no-browser", action="store_true", help="do not open the page in the browser")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the app until it is interrupted; the exit code."""
    options = parser().parse_args(arguments)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        if options.trace is not None:
            _draw_trace(Path(options.trace), not options.no_browser)
            return 0
        auth = _auth(options.auth)
        if not ON_SPACE:
            _check_port(options.host, options.port)
            if options.host not in LOCAL:
                _say(_exposure(options.host, options.port, auth is not None))
        # ZeroGPU gives weights to the GPU only from the main thread; elsewhere one thread does all the work (`ui.turns`)
        engine = _engine(options) if ON_ZEROGPU else ENGINE_THREAD.submit(_engine, options).result()
        public = _is_public(options)
        page = build(
            engine,
            study=options.study and not ON_SPACE,
            memory=_remembers(options),
            loading=None if public else _loading(options),
            limits=PUBLIC if public else PRIVATE,
        )
        if not ON_ZEROGPU:
            ENGINE_THREAD.submit(getattr, engine, "pass_cost")  # measured while the page opens; a reply waits for it
        del engine  # the page may exchange it for another
        gc.freeze()  # nor is there any among what stays from here on
        _say("ready" if ON_SPACE else f"ready at http://{options.host}:{options.port} (Ctrl+C ends it)")
        page.launch(inbrowser=not (options.no_browser or public), auth=auth, **_serving(options))
    except (StartError, LoadError, UnsupportedModelError, TraceError) as error:
        _say(f"error: {error}")
        return 1
    return 0


def _engine(options: argparse.Namespace) -> SpeculativeEngine:
    leave_a_core()
    if ON_ZEROGPU:
        return zerogpu.load(options.model, options.dtype, _progress())
    return chat_engine(options.model, progress=_progress(), **_loading(options))


def _draw_trace(file: Path, in_browser: bool) -> None:
    page = Path(tempfile.mkdtemp(prefix="token-tree-")) / f"{file.stem}.html"
    page.write_text(to_html(load_trace(file)), encoding="utf-8")
    _say(f"{file.name} is drawn in {page}")
    if in_browser:
        webbrowser.open(page.as_uri())


def _loading(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("device", "dtype", "trust_remote_code")}


def _is_public(options: argparse.Namespace) -> bool:
    """Whether others than the person at this machine may open the page."""
    return ON_SPACE or options.host not in LOCAL


def _remembers(options: argparse.Namespace) -> bool:
    """Whether the page may remember across chats: not by itself where several people share it, and never on a Space."""
    return not ON_SPACE and (not _is_public(options) if options.memory is None else bool(options.memory))


def _serving(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``launch``; on a Space the platform decides where to listen."""
    where = {} if ON_SPACE else {"server_name": options.host, "server_port": options.port}
    return {
        **look(),
        **where,
        "run_history": False,
        "ssr_mode": False,
        "share": False,
        "pwa": True,
        "quiet": True,
        "max_file_size": "1mb" if _is_public(options) else "64mb",
    }


def _auth(value: str | None) -> tuple[str, str] | None:
    if value is None:
        return None
    user, colon, password = value.partition(":")
    if not (user and colon and password):
        raise StartError("--auth takes USER:PASSWORD, both not empty.")
    return user, password


def _check_port(host: str, port: int) -> None:
    """Notice a taken port before a model is loaded for nothing."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(address[0], address[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address[4][0], port))
    except (OSError, OverflowError) as error:
        raise StartError(
            f"cannot serve on {host} port {port} ({_reason(error)}): choose another with --host or --port."
        ) from error


def _exposure(host: str, port: int, protected: bool) -> str:
    who = "anyone who can reach it and knows the password" if protected else "anyone who can reach it"
    advice = "" if protected else " Add --auth USER:PASSWORD to ask for a password."
    return (
        f"warning: {host}:{port} is open to the network: {who} can chat with the model on this machine, over a connection "
        f"that is not encrypted. Files and other people's chats are not exposed.{advice}"
    )


def _progress() -> Any:
    said: set[str] = set()

    def report(text: str, fraction: float | None) -> None:
        del fraction  # the bar on stderr shows it
        if text not in said:
            said.add(text)
            _say(text)

    return report


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def _say(line: str) -> None:
    print(f"{TITLE}: {line}", file=sys.stderr, flush=True)


def __getattr__(name: str) -> gr.Blocks:
    """``app.demo`` for whoever imports this module, such as ``gradio app.py``: built when first asked for."""
    if name != "demo":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    demo = globals()["demo"] = build(_engine(parser().parse_args([])), limits=PUBLIC if ON_SPACE else PRIVATE)
    return demo


if __name__ == "__main__":
    sys.exit(main())
