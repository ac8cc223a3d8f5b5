"""Score a speculator without a model, on recorded greedy replies.

Tokens per pass depend only on what the speculator proposes and on what the target says, never on the machine's load; and a
greedy target says the same thing however it is asked. So a reply recorded once, with the target's most probable next tokens
after every position, can be replayed against any speculator in milliseconds. A replay knows the target's view of accepted
nodes only, not of rejected ones: it is a lower bound for speculators that learn from those.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.speculators import Speculator, TopK
from specdec.speculators.storage import Arrays, load_arrays, save_arrays
from specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded reply: ``top`` is the target's view of every position of prompt + reply but the last.

    ``conversation`` numbers the chat it belongs to: traces of one number are its turns, in order.
    """

    conversation: int
    category: str
    prompt_ids: NDArray[np.int64]
    reply_ids: NDArray[np.int64]
    top: TopK

    def __post_init__(self) -> None:
        if not len(self.prompt_ids) or len(self.top) != len(self.prompt_ids) + len(self.reply_ids) - 1:
            raise ValueError("a trace needs a prompt, and the target's view of every position but the last")


@dataclass(frozen=True, slots=True)
class Score:
    """What a replay counts: emitted ``tokens``, target ``passes``, ``drafted`` and ``accepted`` nodes.

    ``expected`` is the number of accepted nodes by the speculator's own estimate: the sum of its nodes' scores.
    """

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    expected: float = 0.0

    def __add__(self, other: Score) -> Score:
        return Score(
            self.tokens + other.tokens,
            self.passes + other.passes,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.expected + other.expected,
        )

    @property
    def tokens_per_pass(self) -> float:
        """Mean acceptance length."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def calibration(self) -> float:
        """Expected over actual accepted nodes: 1 is perfect, more is overconfident."""
        return self.expected / self.accepted if self.accepted else float("nan")


def replay(trace: Trace, speculator: Speculator, budget: int) -> Score:
    """Decode ``trace`` again with ``speculator`` at ``budget`` nodes a pass; a second turn goes to the same speculator."""
    prompt, reply = trace.prompt_ids, trace.reply_ids.tolist()
    first = len(prompt) - 1  # the row of `top` that emits the reply's first token
    speculator.begin(prompt.tolist(), _rows(trace.top, 0, first, speculator.top_k), 0)
    score, position = Score(), 0
    while position < len(reply):
        tree = speculator.propose(budget).tree
        path = _walk(tree, reply[position:])
        emitted = reply[position : position + len(path)]
        path = path[: len(emitted)]
        row = first + position
        accepted = TokenTree.chain(tree.token_ids[path].tolist())
        view = _rows(trace.top, row, row + len(path), speculator.top_k)
        speculator.observe(accepted, range(len(path)), emitted, view)
        expected = 0.0 if tree.scores is None else float(tree.scores[1:].sum())
        score += Score(len(emitted), 1, len(tree) - 1, len(path) - 1, expected)
        position += len(emitted)
    return score


def save_traces(path: str | os.PathLike[str], traces: Sequence[Trace]) -> None:
    """Write ``traces`` to one file."""
    arrays: Arrays = {
        "conversations": np.array([trace.conversation for trace in traces], np.int64),
        "categories": np.array([trace.category for trace in traces], np.str_),
    }
    for i, trace in enumerate(traces):
        arrays[f"{i}.prompt_ids"] = trace.prompt_ids
        arrays[f"{i}.reply_ids"] = trace.reply_ids
        arrays[f"{i}.token_ids"] = trace.top.token_ids
        arrays[f"{i}.logprobs"] = trace.top.logprobs
    save_arrays(path, arrays)


def load_traces(path: str | os.PathLike[str]) -> list[Trace]:
    """What `save_traces` wrote; ValueError where the file holds something else."""
    arrays = load_arrays(path)
    try:
        return [
            Trace(
                int(conversation),
                str(category),
                arrays[f"{i}.prompt_ids"],
                arrays[f"{i}.reply_ids"],
                TopK(arrays[f"{i}.token_ids"], arrays[f"{i}.logprobs"]),
            )
            for i, (conversation, category) in enumerate(zip(arrays["conversations"], arrays["categories"], strict=True))
        ]
    except KeyError as error:
        raise ValueError(f"{path} holds no traces ({error} is missing)") from error


def _rows(top: TopK, start: int, stop: int, k: int) -> TopK | None:
    return TopK(top.token_ids[start:stop, :k], top.logprobs[start:stop, :k]) if k else None


def _walk(tree: TokenTree, reply: Sequence[int]) -> list[int]:
    """The nodes, root first, that carry the tokens of ``reply`` one after the other."""
    children, path = tree.children(), [0]
    for token in reply:
        if token not in children[path[-1]]:
            break
        path.append(children[path[-1]][token])
    return path
