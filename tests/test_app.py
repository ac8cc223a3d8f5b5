"""The command line: it starts, or it says in one line why not."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from toys import ARCHITECTURES, tiny_model, tokenizer

import app
from ui.gate import Listeners

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
    assert "demo-trace.json is drawn in" in capsys.readouterr().err
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
    serving = app._serving(app.parser().parse_args([]), Listeners())
    assert (serving["share"], serving["run_history"], serving["server_name"]) == (False, False, "127.0.0.1")


def test_help_names_every_option_and_needs_no_model() -> None:
    done = subprocess.run([sys.executable, "app.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for option in ("--model", "--device", "--dtype", "--host", "--port", "--auth", "--no-browser", "--trust-remote-code"):
        assert option in done.stdout
