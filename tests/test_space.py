"""The repository is a Space: its front matter and its requirements are what the platform takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import SpaceHardware
from packaging.requirements import Requirement

from specdec.loading import CUDA_DEFAULT
from ui.visitors import PUBLIC

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COLORS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
PLATFORM = {"python_version": "3.12", "python_full_version": "3.12.12", "platform_system": "Linux", "sys_platform": "linux"}


@pytest.fixture(scope="module")
def card() -> dict[str, Any]:
    """The front matter."""
    _, block, _ = README.split("---\n", 2)
    fields: dict[str, Any] = yaml.safe_load(block)
    return fields


@pytest.fixture(scope="module")
def requirements() -> dict[str, Requirement]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return {one.name: one for one in map(Requirement, filter(None, lines))}


def test_the_front_matter_is_complete_and_valid(card: dict[str, Any], requirements: dict[str, Requirement]) -> None:
    assert card["sdk"] == "gradio"
    assert card["sdk_version"] in requirements["gradio"].specifier
    assert card["python_version"] == PLATFORM["python_version"], "as text: 3.10 would be the number 3.1"
    assert (ROOT / card["app_file"]).is_file()
    assert {card["colorFrom"], card["colorTo"]} <= COLORS
    assert card["title"]
    assert card["emoji"]
    assert len(card["short_description"]) <= 60
    assert SpaceHardware(card["suggested_hardware"]) is SpaceHardware.ZERO_A10G


def test_the_space_preloads_the_model_that_it_uses(card: dict[str, Any]) -> None:
    assert card["preload_from_hub"] == [CUDA_DEFAULT]
    assert CUDA_DEFAULT in card["models"]


def test_zerogpu_can_install_the_requirements(requirements: dict[str, Requirement]) -> None:
    for requirement in requirements.values():
        assert requirement.marker is None or requirement.marker.evaluate(PLATFORM)
        assert requirement.url is None
    for version in ("2.8.0", "2.9.1", "2.10.0", "2.11.0"):
        assert version in requirements["torch"].specifier
    assert "spaces" not in requirements, "the platform brings its own"


def test_the_readme_names_the_limits() -> None:
    section = README.split("## On Hugging Face Spaces")[1].split("\n## ")[0]
    named = {int(number.replace(",", "")) for number in re.findall(r"(?<![\w.])\d[\d,]*", section)}
    assert {PUBLIC.prompt_tokens, PUBLIC.reply_tokens, int(PUBLIC.seconds)} <= named
