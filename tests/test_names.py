"""The public names: each where the package says it is, and none brings along what it does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import specdec

HEAVY = {"torch", "transformers", "numba", "plotly", "networkx", "gradio"}
MODULES = "import sys; print(*sorted(set(sys.argv[2].split()) & set(sys.modules)))"


def brought(statement: str) -> set[str]:
    """The heavy packages that a new process has imported after ``statement``."""
    command = [sys.executable, "-c", f"{statement}\n{MODULES}", "", " ".join(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1], timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", specdec.__all__)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(specdec, name).__name__ == name
    assert name in dir(specdec)


@pytest.mark.parametrize(
    ("statement", "needs"),
    [
        ("import specdec", set()),
        ("from specdec import Step", set()),
        ("from specdec import to_networkx, tree_figure", {"networkx", "plotly"}),
        ("from specdec import LoadError, PromptError", {"torch"}),
    ],
)
def test_a_public_name_brings_no_more_than_it_needs(statement: str, needs: set[str]) -> None:
    assert brought(statement) == needs


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(ImportError, match="SpeculativEngine"):
        from specdec import SpeculativEngine  # noqa: F401
