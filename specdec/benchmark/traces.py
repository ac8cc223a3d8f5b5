"""Replayed figures: recorded replies scored offline at several node budgets, without a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.benchmark.report import by_reply, forecast_error, markdown
from specdec.folders import studied_file
from specdec.speculators import Speculator
from specdec.speculators.fitting import prior
from specdec.speculators.hybrid import HybridSpeculator
from specdec.speculators.memory import Memory
from specdec.speculators.replay import Recording, Score, Trace, replay
from specdec.speculators.vocabulary import Vocabulary

BUDGETS = (8, 12, 16, 32, 64)
MEMORIES = ("cold", "warm")
"""An empty memory before each conversation; one memory carried from conversation to conversation."""


class TracesError(ValueError):
    """Recorded replies that cannot be used; the message names the file and the remedy."""


class Group(NamedTuple):
    """Traces to be replayed one after the other, and what replays them.

    ``speculator`` makes one for each conversation, from its memory; ``memory`` makes an empty one to be carried along.
    """

    traces: Sequence[Trace]
    speculator: Callable[[Memory | None], Speculator]
    memory: Callable[[], Memory] = Memory


def by_budget(groups: Sequence[Group], progress: Callable[[], object]) -> dict[str, dict[str, dict[str, Any]]]:
    """``{"cold": {"8": figures, ...}, "warm": ...}`` of all groups; ``progress`` is called after each replayed trace."""
    return {
        memory: {
            str(budget): _figures([pair for group in groups for pair in _scores(group, budget, memory == "warm", progress)])
            for budget in BUDGETS
        }
        for memory in MEMORIES
    }


def halves(
    traces: Sequence[Trace],
    vocab_size: int,
    vocabulary: Vocabulary | None,
    progress: Callable[[str, float], object],
) -> list[Group]:
    """The two halves of ``traces``, by conversation, each with the prior that was fitted to the other half.

    ``progress(what, share done)`` is called now and then.
    """
    place = {conversation: i for i, conversation in enumerate(dict.fromkeys(trace.conversation for trace in traces))}
    parts = [[trace for trace in traces if place[trace.conversation] % 2 == half] for half in (0, 1)]
    groups = []
    for done, (scored, fitted) in enumerate((parts, parts[::-1])):

        def report(what: str, share: float, done: int = done) -> None:
            progress(what, (done + share) / 2)

        weights = prior(fitted, vocab_size, vocabulary, report)

        def speculator(memory: Memory | None, weights: NDArray[np.float32] = weights) -> Speculator:
            return HybridSpeculator(vocab_size=vocab_size, memory=memory, vocabulary=vocabulary, prior=weights)

        def memory(weights: NDArray[np.float32] = weights) -> Memory:
            empty = Memory()
            empty.weights = weights.copy()
            return empty

        groups.append(Group(scored, speculator, memory))
    return groups


def _scores(group: Group, budget: int, warm: bool, progress: Callable[[], object]) -> Iterator[tuple[Trace, Score]]:
    memory = group.memory() if warm else None
    conversation, one = None, group.speculator(memory)
    for trace in group.traces:
        if trace.conversation != conversation:
            conversation, one = trace.conversation, group.speculator(memory)
        yield trace, replay(trace, one, budget)
        progress()


def _figures(scored: Sequence[tuple[Trace, Score]]) -> dict[str, Any]:
    scores: dict[str, Score] = {}
    for trace, score in scored:
        scores[trace.category] = scores.get(trace.category, Score()) + score
    total = sum(scores.values(), Score())
    return {
        "tokens": total.tokens,
        "passes": total.passes,
        "tokens_per_pass": total.tokens_per_pass,
        "expected_tokens_per_pass": total.expected_tokens_per_pass,
        "forecast_error": forecast_error([(score.expected, score.tokens) for _, score in scored]),
        "draft_seconds_per_pass": total.draft_seconds / max(total.passes, 1),
        "learn_seconds_per_pass": total.learn_seconds / max(total.passes, 1),
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
    header = ["memory", "nodes", "tok/pass", "expected", "off, by step", "by reply", "draft ms", "learn ms", *categories]
    rows = [
        [
            memory,
            budget,
            f"{f['tokens_per_pass']:.2f}",
            f"{f['expected_tokens_per_pass']:.2f}",
            f"{f['forecast_error']['by_step']:+.1%}",
            by_reply(f["forecast_error"]),
            f"{1e3 * f['draft_seconds_per_pass']:.2f}",
            f"{1e3 * f['learn_seconds_per_pass']:.2f}",
            *(f"{f['by_category'][category]:.2f}" for category in categories),
        ]
        for memory, budgets in figures.items()
        for budget, f in budgets.items()
    ]
    return markdown([header, *rows])
