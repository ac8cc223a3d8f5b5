"""What cannot take a tree is refused by name; what the target tells about a tree is what a plain pass would tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import ARCHITECTURES, tiny_engine, tiny_model
from transformers import BloomConfig, FalconConfig, MambaConfig, MistralConfig, Phi3Config, PreTrainedConfig

from specdec.accept import Verdict
from specdec.logits import fetch, target_view, top_tokens
from specdec.target import Cancelled, TargetModel, UnsupportedModelError
from specdec.tree import TokenTree

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
UNSUPPORTED: dict[str, PreTrainedConfig] = {
    "sliding attention": MistralConfig(**SMALL, intermediate_size=32, num_key_value_heads=2, sliding_window=8),
    "recurrent state|linear attention": MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
    "takes no 4-D mask": FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, new_decoder_architecture=False
    ),
    "4-D mask|position_ids": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_an_unsupported_model_is_refused_by_name_with_the_reason_and_a_remedy(reason: str) -> None:
    model = tiny_model(UNSUPPORTED[reason])
    with pytest.raises(UnsupportedModelError, match=reason) as refusal:
        TargetModel(model)
    assert type(model).__name__ in str(refusal.value)
    assert "Use a model" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_model_in_training_mode_is_refused_for_its_dropout() -> None:
    with pytest.raises(UnsupportedModelError, match=r"training mode.*eval\(\)"):
        TargetModel(tiny_model(ARCHITECTURES["gpt2"]).train())


def test_a_window_as_long_as_the_context_hides_nothing() -> None:
    grouped = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64}
    TargetModel(tiny_model(MistralConfig(**grouped, sliding_window=64)))
    with pytest.raises(UnsupportedModelError, match="sliding attention"):
        TargetModel(tiny_model(MistralConfig(**grouped, sliding_window=63)))


def test_long_rotary_embeddings_are_used_up_to_the_length_where_they_turn() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 48}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    sizes = {**SMALL, "intermediate_size": 32, "max_position_embeddings": 128, "pad_token_id": None}
    config = Phi3Config(**sizes, original_max_position_embeddings=48, rope_parameters=rope)
    assert TargetModel(tiny_model(config)).context_limit == 48


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_top_tokens_and_view_agree_with_a_full_softmax(architecture: str) -> None:
    target = tiny_engine(architecture).target
    cache = target.new_cache()
    target.prefill(cache, [4, 5, 6])
    tree = TokenTree(np.array([7, 8, 9, 8, 10]), np.array([-1, 0, 0, 2, 3]))
    logits = target.verify(cache, tree)
    logprobs = torch.log_softmax(logits, -1)
    top = top_tokens(logits, 8)
    reference = logprobs.topk(8, dim=-1)
    assert top.token_ids.tolist() == reference.indices.tolist()
    np.testing.assert_allclose(top.logprobs, reference.values.numpy(), atol=1e-5)
    *_, fetched = fetch(logits, (torch.zeros(5), torch.tensor([20, 21, 22, 23, 24])), 3, tree)
    assert fetched is not None
    for last, token in ((1, 21), (3, 23)):  # a leaf, and a node with children
        verdict = Verdict(tuple(tree.path(last)), token, "bonus")
        view = target_view(logits, tree, verdict)
        places = [*zip(range(1, 5), tree.parents[1:], tree.token_ids[1:], strict=True), (5, last, token)]
        for node, parent, token_id in places:
            row = logprobs[parent]
            own = row[token_id]
            assert [*view.probs, view.next_prob][node] == pytest.approx(own.exp().item(), rel=1e-4)
            assert [*view.ranks, view.next_rank][node] == int((row > own).sum())
        in_one_transfer = fetched(verdict)
        np.testing.assert_allclose(in_one_transfer.probs, view.probs, rtol=1e-4)
        assert in_one_transfer.ranks.tolist() == view.ranks.tolist()
        assert in_one_transfer.next_prob == pytest.approx(view.next_prob, rel=1e-4)
        assert in_one_transfer.next_rank == view.next_rank


@settings(deadline=None)
@given(st.integers(1, 700), st.integers(1, 20), st.integers(0, 2**31))
def test_top_tokens_finds_the_k_best_of_any_vocabulary(vocab: int, k: int, seed: int) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))
    top = top_tokens(logits, k)
    assert top.token_ids.tolist() == logits.topk(min(k, vocab), dim=-1).indices.tolist()


@pytest.mark.parametrize("k", [0, 1, 6, 5000])
def test_one_transfer_brings_choices_and_top_tokens_unchanged(k: int) -> None:
    logits = 5 * torch.randn(9, 3000, generator=torch.Generator().manual_seed(2))
    chosen, top, view = fetch(logits, logits.max(-1), k)
    assert view is None
    assert chosen == logits.argmax(-1).tolist()
    reference = torch.log_softmax(logits, -1).topk(min(k, 3000), dim=-1)
    assert top.token_ids.tolist() == logits.topk(min(k, 3000), dim=-1).indices.tolist()
    np.testing.assert_allclose(top.logprobs, reference.values.numpy(), atol=1e-5)
    assert fetch(logits, None, k)[0] == []


def test_prefill_in_chunks_equals_one_pass_and_stops_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_engine().target
    prompt = [4 + i % 50 for i in range(100)]
    whole = target.new_cache()
    top = target.prefill(whole, prompt, top_k=3)
    monkeypatch.setattr("specdec.target.PREFILL_CHUNK", 32)
    chunked = target.new_cache()
    top_chunked = target.prefill(chunked, prompt, top_k=3)
    torch.testing.assert_close(whole.slabs[0].keys[:, :, :100], chunked.slabs[0].keys[:, :, :100], atol=1e-5, rtol=1e-5)
    assert top.token_ids.tolist() == top_chunked.token_ids.tolist()
    stopped, polls = target.new_cache(), iter([False, False, True])
    with pytest.raises(Cancelled):
        target.prefill(stopped, prompt, cancelled=lambda: next(polls))
    assert stopped.length == 64
