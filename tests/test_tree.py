"""Invariants of the token tree, over random trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.accept import accept
from specdec.tree import TokenTree


@st.composite
def trees(draw: st.DrawFn, max_size: int = 24) -> TokenTree:
    """Random valid trees over a small vocabulary."""
    tokens, parents = [draw(st.integers(0, 9))], [-1]
    for _ in range(draw(st.integers(0, max_size - 1))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 9))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(np.array(tokens, np.int64), np.array(parents, np.int64))


@given(trees())
def test_a_random_tree_keeps_every_invariant_and_so_does_every_prefix(tree: TokenTree) -> None:
    for size in range(1, len(tree) + 1):
        tree.prefix(size).check(vocab_size=10)


@given(trees())
def test_depth_is_the_length_of_the_path_and_the_mask_shows_exactly_the_path(tree: TokenTree) -> None:
    depths, mask = tree.depths(), tree.ancestor_mask()
    for node in range(len(tree)):
        path = tree.path(node)
        assert len(path) == depths[node] + 1
        assert np.flatnonzero(mask[node]).tolist() == path


@given(trees(), st.data())
def test_the_verdict_is_the_longest_path_the_target_agrees_with(tree: TokenTree, data: st.DataObject) -> None:
    wanted = [data.draw(st.integers(0, 9)) for _ in range(len(tree))]
    verdict = accept(tree, wanted.__getitem__)
    for parent, node in zip(verdict.path, verdict.path[1:], strict=False):
        assert tree.parents[node] == parent
        assert tree.token_ids[node] == wanted[parent]
    children = tree.children()[verdict.path[-1]]
    assert verdict.next_token == wanted[verdict.path[-1]]
    assert verdict.next_token not in children
    assert verdict.kind == ("recovered" if children else "bonus")


@pytest.mark.parametrize(
    ("token_ids", "parents", "culprit"),
    [
        ([], [], "root"),
        ([1, 2], [-1], "root"),
        ([1, 2], [0, 0], "parents"),
        ([1, 2, 3], [-1, 2, 0], "parents"),
        ([1, 2, 2], [-1, 0, 0], "siblings"),
        ([1, 10], [-1, 0], "vocabulary"),
        ([1, -1], [-1, 0], "vocabulary"),
    ],
)
def test_a_broken_tree_is_named(token_ids: list[int], parents: list[int], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        TokenTree(np.array(token_ids, np.int64), np.array(parents, np.int64)).check(vocab_size=10)
