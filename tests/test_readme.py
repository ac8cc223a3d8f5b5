"""The README keeps its word: every command and every line of code in it runs."""

from __future__ import annotations

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

from specdec.benchmark.__main__ import check, parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_examples_run() -> None:
    for code in blocks("python"):
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert "Paris" in result.stdout


def test_the_run_command_serves_the_page(unused_tcp_port: int) -> None:
    command = next(line for block in blocks("bash") for line in block.splitlines() if "app.py" in line)
    assert command.startswith("python -m venv .venv && .venv/bin/pip install -r requirements.txt && ")
    launch = command.rsplit(" && ", 1)[1].split()
    assert launch == [".venv/bin/python", "app.py"]
    server = subprocess.Popen([sys.executable, "app.py", "--no-browser", "--port", str(unused_tcp_port)], cwd=ROOT)
    try:
        assert "Token Tree Chat" in wait_for(f"http://127.0.0.1:{unused_tcp_port}/", server)
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


def test_the_benchmark_commands_run(tmp_path: Path) -> None:
    """In their order: one may need what another wrote."""
    commands = [line for block in blocks("bash") for line in block.splitlines() if "specdec.benchmark" in line]
    assert commands
    for command in commands:
        arguments = [re.sub(r"^\w+\.(json|html|npz|npy)$", rf"{tmp_path}/\g<0>", part) for part in command.split()[1:]]
        if "cuda" in arguments and not torch.cuda.is_available():
            options = parser().parse_args(arguments[2:])
            check(options)
            assert (ROOT / options.questions).is_file()
            continue
        small = ["--limit", "1", "--runs", "1", "--max-new-tokens", "4"]
        result = subprocess.run([sys.executable, *arguments, *small], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert (
            "| warm" if "--replay" in arguments else "| plain" if "--random-weights" in arguments else "| tree"
        ) in result.stdout


def test_every_selection_of_gpu_tests_that_the_readme_runs_holds_some() -> None:
    commands = [line for block in blocks("bash") for line in block.splitlines() if "-m cuda" in line]
    assert commands
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == ".venv/bin/pytest"
        listing = [sys.executable, "-m", "pytest", *arguments, "--collect-only", "-q", "-p", "no:cacheprovider"]
        result = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout


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
