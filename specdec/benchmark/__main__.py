"""``python -m specdec.benchmark``: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from specdec.benchmark.charts import to_html
from specdec.benchmark.lanes import LANES, PROMPT_LOOKUP_TOKENS, Answer, EngineLane, Lane, TransformersLane
from specdec.benchmark.questions import OWN, Question, QuestionsError, load_questions
from specdec.benchmark.report import Difference, Sample, fold, table
from specdec.engine import SpeculativeEngine
from specdec.loading import LoadError
from specdec.request import MAX_BUDGET
from specdec.speculators import Speculator
from specdec.speculators.memory import Memory
from specdec.target import UnsupportedModelError


def lanes_argument(text: str) -> list[str]:
    """``plain,tree`` -> the lanes' names."""
    names = [name.strip() for name in text.split(",")]
    if unknown := set(names) - set(LANES):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is unknown; choose from {', '.join(LANES)}")
    return names


def budget_argument(text: str) -> int | str:
    """``auto`` or a number of nodes."""
    if text != "auto" and not (text.isdecimal() and int(text) <= MAX_BUDGET):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number of nodes from 0 to {MAX_BUDGET}")
    return text if text == "auto" else int(text)


def parser() -> argparse.ArgumentParser:
    """The arguments, with their help."""
    names = ",".join(LANES)
    parser = argparse.ArgumentParser(prog="python -m specdec.benchmark", description=__doc__)
    parser.add_argument("--model", help="hub id, local folder or .gguf file (default: the embedded model)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--questions", type=Path, default=OWN, metavar="FILE.jsonl", help="Spec-Bench's format")
    parser.add_argument("--limit", type=int, help="at most so many questions, spread over the file")
    parser.add_argument("--categories", default="", help="only these, separated by commas")
    parser.add_argument(
        "--decodings", type=lanes_argument, default=names, help=f"lanes, separated by commas (default: {names})"
    )
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-prompt-tokens", type=int, default=700, help="longer prompts lose the middle of the last message")
    parser.add_argument("--budget", type=budget_argument, default="auto", help="nodes besides the root per pass, or auto")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--memory", choices=("cold", "warm"), default="warm", help="warm: remembered from question to question")
    parser.add_argument(
        "--study", action="store_true", help="first complete the study of the model's vocabulary (minutes, once per model)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--html", type=Path, metavar="OUT")
    return parser


def chat_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], limit: int) -> list[int]:
    """The chat's tokens, cut to ``limit`` by leaving out the middle of the last message (head and tail of it stay)."""

    def encode(content: str) -> list[int]:
        cut = [*messages[:-1], {**messages[-1], "content": content}]
        return list(tokenizer.apply_chat_template(cut, add_generation_prompt=True, return_dict=False))

    token_ids = encode(messages[-1]["content"])
    content = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"]
    while len(token_ids) > limit and len(content) > 2:
        over = min(len(token_ids) - limit, len(content) - 2)
        middle = (len(content) - over) // 2
        content = content[:middle] + content[middle + over :]
        token_ids = encode(tokenizer.decode(content))
    return token_ids


def lane_of(name: str, engine: SpeculativeEngine, budget: int | str, memory: str) -> Lane:
    """The lane called ``name``, with a speculator memory of its own."""
    if name == "transformers":
        return TransformersLane(engine, {})
    if name == "transformers-prompt-lookup":
        return TransformersLane(engine, {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS})
    return EngineLane(engine, name, budget, speculators(engine, memory))


def speculators(engine: SpeculativeEngine, memory: str) -> Callable[[], Speculator]:
    """A factory of speculators that share one memory (warm), or have each an empty one (cold)."""
    shared = Memory()
    return lambda: engine.speculator(shared if memory == "warm" else None)


def ask(
    engine: SpeculativeEngine, question: Question, lanes: dict[str, Lane], arguments: dict[str, Any], limit: int
) -> list[tuple[list[int], dict[str, Answer]]]:
    """Every lane's answer to every turn, lanes interleaved; the first lane's reply is what later turns look back on."""
    for lane in lanes.values():
        lane.start()
    messages: list[dict[str, str]] = []
    turns: list[tuple[list[int], dict[str, Answer]]] = []
    for turn in question.turns:
        messages.append({"role": "user", "content": turn})
        prompt = chat_prompt(engine.tokenizer, messages, limit)
        answers = {name: lane.answer(prompt, arguments) for name, lane in lanes.items()}
        reply = next(iter(answers.values())).token_ids
        messages.append({"role": "assistant", "content": engine.tokenizer.decode(reply, skip_special_tokens=True)})
        turns.append((prompt, answers))
    return turns


def difference(engine: SpeculativeEngine, prompt: Sequence[int], mine: Answer, plain: Answer) -> Difference | None:
    """Where ``mine`` leaves ``plain``'s text, if it does."""
    pairs = enumerate(zip(mine.token_ids, plain.token_ids, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), None)
    if position is None:
        return None
    top = engine.target.prefill(engine.target.new_cache(), [*prompt, *plain.token_ids[:position]], top_k=2)
    assert top is not None
    return Difference(position, float(top.logprobs[-1, 0] - top.logprobs[-1, 1]))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure; returns the folded figures. Raises LoadError, UnsupportedModelError, QuestionsError."""
    names = options.decodings
    categories = [name.strip() for name in options.categories.split(",") if name.strip()]
    questions = load_questions(options.questions, categories, options.limit)
    arguments: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
    if options.temperature > 0:
        arguments |= {"do_sample": True, "temperature": options.temperature, "top_k": 0, "seed": 0}
    engine = SpeculativeEngine(options.model, device=options.device, dtype=options.dtype)

    if options.study:
        with tqdm(desc="studying the model", total=1.0, file=sys.stderr) as bar:

            def report(what: str, share: float) -> bool:
                bar.set_description(what)
                bar.update(share - bar.n)
                return True

            engine.study(report)

    samples: dict[tuple[str, int], Sample] = {}
    for run_index in range(options.runs):
        lanes = {name: lane_of(name, engine, options.budget, options.memory) for name in names}
        if run_index == 0:  # warm-up outside the clock, with lanes (and memories) of its own
            warm_up = {name: lane_of(name, engine, options.budget, options.memory) for name in names}
            ask(engine, questions[0], warm_up, arguments | {"max_new_tokens": 16}, options.max_prompt_tokens)
        progress = tqdm(questions, desc=f"run {run_index + 1} of {options.runs}", unit="question", file=sys.stderr)
        for question in progress:
            for turn, (prompt, answers) in enumerate(ask(engine, question, lanes, arguments, options.max_prompt_tokens)):
                key = (question.question_id, turn)
                if key not in samples:
                    differences = {
                        name: difference(engine, prompt, answer, answers["plain"])
                        for name, answer in answers.items()
                        if "plain" in answers and (options.temperature == 0 or isinstance(lanes[name], EngineLane))
                    }
                    samples[key] = Sample(question.question_id, question.category, turn, {n: [] for n in names}, differences)
                for name, answer in answers.items():
                    samples[key].answers[name].append(answer)
    setup = {
        "model": engine.name,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "device": str(engine.target.device),
        "threads": torch.get_num_threads(),
        "budget": options.budget,
        "memory": options.memory,
        "temperature": options.temperature,
        "vocabulary": {"tokens": engine.vocabulary.adjacent, "rounds": engine.vocabulary.rounds},
    }
    return {"setup": setup, **fold(list(samples.values()), names)}


def main() -> int:
    """Run, print the table, write what was asked for."""
    options = parser().parse_args()
    try:
        folded = run(options)
    except (LoadError, UnsupportedModelError, QuestionsError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{name} {value}" for name, value in folded["setup"].items()))
    print(table(folded))
    if options.json:
        options.json.write_text(json.dumps(folded, indent=1) + "\n", encoding="utf-8")
    if options.html:
        options.html.write_text(to_html(folded), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
