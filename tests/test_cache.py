"""Law 4: commit == recompute. Any sequence of passes, commits and rewinds leaves what a fresh prefill would compute."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree import trees
from toys import ARCHITECTURES, CONTEXT, PATHS, replay_passes, tiny_engine, tiny_model, tokenizer

from specdec.cache import BLOCK, STRIDE, LayerShape, TreeCache
from specdec.engine import SpeculativeEngine
from specdec.tree import TokenTree

CPU = torch.device("cpu")
SHAPE = LayerShape(CPU, torch.float32, (1, 2), (1, 2))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_commit_and_rewind_equal_a_fresh_prefill(architecture: str, path: str, data: st.DataObject) -> None:
    target = tiny_engine(architecture, path).target
    cache, committed = target.new_cache(), [7, 8, 9]
    target.prefill(cache, committed)
    for _ in range(data.draw(st.integers(1, 4))):
        tree = data.draw(trees(max_size=12))
        logits = target.verify(cache, tree).clone()
        kept_nodes = tree.path(data.draw(st.integers(0, len(tree) - 1)))
        fresh = target.new_cache()
        text = committed + tree.token_ids[kept_nodes].tolist()
        target.prefill(fresh, text[:-1])
        torch.testing.assert_close(
            logits[kept_nodes[-1]], target.verify(fresh, TokenTree.root(text[-1]))[0], atol=1e-4, rtol=1e-4
        )
        fresh.commit([0])
        cache.commit(kept_nodes)
        committed = text
        kept = data.draw(st.integers(1, cache.length))
        for mine, recomputed in zip(cache.slabs[0], fresh.slabs[0], strict=True):
            torch.testing.assert_close(mine[:, :, : cache.length], recomputed[:, :, : fresh.length], atol=1e-5, rtol=1e-5)
        cache.rewind(kept)
        del committed[kept:]


def test_nothing_is_moved_when_the_path_is_already_in_place() -> None:
    cache = TreeCache([SHAPE], 100)
    states = torch.arange(12.0).view(1, 1, 6, 2)
    cache.write(0, states, states)
    before = cache.slabs[0].keys.clone()
    cache.commit([0, 1, 2])
    assert cache.length == 3
    assert torch.equal(cache.slabs[0].keys[:, :, :6], before[:, :, :6])


def test_only_the_accepted_rows_move_and_the_prefix_stays() -> None:
    cache = TreeCache([SHAPE] * 2, 100)
    for layer in range(2):
        states = torch.arange(12.0).view(1, 1, 6, 2) + 100 * layer
        cache.write(layer, states, states)
    cache.commit([0, 2, 5])
    for layer in range(2):
        assert cache.slabs[0].keys[layer, 0, :3, 0].tolist() == [0 + 100 * layer, 4 + 100 * layer, 10 + 100 * layer]


def test_layers_of_one_device_and_shape_share_a_slab_and_a_path_is_kept_in_every_slab() -> None:
    other = LayerShape(CPU, torch.float32, (1, 2), (1, 3))
    elsewhere = LayerShape(torch.device("meta"), torch.float32, (1, 2), (1, 2))
    cache = TreeCache([SHAPE, other, elsewhere, other], 100)
    assert cache.places == [(0, 0), (1, 0), (2, 0), (1, 1)]
    for layer, shape in enumerate((SHAPE, other, elsewhere, other)):
        states = (torch.arange(5.0).view(1, 1, 5, 1) + 100 * layer).to(shape.device)
        keys, values = cache.write(layer, states.expand(1, 1, 5, shape.keys[1]), states.expand(1, 1, 5, shape.values[1]))
        assert (keys.device, values.device) == (shape.device, shape.device)
        assert values.shape == (1, 1, 5, shape.values[1])
    cache.commit([0, 2, 4])
    assert cache.slabs[0].keys[0, 0, :3, 0].tolist() == [0, 2, 4]
    assert cache.slabs[1].values[:, 0, :3, 0].tolist() == [[100, 102, 104], [300, 302, 304]]
    assert [slab.keys.device.type for slab in cache.slabs] == ["cpu", "cpu", "meta"]


def test_a_conversation_that_ends_gives_its_memory_back_at_once() -> None:
    cache = TreeCache([SHAPE], 100)
    cache.write(0, torch.ones(1, 1, 5, 2), torch.ones(1, 1, 5, 2))
    keys = weakref.ref(cache.slabs[0].keys)
    del cache
    assert keys() is None


def test_the_cache_grows_by_doubling_and_never_past_its_maximum() -> None:
    cache = TreeCache([SHAPE], BLOCK + 10)
    for _ in range(3):
        states = torch.ones(1, 1, 100, 2)
        cache.write(0, states, states)
        cache.commit(range(100))
    assert cache.slabs[0].capacity == BLOCK
    states = torch.ones(1, 1, BLOCK + 10 - 300, 2)
    cache.write(0, states, states)
    assert cache.slabs[0].capacity == BLOCK + 10
    assert bool((cache.slabs[0].keys[:, :, :300] == 1).all())
    with pytest.raises(ValueError, match="maximum"):
        cache.write(0, torch.ones(1, 1, BLOCK, 2), torch.ones(1, 1, BLOCK, 2))


@pytest.mark.parametrize(("committed", "extent"), [(0, STRIDE), (STRIDE - 5, STRIDE), (STRIDE, STRIDE + 10)])
def test_a_trees_pass_sees_a_multiple_of_the_stride_where_there_is_room(committed: int, extent: int) -> None:
    cache = TreeCache([SHAPE], STRIDE + 10)
    states = torch.ones(1, 1, committed + 5, 2)
    cache.write(0, states[:, :, 5:], states[:, :, 5:])
    cache.commit(range(committed))
    with cache.extended(5) as seen:
        keys, values = cache.write(0, states[:, :, :5], states[:, :, :5])
    assert keys.shape[2] == values.shape[2] == seen == extent
    assert not keys[:, :, committed + 5 :].any(), "numbers, and not whatever was there"
    keys, _ = cache.write(0, states[:, :, :1], states[:, :, :1])
    assert keys.shape[2] == committed + 1, "a pass without a mask sees what there is"


def test_a_rewind_beyond_what_is_committed_is_refused() -> None:
    cache = TreeCache([SHAPE], 100)
    with pytest.raises(ValueError, match="rewind"):
        cache.rewind(1)


def test_a_tree_node_does_not_see_its_siblings() -> None:
    """Changing a rejected branch changes no logits on the accepted one."""
    target = tiny_engine().target
    logits = []
    for other in (50, 60):
        cache = target.new_cache()
        target.prefill(cache, list(range(10, 10 + CONTEXT // 8)))
        tree = TokenTree(np.array([5, other, 6, other, 7]), np.array([-1, 0, 0, 1, 2]))
        logits.append(target.verify(cache, tree)[[0, 2, 4]])
    torch.testing.assert_close(logits[0], logits[1], atol=0, rtol=0)


@pytest.mark.parametrize("path", PATHS)
def test_a_draft_that_overflows_float16_reaches_no_node_that_does_not_see_it(path: str) -> None:
    model = tiny_model(ARCHITECTURES["llama"]).half()
    overflowing = 50
    with torch.no_grad():
        model.get_input_embeddings().weight[overflowing] = torch.inf
    engine = SpeculativeEngine(model, tokenizer(), static=path == "replayed")
    if path == "replayed":
        replay_passes(engine.target)
    target = engine.target
    cache = target.new_cache()
    target.prefill(cache, list(range(10, 30)))
    tree = TokenTree(np.array([5, overflowing, 6, overflowing, 7]), np.array([-1, 0, 0, 1, 2]))
    logits = target.verify(cache, tree).clone()
    assert not torch.isfinite(logits[1]).any()
    assert torch.isfinite(logits[[0, 2, 4]]).all()
    cache.commit([0, 2, 4])
    assert torch.isfinite(target.verify(cache, TokenTree.root(8))).all(), "nor do the passes after it"
