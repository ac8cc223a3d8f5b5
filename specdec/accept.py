"""Lossless acceptance: which path of a verified tree the target keeps, and the token after it.

A deterministic tree is walked by asking the target for its own next token, node by node: if a child carries that token,
descend, else emit it and stop. The emitted text is what plain decoding would have said, whatever was drafted. A node's
children are accepted with the sum of their target probabilities, and no lossless rule does better for deterministic
candidates (for a chain this is speculative sampling, arXiv 2211.17192, with q a point mass).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Verdict:
    """The kept nodes, root first, and the target's own token after the last of them.

    ``kind`` tells why that token ends the path: ``bonus`` after a fully accepted one (its last node has no children),
    ``recovered`` after a rejection (it has children, all with other tokens). Nothing follows a token that ends the text: a
    path that ends with one has that token again as its ``next_token``, which is never emitted.
    """

    path: tuple[int, ...]
    next_token: int
    kind: Literal["bonus", "recovered"]


def accept(tree: TokenTree, choose: Callable[[int], int], ends: Collection[int] = ()) -> Verdict:
    """Walk ``tree`` from the root; ``choose(node)`` is the target's next token after ``node``.

    ``choose`` is called once per kept node, in path order, so that the caller may prepare each one lazily. The walk stops at a
    node that carries one of ``ends``: what the target would say after the end of a text is never asked.
    """
    children = tree.children()
    path = [0]
    token = choose(0)
    while token in children[path[-1]]:
        path.append(children[path[-1]][token])
        if token in ends:
            break
        token = choose(path[-1])
    return Verdict(tuple(path), token, "recovered" if children[path[-1]] else "bonus")
