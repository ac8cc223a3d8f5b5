"""Synthetic Steps: realistic trees with accepted and rejected branches, made without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from specdec.accept import accept
from specdec.step import Step, TargetView, Timings
from specdec.tree import Source, TokenTree
from ui.trace import Recorder

_WORDS = """ the| a| of| water| into| filter| hot| pour| and| to| cup| coffee| brew|,|.|\n| grounds| until| it| is| slowly
| over| -| **|ing| heat| minute| stir| with| spoon| milk| 1|2| environment| temperature|ly|ug"""
WORDS = _WORDS.split("|")


def token_text(token_ids: Sequence[int]) -> list[str]:
    return [WORDS[token % len(WORDS)] for token in token_ids]


def random_tree(rng: random.Random, root: int, nodes: int) -> TokenTree:
    """A tree of ``nodes`` drafted nodes, best first: likelier nodes get more children."""
    token_ids, parents, scores, edges = [root], [-1], [1.0], {(-1, root)}
    while len(token_ids) <= nodes:
        parent = rng.choices(range(len(token_ids)), weights=[score**1.4 for score in scores])[0]
        token = rng.randrange(len(WORDS))
        if (parent, token) in edges:
            continue
        edges.add((parent, token))
        token_ids.append(token)
        parents.append(parent)
        scores.append(scores[parent] * rng.betavariate(3, 1.3))
    sources = [Source.ROOT, *rng.choices(list(Source)[1:], weights=(6, 3, 2, 1), k=nodes)]
    return TokenTree(np.array(token_ids), np.array(parents), np.array(scores, np.float32), np.array(sources, np.int8))


def chain(rng: random.Random, root: int, nodes: int) -> TokenTree:
    """One branch of ``nodes`` drafted nodes."""
    token_ids = [root, *(rng.randrange(len(WORDS)) for _ in range(nodes))]
    scores = 0.9 ** np.arange(nodes + 1)
    sources = [Source.ROOT, *[Source.CONTEXT] * nodes]
    parents = np.arange(-1, nodes)
    return TokenTree(np.array(token_ids), parents, scores.astype(np.float32), np.array(sources, np.int8))


def random_steps(
    count: int,
    nodes: int = 16,
    seed: int = 0,
    agreement: float = 0.55,
    draft: Callable[[random.Random, int, int], TokenTree] = random_tree,
) -> Iterator[Step]:
    """``count`` steps of one reply; the target goes along with a drafted child with probability ``agreement``."""
    rng = random.Random(seed)
    root, length = 0, 40
    for index in range(count):
        tree = draft(rng, root, nodes)
        children = tree.children()

        def choose(node: int, children: list[dict[int, int]] = children) -> int:
            if children[node] and rng.random() < agreement:
                return next(iter(children[node]))
            return next(token for token in iter(lambda: rng.randrange(len(WORDS)), None) if token not in children[node])

        verdict = accept(tree, choose)
        emitted = (*(int(tree.token_ids[node]) for node in verdict.path[1:]), verdict.next_token)
        kept = [node in verdict.path for node in range(nodes + 1)]
        probs = np.array([rng.betavariate(4, 1.5) if keep else rng.betavariate(0.6, 5) for keep in kept])
        probs[0] = 1
        ranks = np.array([0 if keep else rng.randrange(1, 300) for keep in kept])
        yield Step(
            index=index,
            tree=tree,
            verdict=verdict,
            token_ids=emitted,
            text="".join(token_text(emitted)),
            timings=Timings(0.1 if index == 0 else 0.0, 0.0004, 0.03 + 0.002 * rng.random() + 0.0003 * nodes, 0.0002, 0.0001),
            context_length=length,
            plain_seconds=0.027,
            finish_reason="length" if index == count - 1 else None,
            target=TargetView(probs.astype(np.float32), ranks, round(rng.betavariate(4, 1.5), 4), 0),
        )
        root, length = emitted[-1], length + len(emitted)


def random_trace(count: int, *arguments: Any, **named: Any) -> dict[str, Any]:
    """The trace of `random_steps`."""
    prompt = [{"role": "user", "content": "How do I make a cup of coffee?"}]
    recorder = Recorder({"name": "no model"}, {"decoding": "tree"}, prompt, token_text)
    for step in random_steps(count, *arguments, **named):
        recorder.add(step)
    return recorder.trace()
