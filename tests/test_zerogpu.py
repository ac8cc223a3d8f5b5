"""The page on ZeroGPU, as `tests/zerogpu.py` plays it in a process of its own: a GPU only in forked children."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from toys import ARCHITECTURES, tiny_engine, tiny_model, tokenizer
from zerogpu import LONG, QUESTION, READS, SECOND, TOKEN, VALUES

from specdec.prompt import Prompt
from ui.settings import Settings
from ui.zerogpu import reply_seconds

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tests/zerogpu.py` found."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(ARCHITECTURES["llama"]).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    command = [sys.executable, "tests/zerogpu.py", str(folder)]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def expected(*turns: str) -> list[str]:
    """The replies of an engine that has its model for itself."""
    messages: list[dict[str, str]] = []
    for text in turns:
        messages.append({"role": "user", "content": text})
        reply = tiny_engine().generate(messages, **Settings.read(*VALUES).arguments())
        messages.append({"role": "assistant", "content": reply})
    return [message["content"] for message in messages[1::2]]


def test_two_turns_say_what_they_say_elsewhere_although_nothing_is_kept_between_them(space: dict[str, Any]) -> None:
    assert space["device in the parent"] == "cuda:0"
    assert [reply["text"] for reply in space["chat"]] == expected(QUESTION, SECOND)
    assert [reply["state"] for reply in space["chat"]] == ["done", "done"]
    assert space["conversation"] is None


def test_the_page_names_the_device_that_replies_are_written_on(space: dict[str, Any]) -> None:
    assert "· cuda:0<" in space["header"]


def test_no_weights_are_packed_on_the_cpu_for_a_model_that_children_run_on_a_gpu(space: dict[str, Any]) -> None:
    assert space["packed in the parent"] == 0


def test_audit_and_comparison_run_in_children_too(space: dict[str, Any]) -> None:
    assert space["audit"].startswith("audit ✓")
    assert space["agreement"]["same"] is True


def test_stop_is_heard_within_a_step_and_the_partial_reply_stays(space: dict[str, Any]) -> None:
    stopped = space["stopped"]
    assert (stopped["state"], bool(stopped["text"])) == ("stopped", True)
    assert expected(QUESTION)[0].startswith(stopped["text"].rstrip("\N{REPLACEMENT CHARACTER}"))
    assert stopped["passes after"] <= 3, "the step that runs, and one for each way of the news"


def test_stop_is_heard_while_the_prompt_is_read(space: dict[str, Any]) -> None:
    stopped = space["stopped reading"]
    assert (stopped["state"], stopped["text"]) == ("stopped", "")
    assert stopped["passes"] < len(LONG) // READS, "a byte is a token here"


def test_a_child_that_dies_is_one_line_and_the_chat_goes_on(space: dict[str, Any]) -> None:
    assert space["died"]["state"] == "failed"
    assert "aborted" in space["died"]["notices"][-1]
    assert space["after death"]["text"] == expected(SECOND)[0]


def test_what_was_asked_wrong_is_named_across_the_fork(space: dict[str, Any]) -> None:
    assert space["wrong"]["state"] == "failed"
    assert "guess" in space["wrong"]["notices"][-1]


def test_a_child_that_serves_again_mixes_nothing(space: dict[str, Any]) -> None:
    assert space["warm children"] <= 1
    assert [reply["text"] for reply in space["warm"]] == [*expected(QUESTION), *expected(SECOND)]


def test_a_served_page_answers_several_visitors(space: dict[str, Any]) -> None:
    first, second = expected(QUESTION, SECOND)
    assert space["served"] == [first, first, second]
    assert "startup-report" in [name for name, _ in space["calls"]], "no decorated function was there at launch"


def test_each_loan_is_on_the_visitors_quota_and_given_back(space: dict[str, Any]) -> None:
    names = [name for name, _ in space["calls"]]
    assert names.count("release") == names.count("schedule")
    loans = [arguments for name, arguments in space["calls"] if name == "schedule"]
    assert loans[0]["token"] == TOKEN
    assert all(0 < int(loan["durationSeconds"]) < 120 for loan in loans)


def test_a_longer_reply_asks_for_more_time() -> None:
    prompt = Prompt((1,) * 100)
    short, long = (reply_seconds(prompt, Settings(max_tokens=tokens), True, None) for tokens in (16, 1024))
    assert 0 < short < long < 80
