"""The benchmark's figures, on a tiny model: what is compared is comparable, and what is reported adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toys import tiny_engine

from specdec.benchmark import __main__ as benchmark
from specdec.benchmark.lanes import LANES, Answer
from specdec.benchmark.questions import QuestionsError, load_questions
from specdec.benchmark.report import Sample, fold, table


def options(*arguments: str) -> Any:
    return benchmark.parser().parse_args([*arguments])


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SpeculativeEngine", lambda *_, **__: tiny_engine())


def test_every_lane_gives_the_same_greedy_text_and_the_figures_add_up() -> None:
    arguments = ["--limit", "4", "--runs", "2", "--max-new-tokens", "12", "--max-prompt-tokens", "120", "--budget", "8"]
    folded = benchmark.run(options(*arguments))
    assert set(folded["lanes"]) == set(LANES)
    for name, figures in folded["lanes"].items():
        assert figures["identical"] == figures["questions"] >= 4
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
    assert "tree" in table(folded)
    json.dumps(folded)
    page = benchmark.to_html(folded)
    assert "Speedup over transformers" in page
    assert "<script src=" not in page, "the page needs no network"


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


def test_a_long_prompt_loses_its_middle_and_keeps_head_and_tail() -> None:
    engine = tiny_engine()
    text = "HEAD " + "x" * 500 + " TAIL"
    prompt = benchmark.chat_prompt(engine.tokenizer, [{"role": "user", "content": text}], 100)
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
    for arguments, culprit in ((["--decodings", "beam"], "beam"), (["--budget", "many"], "many"), (["--budget", "99"], "99")):
        with pytest.raises(SystemExit):
            options(*arguments)
        assert culprit in capsys.readouterr().err
    with pytest.raises(QuestionsError, match="poetry"):
        benchmark.run(options("--categories", "poetry"))
    with pytest.raises(QuestionsError, match="cannot read"):
        benchmark.run(options("--questions", "/nowhere.jsonl"))
