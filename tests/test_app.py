"""The command line: it starts, or it says in one line why not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from toys import ARCHITECTURES, tiny_model, tokenizer

import app
from specdec.folders import cache_folder
from specdec.serving.service import Service
from specdec.speculators import _compiled
from ui.middleware import Listeners

ROOT = Path(app.__file__).parent


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that an error is, without the bars of what was loaded before."""
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(app.TITLE) and "error: " in line]
    assert len(lines) == 1
    return lines[0].split("error: ")[1]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert app.main([*arguments, "--no-browser"]) == 1
    return one_line(capsys)


@pytest.fixture
def free_port(unused_tcp_port: int) -> str:
    return str(unused_tcp_port)


@pytest.mark.parametrize("auth", ["", "alice", "alice:", ":secret"])
def test_a_malformed_auth_names_its_form(capsys: pytest.CaptureFixture[str], auth: str) -> None:
    assert "USER:PASSWORD" in refusal(capsys, "--auth", auth)


def test_a_taken_port_names_the_option_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        line = refusal(capsys, "--port", str(listener.getsockname()[1]), "--model", "/nowhere")
    assert "--port" in line
    assert "in use" in line


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [("--model", "/no/such/folder", "/no/such/folder"), ("--device", "toaster", "toaster"), ("--port", "99999", "99999")],
)
def test_an_impossible_option_is_named(
    capsys: pytest.CaptureFixture[str], free_port: str, option: str, value: str, named: str
) -> None:
    assert named in refusal(capsys, "--port", free_port, option, value)


def test_a_model_without_chat_template_names_the_remedy(
    capsys: pytest.CaptureFixture[str], free_port: str, tmp_path: Path
) -> None:
    tiny_model(ARCHITECTURES["gpt2"]).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    line = refusal(capsys, "--port", free_port, "--model", str(tmp_path), "--device", "cpu")
    assert "chat template" in line
    assert "--model" in line


def test_a_model_that_cannot_take_a_tree_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], free_port: str, tmp_path: Path
) -> None:
    config = transformers.MistralConfig(**(ARCHITECTURES["mistral"].to_dict() | {"sliding_window": 16}))
    tiny_model(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert "Mistral" in refusal(capsys, "--port", free_port, "--model", str(tmp_path), "--device", "cpu")


def test_a_saved_reply_is_drawn_without_a_model_and_anything_else_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(app, "_engine", lambda options: pytest.fail("a model was loaded"))
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert app.main(["--trace", str(ROOT / "ui/assets/demo-trace.json")]) == 0
    assert "demo-trace.json was drawn to" in capsys.readouterr().err
    page = Path(opened[0].removeprefix("file://"))
    assert '"format": "specdec-trace"' in page.read_text(encoding="utf-8")
    (tmp_path / "odd.json").write_text("{}")
    assert "not a trace" in refusal(capsys, "--trace", str(tmp_path / "odd.json"))
    assert "missing.json: cannot be read" in refusal(capsys, "--trace", str(tmp_path / "missing.json"))


def test_an_open_host_says_what_it_exposes(capsys: pytest.CaptureFixture[str], free_port: str) -> None:
    app.main(["--host", "0.0.0.0", "--port", free_port, "--model", "/nowhere", "--no-browser"])
    warning = next(line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert "anyone who can reach it" in warning
    assert "--auth" in warning


def test_it_never_shares_and_keeps_no_run_history() -> None:
    serving = app._serving(Service(), app.parser().parse_args([]), Listeners())
    assert (serving["share"], serving["run_history"], serving["server_name"]) == (False, False, "127.0.0.1")


STARTED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started deaf to it
sys.path[:0] = [{root!r}, {tests!r}]
import app
from toys import ARCHITECTURES, tiny_model, tokenizer
from specdec.engine import SpeculativeEngine
config = type(ARCHITECTURES["llama"])(**{{**ARCHITECTURES["llama"].to_dict(), "max_position_embeddings": 8192}})
engine = SpeculativeEngine(tiny_model(config), tokenizer())
assert engine.pass_cost
run = engine.target.run
def slowly(*arguments):
    time.sleep(0.2)
    return run(*arguments)
engine.target.run = slowly
app._engine = lambda options: engine
sys.exit(app.main([*sys.argv[1:], "--no-browser"]))
"""
"""The app around a toy model that would write for ten minutes."""


@contextmanager
def started(port: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    if "SPECDEC_CACHE" in environment:
        Path(environment["SPECDEC_CACHE"], "compiled").symlink_to(cache_folder() / "compiled")
    script = STARTED.format(root=str(ROOT), tests=str(ROOT / "tests"))
    process = subprocess.Popen(
        [sys.executable, "-c", script, "--port", port, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until_ready(process: subprocess.Popen[str]) -> str:
    """What the app says up to the line that it is ready."""
    assert process.stderr is not None
    said = ""
    while "ready at" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said


def until_answered(url: str, **options: Any) -> httpx.Response:
    """The page, once it is served; ready is said just before."""
    end = time.monotonic() + 60
    while True:
        try:
            return httpx.get(url, trust_env=False, **options)
        except httpx.ConnectError:
            assert time.monotonic() < end
            time.sleep(0.1)


@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_ends_a_long_reply_the_app_and_nothing_else(free_port: str, tmp_path: Path, interrupts: int) -> None:
    with started(free_port, SPECDEC_CACHE=str(tmp_path)) as process:
        until_ready(process)
        address = f"http://127.0.0.1:{free_port}"
        until_answered(address)
        body = {"data": ["hello", "", 4096, 0, 1, 0, "tree", "auto"]}
        event = httpx.post(f"{address}/gradio_api/call/chat", json=body, trust_env=False).json()["event_id"]
        with httpx.stream("GET", f"{address}/gradio_api/call/chat/{event}", trust_env=False, timeout=60) as stream:
            next(line for line in stream.iter_lines() if line.startswith("event: generating"))
            for _ in range(interrupts):
                process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
    assert process.returncode in ((0,) if interrupts == 1 else (0, -signal.SIGINT))
    assert "Traceback" not in said
    assert "terminate called" not in said
    if interrupts == 1:
        assert list((tmp_path / "memory").glob("*.npz")), "the memory is saved"


def test_an_ipv6_host_is_served(free_port: str, tmp_path: Path) -> None:
    with started(free_port, "--host", "::1", SPECDEC_CACHE=str(tmp_path)) as process:
        assert f"http://[::1]:{free_port}" in until_ready(process)
        assert until_answered(f"http://[::1]:{free_port}").status_code == 200
        assert until_answered(f"http://[::1]:{free_port}", headers={"Origin": "http://evil.example"}).status_code == 403


def test_a_proxy_does_not_stand_between_the_app_and_itself(free_port: str, tmp_path: Path) -> None:
    nowhere = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    with started(free_port, SPECDEC_CACHE=str(tmp_path), no_proxy="example.org", NO_PROXY="", **nowhere) as process:
        until_ready(process)
        assert until_answered(f"http://127.0.0.1:{free_port}").status_code == 200
        assert process.poll() is None


@pytest.mark.parametrize("proxy", ["socks4://127.0.0.1:9", "nonsense://127.0.0.1:9"])
def test_a_proxy_that_cannot_be_used_is_one_line_before_a_model_is_loaded(proxy: str) -> None:
    environment = {**os.environ, "ALL_PROXY": proxy, "all_proxy": proxy}
    done = subprocess.run([sys.executable, "app.py"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert (done.stderr.count("\n"), "error: the proxy" in done.stderr, "Traceback" in done.stderr) == (1, True, False)


@pytest.mark.parametrize("folder", ["~nobody-of-this-name/cache", "x" * 5000, "closed/cache"])
def test_an_impossible_cache_folder_is_no_error(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "closed").write_text("no folder")
    monkeypatch.setenv("SPECDEC_CACHE", folder)
    assert (_compiled._folder() is None) is (not folder.startswith("~")), "where none can be made, nothing is kept"


def test_machine_code_is_kept_only_where_nobody_else_can_put_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    folder = _compiled._folder()
    assert folder is not None
    Path(folder).chmod(0o777)
    assert _compiled._folder() == folder
    assert Path(folder).stat().st_mode & 0o077 == 0, "it is the user's own: closed to others"
    (tmp_path / "cache").chmod(0o777)
    assert _compiled._folder() is None
    (tmp_path / "cache").chmod(0o1777)
    assert _compiled._folder() == folder, "others cannot rename what is in a sticky folder"
    monkeypatch.setattr(os, "getuid", lambda: 2**31)
    assert _compiled._folder() is None
    assert "could be changed by others" in caplog.text
    monkeypatch.setattr(_compiled, "_FOLDER", None)
    assert _compiled.compiled(abs_of)(-2) == 2


def abs_of(number: int) -> int:
    return number if number > 0 else -number


@pytest.mark.parametrize("model", ["~nobody-of-this-name/model", "x" * 5000, "/" + "x/" * 5000])
def test_a_path_that_is_none_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], free_port: str, model: str) -> None:
    assert refusal(capsys, "--port", free_port, "--model", model)


def test_a_negative_number_of_proxies_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--trusted-proxies" in refusal(capsys, "--trusted-proxies", "-1")


def test_help_names_every_option_and_needs_no_model() -> None:
    done = subprocess.run([sys.executable, "app.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for option in ("--model", "--device", "--dtype", "--host", "--port", "--auth", "--no-browser", "--trust-remote-code"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "offered"),
    [
        ([], True),
        (["--auth", "me:secret"], False),
        (["--public"], False),
        (["--host", "0.0.0.0"], False),
        (["--host", "0.0.0.0", "--api-key", "k"], True),
        (["--auth", "me:secret", "--api-key", "k"], True),
    ],
)
def test_the_api_is_there_for_this_machine_and_elsewhere_for_who_has_the_key(arguments: list[str], offered: bool) -> None:
    routes = app._api_routes(Service(), app.parser().parse_args(arguments))
    assert bool(routes) is offered


def test_the_api_alone_is_not_opened_to_others_without_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--no-page", "--public"]) == 1
    assert "--no-page on an address that is open to others needs --api-key KEY" in capsys.readouterr().err


def test_the_api_alone_answers_and_ends_with_the_program(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with started(port, "--no-page") as process:
        said = ""
        assert process.stderr is not None
        while "the API is ready at" not in said:
            said = process.stderr.readline()
            assert said
        address = f"http://127.0.0.1:{port}"
        wait = time.monotonic() + 60
        while True:
            try:
                assert httpx.get(f"{address}/health").status_code == 200
                break
            except httpx.ConnectError:
                assert time.monotonic() < wait
        assert httpx.get(f"{address}/v1/models").json()["object"] == "list"
        assert httpx.get(f"{address}/v1/models", headers={"Origin": "http://elsewhere.example"}).status_code == 403
        assert httpx.get(f"{address}/").status_code == 404
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
