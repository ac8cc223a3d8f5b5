"""The README keeps its word: every command and every line of code in it runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from specdec.benchmark import __main__ as benchmark
from specdec.benchmark import cost
from specdec.engine import SpeculativeEngine

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def engine() -> SpeculativeEngine:
    """What ``SpeculativeEngine()`` gives: loaded once for all commands and examples."""
    return SpeculativeEngine()


def test_the_python_examples_run(
    engine: SpeculativeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specdec.engine.SpeculativeEngine", lambda: engine)
    for code in blocks("python"):
        exec(code, {})
        assert "Paris" in capsys.readouterr().out


def test_the_run_command_serves_the_page(unused_tcp_port: int) -> None:
    command = next(line for block in blocks("bash") for line in block.splitlines() if "app.py" in line)
    assert command.startswith("python -m venv .venv && .venv/bin/pip install -r requirements.txt && ")
    launch = command.rsplit(" && ", 1)[1].split()
    assert launch == [".venv/bin/python", "app.py"]
    server = subprocess.Popen([sys.executable, "app.py", "--no-browser", "--port", str(unused_tcp_port)], cwd=ROOT)
    try:
        assert "Token Tree Chat" in wait_for(f"http://127.0.0.1:{unused_tcp_port}/", server)
        (example,) = (line for block in blocks("bash") for line in block.splitlines() if line.startswith("curl "))
        _, address, _, header, _, body = shlex.split(example)
        name, value = header.split(": ")
        asked = urllib.request.Request(address.replace("7860", str(unused_tcp_port)), body.encode(), {name: value})
        with urllib.request.urlopen(asked) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"]
    finally:
        server.terminate()
        server.wait(20)


def wait_for(address: str, server: subprocess.Popen[bytes], seconds: float = 120) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(address) as page:
                return str(page.read().decode())
        except urllib.error.URLError:
            time.sleep(0.5)
    raise AssertionError(f"the server did not come up (exit code {server.poll()})")


def test_the_benchmark_commands_run(
    engine: SpeculativeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In their order: one may need what another wrote."""
    monkeypatch.setattr(benchmark, "SpeculativeEngine", lambda *_, **__: engine)
    for name, less in {"COPIED": 1 << 20, "ROUNDS": 1, "PASSES": 1, "STEPS": 4}.items():
        monkeypatch.setattr(cost, name, less)
    monkeypatch.chdir(ROOT)
    commands = [line for block in blocks("bash") for line in block.splitlines() if "specdec.benchmark" in line]
    assert commands
    for command in commands:
        program, *arguments = command.split()
        assert program == ".venv/bin/python"
        assert arguments[:2] == ["-m", "specdec.benchmark"]
        arguments = [re.sub(r"^\w+\.(json|html|npz|npy)$", rf"{tmp_path}/\g<0>", part) for part in arguments[2:]]
        if "cuda" in arguments and not torch.cuda.is_available():
            options = benchmark.parser().parse_args(arguments)
            benchmark.check(options)
            assert (ROOT / options.questions).is_file()
            continue
        small = ["--limit", "1", "--runs", "1", "--max-new-tokens", "4", "--max-prompt-tokens", "60"]
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, *small])
        assert benchmark.main() == 0
        row = "| warm" if "--replay" in arguments else "| plain" if "--random-weights" in arguments else "| tree"
        assert row in capsys.readouterr().out


def test_the_benchmark_is_a_program() -> None:
    command = [sys.executable, "-m", "specdec.benchmark", "--help"]
    assert "--replay" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_every_selection_of_gpu_tests_that_the_readme_runs_holds_some() -> None:
    commands = [line for block in blocks("bash") for line in block.splitlines() if "-m cuda" in line]
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == ".venv/bin/pytest"
        assert pytest.main([*arguments, "--collect-only", "-q", "-p", "no:cacheprovider"]) == pytest.ExitCode.OK


def test_every_test_that_the_readme_names_exists() -> None:
    names = set(re.findall(r"`(test_\w+)`", README))
    assert names
    defined = {name for path in (ROOT / "tests").glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert names <= defined


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_every_file_that_the_readme_links_exists(target: str) -> None:
    assert (ROOT / target).exists()


def test_every_module_has_a_row_in_the_map_and_every_row_a_module() -> None:
    modules = {path.relative_to(ROOT).as_posix() for folder in ("specdec", "ui") for path in (ROOT / folder).glob("[!_]*.py")}
    folders = {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in (ROOT / "specdec").glob("*/__init__.py")}
    rows = set(re.findall(r"^\| `((?:app\.py|specdec/|ui/)[^`]*)` \|", README, re.MULTILINE))
    assert rows - {"app.py", "ui/assets/"} == modules | folders


def test_the_first_screen_says_what_it_is_shows_it_and_runs_it_and_the_measurements_come_last() -> None:
    screen = README.split("---\n", 2)[2].splitlines()[:30]
    assert any(line.startswith("![") for line in screen)
    assert any(line.endswith("app.py") and "pip install" in line for line in screen)
    assert re.findall(r"^## (.+)$", README, re.MULTILINE)[-1] == "Measured"
