"""The benchmark's figures, on a tiny model: what is compared is comparable, and what is reported adds up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import ARCHITECTURES, replay_passes, tiny_engine, tiny_model, tokenizer

from specdec.benchmark import __main__ as benchmark
from specdec.benchmark import cost, traces
from specdec.benchmark.asking import Asked, Session, chat_prompt, copied_share, difference
from specdec.benchmark.lanes import LANES, STATIC, Answer
from specdec.benchmark.questions import Question, QuestionsError, load_questions
from specdec.benchmark.report import Difference, Sample, fold, forecast_error, table
from specdec.engine import SpeculativeEngine
from specdec.loading import LoadError
from specdec.speculators import TopK
from specdec.speculators.hybrid import HybridSpeculator
from specdec.speculators.mixer import WEIGHTS_SHAPE
from specdec.speculators.replay import Trace

SMALL = ["--runs", "1", "--max-new-tokens", "12", "--max-prompt-tokens", "120", "--budget", "8"]
SUMMARY = {"geomean", "std", "ci95"}


def options(*arguments: str) -> Any:
    return benchmark.parser().parse_args([*arguments])


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SpeculativeEngine", lambda *_, **__: tiny_engine())
    monkeypatch.setattr(cost, "COPIED", 1 << 20)


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    return benchmark.main()


def test_what_a_run_needs_is_captured_before_its_clock_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.cache.BLOCK", 16)
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer(), static=True)
    passes = replay_passes(engine.target)
    asked = Asked({"max_new_tokens": 100, "do_sample": False, "eos_token_id": engine.target.vocab_size}, prompt_limit=60)
    session, question = Session(engine, ["plain", "tree"], asked), Question("1", "chat", ("the cat sat on the mat",))
    session.warm_up(question)
    monkeypatch.setattr(passes, "_captured", lambda *_: pytest.fail("captured on the clock"))
    session.ask(question, session.lanes(), lambda lane: None)
    assert session.done == 1


def test_every_lane_gives_the_same_greedy_text_and_the_figures_add_up() -> None:
    folded = benchmark.run(options(*SMALL, "--limit", "4", "--runs", "2", "--decodings", ",".join(LANES)))
    assert set(folded["lanes"]) == set(LANES)
    for name, figures in folded["lanes"].items():
        assert figures["identical"] == figures["questions"] >= 4
        for summary in ("speedup_vs_plain", "speedup_vs_transformers"):
            assert set(figures[summary]) == SUMMARY
        assert figures["tokens"] == sum(f["tokens"] for f in figures["by_category"].values())
        assert figures["tokens_per_pass"] == pytest.approx(figures["tokens"] / figures["passes"])
        for base in ("plain", "transformers"):
            low, high = figures[f"speedup_vs_{base}"]["ci95"]
            assert low <= figures[f"speedup_vs_{base}"]["geomean"] <= high
            if name == base:
                assert figures[f"speedup_vs_{base}"]["geomean"] == pytest.approx(1.0)
    assert folded["lanes"]["plain"]["tokens_per_pass"] == 1.0
    assert folded["lanes"]["transformers"]["tokens_per_pass"] == 1.0
    shares = folded["lanes"]["tree"]["shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    tree = folded["lanes"]["tree"]
    assert sum(bucket["nodes"] for bucket in tree["calibration"]) == round(tree["nodes_per_pass"] * tree["passes"])
    assert all(b["from"] <= b["expected"] <= b["to"] and 0 <= b["accepted"] <= 1 for b in tree["calibration"])
    for budgets in folded["by_budget"].values():
        assert list(budgets) == ["8", "12", "16", "32", "64"]
        assert all(2 * figures["tokens"] == tree["tokens"] for figures in budgets.values()), "one of two runs is replayed"
    assert "tree" in table(folded)
    json.dumps(folded)
    page = benchmark.to_html(folded)
    for title in ("Speedup over transformers", "by node budget", "Calibration by score", "Cost of a target pass"):
        assert title in page
    assert "<script src=" not in page, "the page needs no network"


def test_temperature_0_is_greedy_in_every_lane_whatever_the_model_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = benchmark.run(options(*SMALL, "--limit", "2", "--decodings", "plain,transformers"))
    monkeypatch.setattr(tiny_engine().model.generation_config, "do_sample", True)
    monkeypatch.setattr(tiny_engine().model.generation_config, "temperature", 5.0)
    again = benchmark.run(options(*SMALL, "--limit", "2", "--decodings", "plain,transformers"))
    for folded in (greedy, again):
        assert folded["lanes"]["transformers"]["identical"] == 2


def test_a_text_that_ends_early_is_not_identical() -> None:
    engine = tiny_engine()
    plain = Answer((5, 6, 7), (), 0.0)
    found = difference(engine, [4], Answer((5, 6), (), 0.0), plain)
    assert found is not None
    assert found.position == 2
    assert difference(engine, [4], plain, plain) is None


def test_a_rate_counts_whole_passes_up_to_the_common_length() -> None:
    answer = Answer((1, 2, 3, 4, 5, 6), ((3, 0.5), (1, 0.5), (2, 1.0)), 0.1)
    assert answer.rate(3) == 6.0
    assert answer.rate(4) == 4.0
    assert answer.rate(6) == 3.0


def test_a_speedup_compares_the_same_number_of_tokens_of_the_median_run() -> None:
    slow = [Answer((1,) * 4, ((1, s),) * 4, 0.0) for s in (1.0, 2.0, 9.0)]
    fast = [Answer((1,) * 8, ((2, s),) * 4, 0.0) for s in (1.0, 1.0, 5.0)]
    sample = Sample("q", "chat", 0, {"plain": slow, "tree": fast}, {})
    assert sample.speedup("tree", "plain") == pytest.approx(2.0 / 0.5)
    assert fold([sample], ["plain", "tree"])["lanes"]["tree"]["speedup_vs_plain"]["geomean"] == pytest.approx(4.0)


def test_where_a_text_leaves_plains_is_told_with_the_targets_margin() -> None:
    answers = [Answer((1, 2), ((1, 1.0), (1, 1.0)), 0.0)]
    differing = Sample("q", "chat", 0, {"plain": answers, "tree": answers}, {"plain": None, "tree": Difference(7, 0.125)})
    same = Sample("q", "chat", 1, {"plain": answers, "tree": answers}, {"plain": None, "tree": None})
    other = Sample("r", "chat", 0, {"plain": answers, "tree": answers}, {"plain": None, "tree": None})
    folded = fold([differing, same, other], ["plain", "tree"])
    assert folded["lanes"]["tree"]["identical"] == 1, "of two questions, one differs in one of its turns"
    assert "in 1 turn" in table(folded)
    assert "at token 7 (0.125)" in table(folded)


def test_a_forecast_is_compared_by_step_and_by_reply_with_what_was_given() -> None:
    figures = forecast_error([(11.0, 10), (90.0, 100)])
    assert figures == pytest.approx({"by_step": -9 / 110, "by_reply": 0.0, "standard_error": 0.1})
    figures = forecast_error([(2.0, 1), (0.0, 0)])
    assert figures == {"by_step": 1.0, "by_reply": 1.0, "standard_error": 0.0}, "a reply without a token tells nothing"
    assert forecast_error([]) == dict.fromkeys(figures, 0.0)


def test_each_half_is_scored_with_weights_that_were_fitted_to_the_other_half(monkeypatch: pytest.MonkeyPatch) -> None:
    top = TopK(np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32))
    recorded = [Trace(chat, "a", np.array([1]), np.array([2, 3]), top, 4, frozenset()) for chat in (0, 0, 2, 4)]
    fitted: list[list[int]] = []

    def prior(part: list[Trace], *_: Any) -> np.ndarray:
        fitted.append([trace.conversation for trace in part])
        return np.full(WEIGHTS_SHAPE, len(fitted), np.float32)

    monkeypatch.setattr(traces, "prior", prior)
    groups = traces.halves(recorded, 9, None, lambda what, share: None)
    assert [[trace.conversation for trace in group.traces] for group in groups] == [[0, 0, 4], [2]]
    assert fitted == [[2], [0, 0, 4]]
    for number, group in enumerate(groups, start=1):
        assert (group.memory().weights == number).all()
        assert (group.speculator(None)._mixer_weights() == number).all()  # type: ignore[attr-defined]


def test_replies_without_a_token_give_no_figure_and_no_error() -> None:
    trace = Trace(0, "a", np.array([1, 2]), np.zeros(0, np.int64), TopK(*np.zeros((2, 1, 1), np.float32)), 4, frozenset())
    figures = traces.by_budget([traces.Group([trace], lambda memory: HybridSpeculator(memory=memory))], lambda: None)
    assert figures["warm"]["8"]["tokens_per_pass"] == figures["warm"]["8"]["draft_seconds_per_pass"] == 0
    assert "| warm" in traces.budget_table(figures)


def test_only_runs_of_five_tokens_and_more_count_as_copied() -> None:
    prompt = list(range(20))
    assert copied_share(prompt, [1, 2, 3, 4, 5, 6, 99, 98]) == 6 / 8
    assert copied_share(prompt, [1, 2, 3, 4, 99, 5, 6, 7, 8, 98]) == 0
    assert copied_share(prompt, [0, 1, 2, 3, 4, 15, 16, 17, 18, 19]) == 1
    assert copied_share(prompt, []) == 0


def test_replies_are_grouped_by_the_share_that_stands_in_their_prompts() -> None:
    answers = [Answer((1, 2), ((1, 1.0), (1, 1.0)), 0.0)]
    samples = [Sample(str(share), "chat", 0, {"plain": answers}, {}, share) for share in (0.0, 0.79, 0.8, 1.0)]
    folded = fold(samples, ["plain"])
    groups = {name: figures["turns"] for name, figures in folded["lanes"]["plain"]["by_copied"].items()}
    assert groups == {"copied < 20 %": 1, "copied 50-80 %": 1, "copied >= 80 %": 2}
    assert "copied >= 80 %" in table(folded)


def test_a_long_prompt_loses_its_middle_and_keeps_head_and_tail() -> None:
    engine = tiny_engine()
    text = "HEAD " + "x" * 500 + " TAIL"
    prompt = chat_prompt(engine.tokenizer, [{"role": "user", "content": text}], 100)
    decoded = engine.tokenizer.decode(prompt)
    assert len(prompt) <= 100
    assert "HEAD" in decoded
    assert decoded.endswith(" TAIL<|end|><|assistant|>")


def test_the_own_questions_are_varied_and_a_limit_spreads_over_them() -> None:
    questions = load_questions()
    assert len(questions) >= 24
    assert len({question.category for question in questions}) >= 7
    assert len({question.category for question in load_questions(limit=7)}) >= 5
    assert {question.category for question in load_questions(categories=["code"])} == {"code"}


@pytest.mark.parametrize(
    ("content", "culprit"),
    [("", "no question"), ("{}", "line 1"), ("not json", "line 1"), ('{"question_id":1,"category":"a","turns":[]}', "turns")],
)
def test_a_broken_question_file_is_named(tmp_path: Path, content: str, culprit: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(content)
    with pytest.raises(QuestionsError, match=culprit):
        load_questions(path)


def test_a_bad_argument_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, value, culprit in (
        ("--decodings", "beam", "beam"),
        ("--budget", "many", "many"),
        ("--budget", "99", "99"),
        ("--runs", "0", "'0'"),
        ("--temperature", "-1", "'-1'"),
        ("--json", "/nowhere/report.json", "/nowhere"),
    ):
        with pytest.raises(SystemExit):
            options(argument, value)
        assert culprit in capsys.readouterr().err
    with pytest.raises(QuestionsError, match="poetry"):
        benchmark.run(options("--categories", "poetry"))
    with pytest.raises(QuestionsError, match="cannot read"):
        benchmark.run(options("--questions", "/nowhere.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--fit", "prior.npy"], "--replay"),
        (["--replay", "t.npz", "--record", "t.npz"], "--record"),
        (["--random-weights", "llama-7b", "--model", "m"], "--model"),
        (["--random-weights", "llama-7b", "--decodings", "plain,tree"], "tree"),
        (["--record", "t.npz", "--decodings", "plain"], "--decodings"),
    ],
)
def test_options_that_contradict_each_other_are_named_in_one_line(
    arguments: list[str], remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(monkeypatch, *arguments)
    assert remedy in capsys.readouterr().err.splitlines()[-1]


def test_sampled_lanes_are_timed_and_only_the_engines_own_are_compared_token_by_token() -> None:
    folded = benchmark.run(options(*SMALL, "--limit", "3", "--temperature", "0.8", "--decodings", ",".join(LANES)))
    for name, figures in folded["lanes"].items():
        comparable = not name.startswith("transformers")
        assert figures["identical"] == (figures["questions"] if comparable else None)
        assert figures["tokens_per_pass"] >= 1
        assert figures["speedup_vs_transformers"]["geomean"] > 0
    assert "not comparable token by token" in table(folded)


def test_without_a_lane_to_compare_with_a_figure_is_null_and_not_missing() -> None:
    lanes = benchmark.run(options(*SMALL, "--limit", "2", "--decodings", "tree"))["lanes"]
    assert lanes["tree"]["speedup_vs_plain"] is lanes["tree"]["speedup_vs_transformers"] is lanes["tree"]["identical"] is None


def test_an_interrupted_run_reports_the_questions_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = Session.ask

    def interrupted(session: Session, *arguments: Any) -> None:
        if session.done == 2:
            raise KeyboardInterrupt
        ask(session, *arguments)

    monkeypatch.setattr(Session, "ask", interrupted)
    report = tmp_path / "report.json"
    outputs = ["--json", str(report), "--html", str(tmp_path / "report.html"), "--record", str(tmp_path / "traces.npz")]
    assert main(monkeypatch, *SMALL, "--decodings", "plain,tree", *outputs) == 130
    assert json.loads(report.read_text())["lanes"]["tree"]["questions"] == 2
    assert "2 of" in capsys.readouterr().err.splitlines()[-1]
    assert len(benchmark.load_traces(tmp_path / "traces.npz")[1]) >= 2


def test_an_interruption_before_the_first_question_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "warm_up", interrupted)
    assert main(monkeypatch, *SMALL) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted before there was anything to report"


def test_recorded_replies_are_replayed_and_fitted_without_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, report, weights = (str(tmp_path / name) for name in ("traces.npz", "report.json", "prior.npy"))
    assert main(monkeypatch, *SMALL, "--limit", "3", "--decodings", "tree", "--json", report, "--record", recorded) == 0
    live = json.loads(Path(report).read_text())
    monkeypatch.setattr(benchmark, "SpeculativeEngine", None)
    page = tmp_path / "page.html"
    assert main(monkeypatch, "--replay", recorded, "--json", report, "--fit", weights, "--html", str(page)) == 0
    replayed = json.loads(Path(report).read_text())
    for memory, budgets in replayed["held_out"].items():
        assert [figures["tokens"] for figures in budgets.values()] == [live["lanes"]["tree"]["tokens"]] * len(budgets)
        assert budgets["32"]["forecast_error"] != replayed["by_budget"][memory]["32"]["forecast_error"], "other weights"
    for budget, figures in replayed["by_budget"]["warm"].items():
        assert figures["passes"] == pytest.approx(live["by_budget"]["warm"][budget]["passes"], rel=0.1)
    assert "tok/pass" in capsys.readouterr().out
    assert "by node budget" in page.read_text()
    assert np.load(weights).shape == WEIGHTS_SHAPE
    assert main(monkeypatch, "--replay", recorded, "--categories", "poetry") == 1
    assert "poetry" in capsys.readouterr().err
    assert main(monkeypatch, "--replay", "/nowhere.npz") == 1
    assert "cannot read /nowhere.npz" in capsys.readouterr().err


def test_a_plain_pass_reads_every_weight_once_and_the_contexts_keys_and_values() -> None:
    config = ARCHITECTURES["llama"]
    model = tiny_model(config)
    weights = sum(weight.numel() for weight in model.parameters()) - (config.vocab_size - 1) * config.hidden_size
    keys_and_values = 2 * 2 * 2 * 8 * 100  # both, layers, heads, dimension, tokens
    assert cost.bytes_per_pass(model, 100) == 4 * (weights + keys_and_values)
    tied = tiny_model(ARCHITECTURES["gpt2"])
    assert cost.bytes_per_pass(tied, 0) == sum(weight.nbytes for weight in tied.parameters())
    assert cost.copy_bandwidth(torch.device("cpu"), 1 << 20) > 1e6


def test_random_weights_tell_what_a_shape_costs_and_nothing_of_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "SpeculativeEngine", SpeculativeEngine)
    ARCHITECTURES["llama"].save_pretrained(tmp_path)
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    arguments = [
        "--random-weights",
        str(tmp_path / "config.json"),
        "--decodings",
        f"plain,transformers,{STATIC}",
        "--limit",
        "2",
    ]
    arguments += [*SMALL, "--device", "cpu", "--dtype", "float32", "--json", str(report), "--html", str(page)]
    assert main(monkeypatch, *arguments) == 0
    folded = json.loads(report.read_text())
    text = capsys.readouterr().out
    assert "random" in folded["setup"]["weights"]
    assert "random" in text
    assert set(folded["lanes"]["plain"]) == set(benchmark.OF_TIME)
    assert "tok/pass" not in text
    assert "Tokens per target pass" not in page.read_text()
    assert folded["lanes"]["plain"]["tokens"] == 2 * 12
    assert list(folded["cost"]["pass_seconds"]) == ["1", "2", "4", "8", "16", "32", "64"]
    assert folded["cost"]["share_of_limit"] > 0
    with pytest.raises(LoadError, match="llama-9z"):
        benchmark.time_random_weights(options("--random-weights", "llama-9z"))
    with pytest.raises(LoadError, match="192 tokens"):
        benchmark.time_random_weights(options("--random-weights", str(tmp_path), "--device", "cpu"))
