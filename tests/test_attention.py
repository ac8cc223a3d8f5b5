"""Folded attention is attention: what transformers' own function computes, with fewer reads; the model is left as it was."""

from __future__ import annotations

import pytest
import torch
from toys import ARCHITECTURES, tiny_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specdec.attention import FOLDED, folded, folded_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [4, 12], ids=["a head a group", "three heads a group"])
@pytest.mark.parametrize("queries", [1, 2, 7, 11, 40, 400])
def test_it_is_transformers_own_attention(queries: int, heads: int, batch: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    length, module = 450, torch.nn.Module()
    module.num_key_value_groups = heads // 4  # type: ignore[assignment]
    query, key, value = (torch.randn(batch, *shape, 16, dtype=dtype) for shape in ((heads, queries), (4, length), (4, length)))
    hidden = torch.rand(batch, 1, queries, length) < 0.5
    hidden[..., 0] = False
    additive = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    masks = [additive, ~hidden, *([None] if queries == 1 else [])]
    for mask in masks:
        for scaling in (None, 0.3):
            mine, _ = folded_attention(module, query, key, value, mask, scaling=scaling)
            theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
            assert mine.shape == (batch, queries, heads, 16)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 0.02)


def test_a_model_attends_so_during_a_pass_only_and_where_another_way_was_chosen_not_at_all() -> None:
    model = tiny_model(ARCHITECTURES["llama"])
    with folded(model):
        assert model.config._attn_implementation == FOLDED
    with pytest.raises(RuntimeError, match="a failed pass"), folded(model):
        raise RuntimeError("a failed pass")
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with folded(model):
        assert model.config._attn_implementation == "eager"
