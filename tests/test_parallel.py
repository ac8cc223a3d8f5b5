"""Many chats at once, measured: lanes write the same, every figure is there, and a lane that does not run says why."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import ARCHITECTURES, VOCAB, tiny_engine, tiny_model, tokenizer

from specdec.benchmark import __main__ as benchmark
from specdec.benchmark import latency, parallel
from specdec.benchmark.asking import Asked
from specdec.benchmark.latency import Latency
from specdec.benchmark.parallel import CONTINUOUS, PADDED, PARALLEL_LANES, PLAIN, TREE, TURNS, Chats, Comparison, Lanes
from specdec.cost import PassCost
from specdec.engine import SpeculativeEngine
from specdec.errors import LoadError

PROMPTS = [[5, 6, 7] * 5, list(range(40, 60)), [9] * 7, list(range(100, 130))]
TOKENS = 12
ASKED = Asked({"max_new_tokens": TOKENS}, prompt_limit=60, budget=8)
SMALL = ["--max-new-tokens", str(TOKENS), "--max-prompt-tokens", "60", "--runs", "2"]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SpeculativeEngine", lambda *_, **__: tiny_engine())
    monkeypatch.setattr(parallel, "PAGE", 16)
    monkeypatch.setattr(latency, "BEFORE", 2)
    monkeypatch.setattr(latency, "UNDISTURBED", 4)


def dear_engine() -> SpeculativeEngine:
    """An engine where every node costs a pass, so that a prompt is read in the smallest chunks beside others."""
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    engine.move_in(PassCost({1: 1.0, 64: 64.0}))
    return engine


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    return benchmark.main()


def test_every_lane_writes_the_same_texts_whole() -> None:
    engine, lanes = tiny_engine(), Lanes(tiny_engine(), ASKED)
    alone = [
        [token for step in engine.stream(prompt, max_new_tokens=TOKENS, eos_token_id=VOCAB) for token in step.token_ids]
        for prompt in PROMPTS
    ]
    for lane in PARALLEL_LANES:
        replies = lanes.write(lane, PROMPTS, TOKENS)
        assert [reply.token_ids for reply in replies] == alone, lane
        for reply in replies:
            assert reply.asked < reply.moments[0]
            assert reply.moments == sorted(reply.moments)
            assert len(reply.gaps) == len(reply.moments) - 1
            assert lane in (TREE, TURNS) or (len(reply.moments), reply.nodes) == (TOKENS, 0)
    assert not engine.scheduler.sequences


def test_chats_share_their_rounds_at_once_and_wait_for_each_other_turn_by_turn() -> None:
    lanes = Lanes(tiny_engine(), ASKED)
    at_once, turns = (lanes.write(lane, PROMPTS, TOKENS) for lane in (PLAIN, TURNS))
    assert len({reply.moments[-1] for reply in at_once}) < len(PROMPTS)
    for before, after in pairwise(turns):
        assert before.asked == after.asked
        assert before.moments[-1] < after.moments[0]


def test_a_chat_is_asked_for_when_it_arrives() -> None:
    late = Lanes(tiny_engine(), ASKED, lambda count: [0.0] * (count - 1) + [0.02]).write(PLAIN, PROMPTS, TOKENS)
    assert late[-1].asked - late[0].asked == pytest.approx(0.02)
    assert late[-1].moments[0] > late[-1].asked


def test_a_reply_counts_the_rounds_to_each_of_its_tokens_and_those_that_read_its_prompt() -> None:
    engine = dear_engine()
    chats = Chats(engine, engine.speculator, decoding="plain")
    running = chats.ask(PROMPTS[0], 30)
    for _ in range(5):
        chats.round()
    second = chats.ask(list(range(4, 100)), 2)
    while not second.moments:
        chats.round()
    assert (second.reading, second.rounds[0]) == (3, 4), "95 tokens in chunks of 32, then the first pass"
    assert running.rounds == list(range(running.rounds[0], running.rounds[-1] + 1)), "which is not kept from any round"
    chats.stop()
    assert not chats.busy


def test_what_is_compared_has_as_many_tokens_and_the_same_texts() -> None:
    comparison = Comparison(tiny_engine(), PROMPTS, [2, 3], ASKED)
    comparison.warm_up()
    for _ in range(2):
        assert len(set(comparison.run())) == 2 * len(PARALLEL_LANES)
    figures = comparison.figures()
    assert figures["absent"] == {}
    for count, prompts in (("2", 4), ("3", 3)):
        lanes = figures["lanes"][count]
        assert list(lanes) == list(PARALLEL_LANES)
        for lane, found in lanes.items():
            assert found["tokens"] == 2 * prompts * TOKENS, lane
            assert found["replies"] == 2 * prompts
            assert found["identical"] == found["asked"] == prompts, lane
            for summary in (found["tokens_per_second"], found["tree_over_lane"]):
                assert 0 < summary["low"] <= summary["median"] <= summary["high"]
            for name in ("first_token_seconds", "gap_seconds"):
                assert 0 < found[name]["median"] <= found[name]["p95"]
        assert lanes[TREE]["tree_over_lane"] == {"median": 1.0, "low": 1.0, "high": 1.0}
        assert lanes[TREE]["tokens_per_pass"] >= 1.0
        assert lanes[PLAIN]["nodes_per_pass"] == 0
        for lane in (PLAIN, PADDED, CONTINUOUS):
            assert lanes[lane]["tokens_per_pass"] == 1.0


def test_a_lane_that_does_not_run_here_says_why_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("no paged attention here\nand more")

    monkeypatch.setattr(engine.model, "generate_batch", refuse)
    comparison = Comparison(engine, PROMPTS, [2], ASKED)
    comparison.warm_up()
    list(comparison.run())
    figures = comparison.figures()
    assert list(figures["lanes"]["2"]) == [lane for lane in PARALLEL_LANES if lane != CONTINUOUS]
    assert f"{CONTINUOUS} does not run here: ValueError: no paged attention here" in parallel.parallel_table(figures)


def test_a_lane_of_the_engines_own_that_fails_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    comparison = Comparison(engine, PROMPTS, [2], ASKED)

    def failing(*_: Any) -> list[torch.Tensor]:
        raise ZeroDivisionError("a pass")

    _ = engine.pass_cost
    monkeypatch.setattr(engine.target, "run", failing)
    with pytest.raises(ZeroDivisionError):
        comparison.warm_up()


def test_latency_counts_passes_and_gaps() -> None:
    engine = dear_engine()
    measured = Latency(engine, PROMPTS, ASKED)
    measured.warm_up()
    measured.run()
    measured.run()
    (second, _), (disturbed, _) = measured.seconds, measured.disturbed
    assert second.prompt_tokens == len(PROMPTS[1])
    assert len(second.beside.token_ids) == len(second.alone.token_ids) == 1
    assert second.beside.rounds[0] <= second.beside.reading + 3
    assert disturbed.prompt_tokens == engine.target.context_limit // 2
    assert len(disturbed.gaps) > 1, "the running reply goes on while the prompt is read"
    assert len(disturbed.undisturbed) >= 3
    assert not engine.scheduler.sequences


def test_a_context_too_short_for_the_measurement_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "UNDISTURBED", 1000)
    with pytest.raises(LoadError, match="context"):
        Latency(tiny_engine(), PROMPTS, ASKED).run()


def test_the_report_holds_each_figure_in_its_table_its_chart_and_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    outputs = ["--json", str(report), "--html", str(page)]
    assert main(monkeypatch, "--parallel", "2,1", "--latency", *SMALL, "--runs", "1", *outputs) == 0
    *text, last = capsys.readouterr().out.splitlines()
    folded = json.loads(last)
    assert folded == json.loads(report.read_text())
    assert list(folded["parallel"]["lanes"]) == ["1", "2"]
    for count, lanes in folded["parallel"]["lanes"].items():
        for lane, found in lanes.items():
            row = next(line for line in text if line.startswith(f"| {count} ") and f"| {lane} " in line)
            for figure in (
                f"{found['tokens']}",
                f"{found['tokens_per_second']['median']:.1f} [",
                f"{found['tree_over_lane']['median']:.2f} [",
                f"{found['first_token_seconds']['median']:.3f} / {found['first_token_seconds']['p95']:.3f}",
                f"{1e3 * found['gap_seconds']['median']:.1f} / {1e3 * found['gap_seconds']['p95']:.1f}",
                f"{found['nodes_per_pass']:.1f}",
            ):
                assert figure in row
    shown = "\n".join(text)
    assert "first token of a second chat" in shown
    assert f"{folded['latency']['long_prompt']['p95_ratio']['median']:.2f} [" in shown
    html = page.read_text()
    for title in ("Tokens per second of all chats together", "Gap between tokens of a running reply", CONTINUOUS):
        assert title in html


def test_an_interrupted_comparison_reports_its_complete_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Comparison.run

    def interrupted(comparison: Comparison) -> Any:
        if comparison.runs == 1:
            raise KeyboardInterrupt
        return run(comparison)

    monkeypatch.setattr(Comparison, "run", interrupted)
    assert main(monkeypatch, "--parallel", "2", *SMALL) == 130
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["setup"]["runs"] == 1
    assert "2 of 4" in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--parallel", "2,x"], "'x'"),
        (["--parallel", "0"], "'0'"),
        (["--parallel", ","], "names no number"),
        (["--parallel", "2", "--temperature", "1"], "--temperature"),
        (["--latency", "--decodings", "plain"], "--decodings"),
    ],
)
def test_a_bad_argument_is_named(
    arguments: list[str], culprit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(monkeypatch, *arguments)
    assert culprit in capsys.readouterr().err.splitlines()[-1]


def test_too_few_questions_and_too_short_a_context_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "--parallel", "2", "--limit", "1") == 1
    assert "1 questions are too few for 2 chats" in capsys.readouterr().err
    assert main(monkeypatch, "--parallel", "2", "--max-new-tokens", "190") == 1
    assert "context of 192 tokens" in capsys.readouterr().err
