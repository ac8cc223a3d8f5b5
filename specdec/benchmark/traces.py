"""Replayed figures: recorded replies scored offline at several node budgets, without a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from specdec.benchmark.report import markdown
from specdec.folders import studied_file
from specdec.speculators import Speculator
from specdec.speculators.memory import Memory
from specdec.speculators.replay import Recording, Score, Trace, replay
from specdec.speculators.vocabulary import Vocabulary

BUDGETS = (8, 12, 16, 32, 64)
MEMORIES = ("cold", "warm")
"""An empty memory before each conversation; one memory carried from conversation to conversation."""


class TracesError(ValueError):
    """Recorded replies that cannot be used; the message names the file and the remedy."""


def by_budget(
    traces: Sequence[Trace], speculator: Callable[[Memory | None], Speculator], progress: Callable[[], object]
) -> dict[str, dict[str, dict[str, Any]]]:
    """``{"cold": {"8": figures, ...}, "warm": ...}``; ``progress`` is called after each replayed trace.

    ``speculator`` makes one for each conversation, from its memory.
    """
    return {
        memory: {str(budget): _figures(traces, speculator, budget, memory == "warm", progress) for budget in BUDGETS}
        for memory in MEMORIES
    }


def _figures(
    traces: Sequence[Trace],
    speculator: Callable[[Memory | None], Speculator],
    budget: int,
    warm: bool,
    progress: Callable[[], object],
) -> dict[str, Any]:
    memory = Memory() if warm else None
    scores: dict[str, Score] = {}
    conversation, one = None, speculator(memory)
    for trace in traces:
        if trace.conversation != conversation:
            conversation, one = trace.conversation, speculator(memory)
        scores[trace.category] = scores.get(trace.category, Score()) + replay(trace, one, budget)
        progress()
    total = sum(scores.values(), Score())
    return {
        "tokens": total.tokens,
        "passes": total.passes,
        "tokens_per_pass": total.tokens_per_pass,
        "expected_tokens_per_pass": total.expected_tokens_per_pass,
        "draft_seconds_per_pass": total.draft_seconds / total.passes,
        "learn_seconds_per_pass": total.learn_seconds / total.passes,
        "by_category": {category: score.tokens_per_pass for category, score in sorted(scores.items())},
    }


def load_traces(path: Path, categories: Collection[str] = ()) -> tuple[Recording, list[Trace], Vocabulary | None]:
    """A recording, its traces of the named ``categories`` (all if none), and what was studied of its model, if that is here.

    Raises TracesError.
    """
    try:
        recording = Recording.load(path)
        table = studied_file(recording.vocabulary)
        vocabulary = Vocabulary.load(table) if table.is_file() else None
    except OSError as error:
        raise TracesError(f"cannot read {path}: {error.strerror}; make it with --record {path}") from error
    except ValueError as error:
        raise TracesError(str(error)) from error
    known = sorted({trace.category for trace in recording.traces})
    if unknown := set(categories) - set(known):
        raise TracesError(f"{path} has no category {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    traces = [trace for trace in recording.traces if not categories or trace.category in categories]
    if not traces:
        raise TracesError(f"{path} holds no reply")
    return recording, traces, vocabulary


def budget_table(figures: dict[str, dict[str, dict[str, Any]]]) -> str:
    """`by_budget`'s figures as a Markdown table, categories included."""
    categories = list(next(iter(figures["cold"].values()))["by_category"])
    header = ["memory", "nodes", "tok/pass", "expected", "draft ms", "learn ms", *categories]
    rows = [
        [
            memory,
            budget,
            f"{f['tokens_per_pass']:.2f}",
            f"{f['expected_tokens_per_pass']:.2f}",
            f"{1e3 * f['draft_seconds_per_pass']:.2f}",
            f"{1e3 * f['learn_seconds_per_pass']:.2f}",
            *(f"{f['by_category'][category]:.2f}" for category in categories),
        ]
        for memory, budgets in figures.items()
        for budget, f in budgets.items()
    ]
    return markdown([header, *rows])
