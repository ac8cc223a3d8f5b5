"""``python -m specdec.benchmark``: the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from specdec.benchmark.arrivals import arrivals_text, measure
from specdec.benchmark.asking import Asked, Session, chat_prompt, time_shape
from specdec.benchmark.charts import to_html
from specdec.benchmark.cost import measure_cost
from specdec.benchmark.lanes import LANES, STATIC
from specdec.benchmark.latency import Latency, latency_text
from specdec.benchmark.parallel import Comparison, parallel_table
from specdec.benchmark.questions import OWN, QuestionsError, load_questions
from specdec.benchmark.report import fold, table
from specdec.benchmark.shapes import SHAPES, random_model
from specdec.benchmark.traces import BUDGETS, MEMORIES, Group, TracesError, budget_table, by_budget, halves, load_traces
from specdec.devices import dtype_name
from specdec.engine import SpeculativeEngine
from specdec.folders import model_file
from specdec.loading import LoadError
from specdec.request import MAX_BUDGET
from specdec.speculators.fitting import prior
from specdec.speculators.hybrid import HybridSpeculator, warm_up
from specdec.speculators.memory import Memory
from specdec.speculators.replay import Recording
from specdec.target import UnsupportedModelError

SHAPE_LANES = ("plain", "transformers", STATIC)
"""Lanes that may run on random weights: nothing depends on what the model says."""
OF_TIME = (
    "questions",
    "tokens",
    "prefill_seconds",
    "decode_tokens_per_second",
    "speedup_vs_plain",
    "speedup_vs_transformers",
)
"""The figures that mean something there."""


def names_argument(text: str) -> list[str]:
    """``qa, chat`` -> the names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def lanes_argument(text: str) -> list[str]:
    """``plain,tree`` -> the lanes' names."""
    names = names_argument(text)
    if unknown := set(names) - set(LANES):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is unknown; choose from {', '.join(LANES)}")
    return names


def budget_argument(text: str) -> int | str:
    """``auto`` or a number of nodes."""
    if text != "auto" and not (text.isdecimal() and int(text) <= MAX_BUDGET):
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number of nodes from 0 to {MAX_BUDGET}")
    return text if text == "auto" else int(text)


def count_argument(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def counts_argument(text: str) -> list[int]:
    """``1,2,4,8`` -> the numbers, each once, in ascending order."""
    if not (names := names_argument(text)):
        raise argparse.ArgumentTypeError(f"{text!r} names no number; pass for example 1,2,4,8")
    return sorted({count_argument(name) for name in names})


def rate_argument(text: str) -> float:
    """A number above 0."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; pass a number above 0")
    return rate


def temperature_argument(text: str) -> float:
    """A number from 0 on."""
    try:
        temperature = float(text)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no temperature; pass 0 (greedy) or more")
    return temperature


def output_argument(text: str) -> Path:
    """A file to write: in a folder that is there, so that a long run does not end in vain."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: the folder {path.parent} does not exist; make it first")
    return path


def parser() -> argparse.ArgumentParser:
    """The arguments, with their help."""
    parser = argparse.ArgumentParser(prog="python -m specdec.benchmark", description="Measure decoding, lane beside lane.")
    parser.add_argument("--model", help="hub id, local folder or .gguf file (default: the embedded model)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--questions", type=Path, default=OWN, metavar="FILE.jsonl", help="Spec-Bench's format")
    parser.add_argument("--limit", type=count_argument, help="at most so many questions, spread over the file")
    parser.add_argument("--categories", type=names_argument, default=[], help="only these, separated by commas")
    parser.add_argument(
        "--decodings", type=lanes_argument, help=f"lanes, separated by commas (default: all, {STATIC} on CUDA only)"
    )
    parser.add_argument("--max-new-tokens", type=count_argument, default=96)
    parser.add_argument(
        "--max-prompt-tokens", type=count_argument, default=700, help="longer prompts lose the middle of the last message"
    )
    parser.add_argument("--budget", type=budget_argument, default="auto", help="nodes besides the root per pass, or auto")
    parser.add_argument("--temperature", type=temperature_argument, default=0.0, help="0: greedy")
    parser.add_argument("--runs", type=count_argument, default=3)
    parser.add_argument("--memory", choices=MEMORIES, default="warm", help="warm: remembered from question to question")
    parser.add_argument(
        "--study", action="store_true", help="first complete the study of the model's vocabulary (minutes, once per model)"
    )
    parser.add_argument("--record", type=output_argument, metavar="OUT.npz", help="keep the replies for --replay")
    parser.add_argument(
        "--replay", type=Path, metavar="FILE.npz", help="score the speculator on recorded replies, without a model"
    )
    parser.add_argument(
        "--fit", type=output_argument, metavar="OUT.npy", help="with --replay: fit the mixer's prior to the recorded replies"
    )
    parser.add_argument(
        "--random-weights",
        metavar="CONFIG",
        help=f"time a model of this shape without a download: {', '.join(SHAPES)}, or a config.json",
    )
    parser.add_argument(
        "--parallel",
        type=counts_argument,
        metavar="1,2,4,8",
        help="compare lanes that write so many chats at once (default limit: as many prompts as chats)",
    )
    parser.add_argument(
        "--latency",
        action="store_true",
        help="measure what a second chat waits for behind a running reply, and how a long prompt delays one",
    )
    parser.add_argument(
        "--arrivals",
        type=rate_argument,
        metavar="RATE",
        help="drive a server over loopback instead: so many requests a second at random moments, for a minute at most",
    )
    parser.add_argument("--json", type=output_argument, metavar="OUT")
    parser.add_argument("--html", type=output_argument, metavar="OUT")
    return parser


def check(options: argparse.Namespace) -> None:
    """Raise ValueError where options contradict each other."""
    if options.fit and not options.replay:
        raise ValueError("--fit learns from recorded replies: name them with --replay FILE.npz")
    if options.replay and (options.record or options.random_weights):
        raise ValueError("--replay runs no model: leave out --record and --random-weights")
    if options.arrivals and (options.replay or options.random_weights or options.record or options.decodings):
        raise ValueError("--arrivals drives a server: leave out --replay, --random-weights, --record and --decodings")
    if options.random_weights and (options.model or options.record):
        raise ValueError("--random-weights is a model that says nothing of use: leave out --model and --record")
    if options.record and options.decodings and not {"tree", "linear"} & set(options.decodings):
        raise ValueError("--record follows the tree or the linear lane: add one of them to --decodings")
    if (options.parallel or options.latency) and (
        options.replay or options.record or options.random_weights or options.decodings or options.temperature
    ):
        raise ValueError(
            "--parallel and --latency are greedy and have lanes of their own: leave out --replay, --record, --random-weights, "
            "--decodings and --temperature"
        )
    if options.random_weights and (talking := set(options.decodings or ()) - set(SHAPE_LANES)):
        raise ValueError(
            f"{', '.join(sorted(talking))}: on random weights no speculation is timed, for what it gains depends on what a "
            f"model says; choose from {', '.join(SHAPE_LANES)}"
        )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Ask the questions; returns the folded figures, of the questions done if interrupted.

    Raises LoadError, UnsupportedModelError, QuestionsError; KeyboardInterrupt before a question is done.
    """
    questions = load_questions(options.questions, options.categories, options.limit)
    arguments: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": options.temperature > 0}
    if options.temperature > 0:
        arguments |= {"temperature": options.temperature, "top_k": 0, "seed": 0}
    engine = SpeculativeEngine(options.model, device=options.device, dtype=options.dtype)
    if options.study:
        study(engine)
    asked = Asked(arguments, options.max_prompt_tokens, options.budget, options.memory)
    session = Session(engine, options.decodings or default_lanes(engine), asked)
    cost = measure_cost(engine)
    planned = options.runs * len(questions)
    bar = tqdm(total=planned, desc="warming up", unit="question", file=sys.stderr)
    replayed = None
    try:
        with bar:
            session.warm_up(questions[0])
            for index in range(options.runs):
                lanes = session.lanes(record=index == 0)
                for question in questions:
                    bar.set_description(f"run {index + 1} of {options.runs}, {question.category}")
                    session.ask(question, lanes, bar.set_postfix_str)
                    bar.update()
        if session.traces:
            with replay_bar(len(session.traces)) as bar:
                replayed = by_budget([Group(session.traces, engine.speculator)], bar.update)
    except KeyboardInterrupt:
        if not session.done:
            raise
    if options.record:
        vocabulary = model_file("vocabulary", engine.model).name
        Recording(engine.name, engine.target.vocab_size, vocabulary, tuple(session.traces)).save(options.record)
    setup = {
        **machine(engine),
        "budget": options.budget,
        "memory": options.memory,
        "temperature": options.temperature,
        "vocabulary": {"tokens": engine.vocabulary.adjacent, "rounds": engine.vocabulary.rounds},
        "asked": session.done,
        "planned": planned,
    }
    folded = {"setup": setup, **fold(list(session.samples.values()), session.names), "cost": cost}
    return folded if replayed is None else {**folded, "by_budget": replayed}


def run_chats(options: argparse.Namespace) -> dict[str, Any]:
    """Many chats at once, and what they make each other wait; of the complete runs if interrupted.

    Raises LoadError, UnsupportedModelError, QuestionsError; KeyboardInterrupt before a run is complete.
    """
    counts = options.parallel or []
    questions = load_questions(options.questions, options.categories, options.limit or max(counts, default=8))
    if len(questions) < (most := max(counts, default=1)):
        raise QuestionsError(
            f"{len(questions)} questions are too few for {most} chats at once: name fewer chats or more questions"
        )
    engine = SpeculativeEngine(options.model, device=options.device, dtype=options.dtype)
    if options.study:
        study(engine)
    first_turns = [[{"role": "user", "content": question.turns[0]}] for question in questions]
    prompts = [chat_prompt(engine.tokenizer, messages, options.max_prompt_tokens) for messages in first_turns]
    require_context(engine, engine.name, max(map(len, prompts)) + options.max_new_tokens)
    asked = Asked({"max_new_tokens": options.max_new_tokens}, options.max_prompt_tokens, options.budget, options.memory)
    comparison, latency = Comparison(engine, prompts, counts, asked), Latency(engine, prompts, asked)
    done = 0
    try:
        with tqdm(desc="warming up", unit="batch", file=sys.stderr) as bar:
            comparison.warm_up()
            if options.latency:
                latency.warm_up()
            for index in range(options.runs):
                for what in comparison.run():
                    bar.set_description(f"run {index + 1} of {options.runs}, {what}")
                    bar.update()
                if options.latency:
                    bar.set_description(f"run {index + 1} of {options.runs}, latency")
                    latency.run()
                done = index + 1
    except KeyboardInterrupt:
        if not done:
            raise
    setup = {
        **machine(engine),
        "budget": options.budget,
        "memory": options.memory,
        "prompts": len(prompts),
        "new_tokens": options.max_new_tokens,
        "runs": done,
        "asked": done * len(prompts),
        "planned": options.runs * len(prompts),
    }
    parallel = {"parallel": comparison.figures()} if counts else {}
    return {"setup": setup, **parallel, **({"latency": latency.figures()} if options.latency else {})}


def arrivals(options: argparse.Namespace) -> dict[str, Any]:
    """What visitors of a server meet. Raises LoadError, UnsupportedModelError, QuestionsError."""
    questions = load_questions(options.questions, options.categories, options.limit)
    engine = SpeculativeEngine(options.model, device=options.device, dtype=options.dtype)
    asked = {"max_tokens": options.max_new_tokens, "temperature": options.temperature, "seed": 0}
    figures = measure(engine, [question.turns[0] for question in questions], options.arrivals, asked)
    return {"setup": machine(engine), "arrivals": figures}


def replay(options: argparse.Namespace) -> dict[str, Any]:
    """Score the speculator on recorded replies; with ``--fit`` first write weights fitted to them.

    What weights fitted in this way are worth on other questions is scored as well: each half of the conversations with weights
    fitted to the other half.

    Raises TracesError.
    """
    recording, traces, vocabulary = load_traces(options.replay, options.categories)
    setup = {
        "recording": str(options.replay),
        "model": recording.model,
        "replies": len(traces),
        "vocabulary": None if vocabulary is None else {"tokens": vocabulary.adjacent, "rounds": vocabulary.rounds},
    }
    warm_up()  # compiled before a clock runs

    def speculator(memory: Memory | None) -> HybridSpeculator:
        return HybridSpeculator(vocab_size=recording.vocab_size, memory=memory, vocabulary=vocabulary)

    groups = {"by_budget": [Group(traces, speculator)]}
    if options.fit:
        with share_bar("fitting") as report:
            np.save(options.fit, prior(traces, recording.vocab_size, vocabulary, report))
        with share_bar("fitting halves") as report:
            groups["held_out"] = halves(traces, recording.vocab_size, vocabulary, report)
    with replay_bar(len(traces) * len(groups)) as bar:
        return {"setup": setup, **{name: by_budget(some, bar.update) for name, some in groups.items()}}


def time_random_weights(options: argparse.Namespace) -> dict[str, Any]:
    """What a model of a given shape costs. Raises LoadError, UnsupportedModelError."""
    model, tokenizer = random_model(options.random_weights, options.device, options.dtype)
    engine = SpeculativeEngine(model, tokenizer)
    asked = Asked({"max_new_tokens": options.max_new_tokens}, options.max_prompt_tokens)
    require_context(engine, options.random_weights, asked.prompt_limit + options.max_new_tokens)
    names = options.decodings or [name for name in default_lanes(engine) if name in SHAPE_LANES]
    cost = measure_cost(engine)
    prompts = options.limit or 4
    with tqdm(total=prompts * (options.runs + 1), desc="timing random weights", unit="prompt", file=sys.stderr) as bar:
        folded = fold(time_shape(engine, names, asked, prompts, options.runs, bar.update), names)
    lanes = {name: {figure: figures[figure] for figure in OF_TIME} for name, figures in folded["lanes"].items()}
    weights = "random: times only, nothing here depends on what a model says"
    return {"setup": {**machine(engine), "model": options.random_weights, "weights": weights}, "lanes": lanes, "cost": cost}


def require_context(engine: SpeculativeEngine, name: str, tokens: int) -> None:
    """Raise LoadError where the context of the model of this ``name`` has no room for ``tokens``."""
    if tokens > engine.target.context_limit:
        raise LoadError(
            f"{name} has a context of {engine.target.context_limit} tokens, and {tokens} were asked for: "
            "lower --max-prompt-tokens or --max-new-tokens."
        )


def default_lanes(engine: SpeculativeEngine) -> list[str]:
    """All lanes that make sense on the engine's device."""
    return [name for name in LANES if name != STATIC or engine.target.device.type == "cuda"]


def study(engine: SpeculativeEngine) -> None:
    """Complete what is known of the model, with a bar."""
    with share_bar("studying the model") as report:
        engine.study(report)


@contextmanager
def share_bar(what: str) -> Iterator[Callable[[str, float], bool]]:
    """A bar that is told what is being done and the share done; it always answers to go on."""
    with tqdm(desc=what, total=1.0, file=sys.stderr) as bar:

        def report(what: str, share: float) -> bool:
            bar.set_description(what)
            bar.update(share - bar.n)
            return True

        yield report


def replay_bar(traces: int) -> tqdm[Any]:
    """A bar for `by_budget`."""
    return tqdm(total=traces * len(BUDGETS) * len(MEMORIES), desc="replaying", unit="reply", file=sys.stderr)


def machine(engine: SpeculativeEngine) -> dict[str, Any]:
    """What is measured, on what."""
    return {
        "model": engine.name,
        "dtype": dtype_name(engine.model.dtype),
        "device": str(engine.target.device),
        "threads": torch.get_num_threads(),
    }


def mode(options: argparse.Namespace) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """What is to be measured."""
    if options.replay:
        return replay
    if options.random_weights:
        return time_random_weights
    if options.arrivals:
        return arrivals
    return run_chats if options.parallel or options.latency else run


def main() -> int:
    """Run, print the tables, write what was asked for; 130 if interrupted, as shells have it."""
    arguments = parser()
    options = arguments.parse_args()
    try:
        check(options)
    except ValueError as error:
        arguments.error(str(error))
    try:
        folded = mode(options)(options)
    except (LoadError, UnsupportedModelError, QuestionsError, TracesError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before there was anything to report", file=sys.stderr)
        return 130
    setup = folded["setup"]
    print(", ".join(f"{name} {value}" for name, value in setup.items()))
    if "lanes" in folded:
        print(table(folded))
    if "arrivals" in folded:
        print(arrivals_text(folded["arrivals"]))
    if "by_budget" in folded:
        print("\nReplayed offline:" if "lanes" in folded else "", budget_table(folded["by_budget"]), sep="\n")
    if "held_out" in folded:
        print("\nEach half with weights fitted to the other half:", budget_table(folded["held_out"]), sep="\n")
    if "parallel" in folded:
        print(parallel_table(folded["parallel"]))
    if "latency" in folded:
        print(latency_text(folded["latency"]))
    if options.json:
        options.json.write_text(json.dumps(folded, indent=1) + "\n", encoding="utf-8")
    if options.html:
        options.html.write_text(to_html(folded), encoding="utf-8")
    if "parallel" in folded or "latency" in folded:
        print(json.dumps(folded))
    if setup.get("asked") != setup.get("planned"):
        print(f"interrupted: these are the figures of {setup['asked']} of {setup['planned']} questions", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
