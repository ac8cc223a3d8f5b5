"""Token Tree Chat: ``python app.py`` loads a model, serves the page on this machine, and opens it in the browser."""

from __future__ import annotations

import gc

gc.disable()  # what imports make stays, and looking for garbage among it takes a second

from ui.environment import ON_SPACE, ON_ZEROGPU, bypass, unusable

bypass()
if reason := unusable():
    raise SystemExit(f"Token Tree Chat: error: {reason}")

# isort: split
import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import uvicorn

from specdec.devices import leave_a_core
from specdec.engine import SpeculativeEngine
from specdec.errors import LoadError
from specdec.serving.asgi import App
from specdec.serving.bodies import Bodies
from specdec.serving.clients import Clients
from specdec.serving.hosts import EVERY_ADDRESS, LOCAL, AllowedHosts, Hosts
from specdec.serving.http import Api
from specdec.serving.service import Service
from specdec.target import UnsupportedModelError
from ui import zerogpu
from ui.middleware import Listeners, middleware
from ui.models import chat_engine
from ui.page import build
from ui.panel import to_html
from ui.stop import ENDING
from ui.theme import TITLE, launch_arguments
from ui.trace import TraceError, load_trace
from ui.visitors import PRIVATE, PUBLIC, Limits

gc.enable()

MAX_PENDING = 500
"""Events that wait or run at once, of all visitors together. Waiting takes no thread of Gradio's (`ui.stream`)."""


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names the default of an option where it is a value, and not merely that nothing is set."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class StartError(Exception):
    """The app cannot start; the message is one line for the user."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="A chat app whose engine is tree-speculative decoding, drawn live in the browser.",
        formatter_class=_Help,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        metavar="M",
        help="a hub id (Qwen/Qwen2.5-0.5B-Instruct), a local folder, or a .gguf file. Default: Qwen2.5-1.5B-Instruct on a CUDA "
        "GPU, otherwise the small embedded model, downloaded once",
    )
    model.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    model.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"), help="number format of the weights"
    )
    model.add_argument("--trust-remote-code", action="store_true", help="let a model from the hub run Python code of its own")
    page = parser.add_argument_group("page")
    page.add_argument(
        "--host", default=LOCAL[0], help="address to serve on; an address that is not local opens the page to the network"
    )
    page.add_argument("--port", type=int, default=7860, help="port to serve on")
    page.add_argument(
        "--auth",
        metavar="USER:PASSWORD",
        action="append",
        help="ask visitors for this name and password; may be repeated, and the first is the owner of a shared page, who may "
        "change its model and its memory",
    )
    page.add_argument(
        "--api-key",
        metavar="KEY",
        help="let programs that show this key use the OpenAI-compatible API (/v1); without it the API is there only for this "
        "machine, on a page without --auth",
    )
    page.add_argument("--no-page", action="store_true", help="serve the API alone")
    page.add_argument(
        "--public",
        action="store_true",
        help="others than the person at this machine can reach the page, through a tunnel or a proxy: visitors get the "
        "limits of an open --host",
    )
    page.add_argument(
        "--allow-host",
        metavar="NAME[:PORT]",
        action="append",
        default=[],
        help="another name under which browsers reach the page, such as that of a proxy; may be repeated",
    )
    page.add_argument(
        "--trusted-proxies",
        metavar="N",
        type=int,
        default=1 if ON_SPACE else 0,
        help="how many proxies of yours stand before the page: the last of them tells visitors apart",
    )
    model.add_argument(
        "--study",
        action="store_true",
        help="learn the model's vocabulary while idle (takes minutes, once per model) for better drafts",
    )
    page.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        help="remember across chats, in a file on this machine; a switch in the page turns it off. Default: only if the page "
        "is served to this machine alone",
    )
    page.add_argument(
        "--parallel",
        type=_parallel,
        metavar="N",
        help="replies that are written at once, in the same target passes; by default as many as pay and fit the memory",
    )
    page.add_argument("--trace", metavar="FILE", help="draw a saved reply as a page; needs no model and no server")
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
        if options.trusted_proxies < 0:
            raise StartError("--trusted-proxies takes a number of proxies, 0 or more.")
        if options.no_page and options.api_key is None and _is_public(options):
            raise StartError("--no-page on an address that is open to others needs --api-key KEY.")
        if not ON_SPACE:
            _check_port(options.host, options.port)
            if options.host not in LOCAL:
                _say(_exposure(options.host, options.port, auth is not None))
        # ZeroGPU gives weights to the GPU only from the main thread; elsewhere the service's thread does all the work
        service = Service()
        service.use(_engine(options) if ON_ZEROGPU else service.call(lambda: _engine(options)))
        if options.no_page:
            return _serve_api(service, options)
        with tempfile.TemporaryDirectory(prefix="token-tree-", ignore_cleanup_errors=True) as uploads:
            os.environ["GRADIO_TEMP_DIR"] = uploads
            listeners = Listeners()
            page = _page(service, options, listeners)
            gc.freeze()  # nor is there any among what stays from here on
            _say("ready" if ON_SPACE else f"ready at http://{_url_host(options.host)}:{options.port} (Ctrl+C ends it)")
            in_browser = not (options.no_browser or _is_public(options))
            page.launch(inbrowser=in_browser, auth=auth, prevent_thread_lock=True, **_serving(service, options, listeners))
            _wait(page)
            service.close()
            service.join(10)
    except (StartError, LoadError, UnsupportedModelError, TraceError) as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:  # before there was anything to serve
        ENDING.set()
        return 130
    return 0


def _page(service: Service, options: argparse.Namespace, listeners: Listeners) -> gr.Blocks:
    shared, auth = _is_public(options), _auth(options.auth)
    return build(
        service,
        study=options.study and not ON_SPACE,
        memory=_remembers(options),
        loading=None if ON_SPACE else _loading(options),
        limits=_limits(options),
        owner=auth[0][0] if auth and shared else None,
        shared=shared,
        listeners=listeners,
        parallel=options.parallel,
    )


def _wait(page: gr.Blocks) -> None:
    """Serve until interrupted; then every reply ends at its next step, and a second interrupt ends the program at once."""
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while page.is_running:
            time.sleep(0.1)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        ENDING.set()
        _say("ending")
    finally:
        page.close(verbose=False)
        signal.signal(signal.SIGTERM, terminate)


def _engine(options: argparse.Namespace) -> SpeculativeEngine:
    leave_a_core()
    if ON_ZEROGPU:
        return zerogpu.load(options.model, options.dtype, _progress())
    return chat_engine(options.model, progress=_progress(), **_loading(options))


def _draw_trace(file: Path, in_browser: bool) -> None:
    page = Path(tempfile.mkdtemp(prefix="token-tree-")) / f"{file.stem}.html"
    page.write_text(to_html(load_trace(file)), encoding="utf-8")
    _say(f"{file.name} was drawn to {page}")
    if in_browser:
        webbrowser.open(page.as_uri())


def _loading(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("device", "dtype", "trust_remote_code")}


def _is_public(options: argparse.Namespace) -> bool:
    """Whether others than the person at this machine may open the page."""
    return ON_SPACE or options.public or options.host not in LOCAL


def _limits(options: argparse.Namespace) -> Limits:
    return PUBLIC if _is_public(options) else PRIVATE


def _remembers(options: argparse.Namespace) -> bool:
    """Whether the page may remember across chats: not by itself where several people share it, and never on a Space."""
    return not ON_SPACE and (not _is_public(options) if options.memory is None else bool(options.memory))


def _serve_api(service: Service, options: argparse.Namespace) -> int:
    """Serve the HTTP API without the page, until interrupted; the exit code."""
    if options.parallel is None:
        service.later(lambda: service.line.widen(service.widest()))
    else:
        service.line.widen(options.parallel)
    limits = _limits(options)
    app: App = Bodies(Api(service, service.line, api_key=options.api_key).app(), limits.body_bytes)
    app = AllowedHosts(app, Hosts.served(options.host, options.port, options.allow_host))
    app = Clients(app, options.trusted_proxies, lambda: _say(_proxy_hint(_is_public(options))))
    _say(f"the API is ready at http://{_url_host(options.host)}:{options.port}/v1 (Ctrl+C ends it)")
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", proxy_headers=False)
    service.close()
    service.join(10)
    return 0


def _api_routes(service: Service, options: argparse.Namespace) -> list[Any]:
    """The routes of the HTTP API: beside a page for this machine alone, elsewhere for who has the key."""
    if ON_ZEROGPU or (options.api_key is None and (_is_public(options) or options.auth is not None)):
        return []
    return list(Api(service, service.line, api_key=options.api_key).router().routes)


def _serving(service: Service, options: argparse.Namespace, listeners: Listeners) -> dict[str, Any]:
    """Arguments of ``launch``; on a Space the platform decides where to listen, and under which names."""
    where = {} if ON_SPACE else {"server_name": _url_host(options.host), "server_port": options.port}
    os.environ["FORWARDED_ALLOW_IPS"] = ""  # of proxies `ui.middleware` takes care, and not uvicorn
    bypass("" if options.host in EVERY_ADDRESS else options.host)
    lifespan = middleware(
        listeners,
        _limits(options),
        hosts=None if ON_SPACE else Hosts.served(options.host, options.port, options.allow_host),
        trusted_proxies=options.trusted_proxies,
        uploads=_remembers(options) and (not _is_public(options) or options.auth is not None),
        hint=lambda: _say(_proxy_hint(_is_public(options))),
    )
    return {
        **launch_arguments(),
        **where,
        "run_history": False,
        "ssr_mode": False,
        "share": False,
        "pwa": True,
        "quiet": True,
        "max_threads": MAX_PENDING,
        "state_session_capacity": MAX_PENDING,
        "app_kwargs": {"lifespan": lifespan, "routes": _api_routes(service, options)},  # they come before Gradio's
        "max_file_size": "1mb" if _is_public(options) else "64mb",
    }


def _auth(values: Sequence[str] | None) -> list[tuple[str, str]] | None:
    """Who may log in, the owner first; None: nobody needs to."""
    if values is None:
        return None
    pairs = []
    for value in values:
        user, colon, password = value.partition(":")
        if not (user and colon and password):
            raise StartError("--auth takes USER:PASSWORD, both not empty.")
        pairs.append((user, password))
    return pairs


def _parallel(value: str) -> int:
    """A number of replies, at least one."""
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1 reply is written at once")
    return number


def _url_host(host: str) -> str:
    """As it stands in an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def _proxy_hint(public: bool) -> str:
    if public:
        return "hint: requests come through a proxy: --trusted-proxies 1 tells its visitors apart."
    return "hint: requests come through a proxy: if others can reach this page through it, add --public --trusted-proxies 1."


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
        if ENDING.is_set():
            raise StartError("stopped")
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
    demo = globals()["demo"] = build(
        Service(_engine(parser().parse_args([]))), limits=PUBLIC if ON_SPACE else PRIVATE, shared=ON_SPACE
    )
    return demo


if __name__ == "__main__":
    sys.exit(main())
