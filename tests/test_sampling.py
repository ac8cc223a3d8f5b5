"""The draw: exact in distribution, and a function of (seed, position) alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import tiny_engine
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

from specdec.sampling import FrequencyPenaltyProcessor, PresencePenaltyProcessor, Sampler, gumbel_noise


def test_draws_follow_the_softmax() -> None:
    """Chi-square over 20,000 positions and 8 tokens: fails by chance once in 10,000 seeds (and the seed is fixed)."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0])
    sampler, draws = Sampler(LogitsProcessorList(), seed=11), 20_000
    counts = torch.zeros(8)
    for position in range(draws):
        counts[sampler.choose(logits, torch.empty(1, position, dtype=torch.int64))] += 1
    expected = torch.softmax(logits, 0) * draws
    assert ((counts - expected) ** 2 / expected).sum() < 29.9  # 7 degrees of freedom


def test_noise_of_neighbouring_seeds_positions_and_tokens_is_unrelated() -> None:
    """Correlations over 20,000 pairs: |r| < 0.04 is more than five standard deviations."""
    tokens = torch.arange(20_000)
    base = gumbel_noise(1, 5, tokens)
    for other in (gumbel_noise(2, 5, tokens), gumbel_noise(1, 6, tokens), base.roll(1), gumbel_noise(-1, 5, tokens)):
        assert abs(torch.corrcoef(torch.stack([base, other]))[0, 1]) < 0.04
    assert abs(base.mean() - 0.5772) < 0.05
    assert abs(base.var() - torch.pi**2 / 6) < 0.1


def test_the_same_seed_and_position_give_the_same_noise_for_any_subset_of_tokens() -> None:
    tokens = torch.arange(1000)
    subset = torch.tensor([3, 999, 500])
    assert torch.equal(gumbel_noise(9, 4, tokens)[subset], gumbel_noise(9, 4, subset))


def test_a_token_that_a_processor_removed_is_never_drawn() -> None:
    sampler = Sampler(LogitsProcessorList([TopKLogitsWarper(2)]), seed=0)
    logits = torch.tensor([0.0, 0.1, 0.2, 0.3])
    drawn = {sampler.choose(logits, torch.zeros(1, n, dtype=torch.int64)) for n in range(200)}
    assert drawn == {2, 3}


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 0},
        {"temperature": 1.3, "top_k": 40, "min_p": 0.05},
        {"typical_p": 0.8, "epsilon_cutoff": 1e-3, "top_k": 0},
        {"repetition_penalty": 1.3, "temperature": 0.7, "top_k": 0},
        {"repetition_penalty": 1.1, "presence_penalty": 0.9, "top_k": 20, "top_p": 0.8},
        {"frequency_penalty": 0.7, "top_k": 20},
        {"eta_cutoff": 1e-3, "suppress_tokens": [7, 8], "renormalize_logits": True, "remove_invalid_values": True, "top_k": 0},
    ],
    ids=lambda arguments: "-".join(arguments) if isinstance(arguments, dict) else None,
)
def test_all_draws_at_once_are_the_draws_one_by_one(arguments: dict[str, Any], seed: int | None) -> None:
    """Bit for bit, so that ties break alike; logits in bfloat16, where there are many."""
    arguments = dict(arguments)
    penalties = {"presence_penalty": PresencePenaltyProcessor, "frequency_penalty": FrequencyPenaltyProcessor}
    own = LogitsProcessorList(
        kind(arguments.pop(name), prompt_length=5) for name, kind in penalties.items() if name in arguments
    )
    model = tiny_engine().model
    config, _ = model._prepare_generation_config(None, do_sample=True, **arguments)
    model._prepare_special_tokens(config)
    processors = model._get_logits_processor(config, input_ids_seq_length=5, logits_processor=own, model_kwargs={})
    sampler = Sampler(processors, seed)
    assert sampler.draws_at_once
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(64, 5000, generator=generator)).bfloat16().float()
    for size in (1, 2, 64):
        positions = [5 + node // 2 for node in range(size)]
        texts = [logits[node].topk(position).indices for node, position in enumerate(positions)]  # likely ones, so it matters
        one_by_one = [sampler.choose(row, text[None]) for row, text in zip(logits, texts, strict=False)]
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=5000)
        _, tokens = sampler.draw(logits[:size], positions, padded)
        assert tokens.tolist() == one_by_one


def test_the_noise_of_a_position_is_made_once_for_all_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("specdec.sampling._gumbel", lambda low, high, token_ids: made.append(low) or low * 0.0)
    texts = torch.empty(64, 0, dtype=torch.int64)
    Sampler(LogitsProcessorList(), seed=1).draw(torch.randn(64, 100), [7 + node % 5 for node in range(64)], texts)
    assert [len(low) for low in made] == [5]


@pytest.mark.parametrize("arguments", [{"no_repeat_ngram_size": 3}, {"min_length": 20}])
def test_what_looks_at_the_order_of_the_text_or_a_growing_length_is_not_drawn_at_once(arguments: dict[str, object]) -> None:
    model = tiny_engine().model
    config, _ = model._prepare_generation_config(None, do_sample=True, eos_token_id=0, **arguments)
    model._prepare_special_tokens(config)
    processors = model._get_logits_processor(config, input_ids_seq_length=5, model_kwargs={})
    assert not Sampler(processors, 1).draws_at_once


def test_a_penalty_for_one_text_only_is_not_drawn_for_many_at_once() -> None:
    def penalised(ignored: int | torch.Tensor) -> Sampler:
        return Sampler(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=ignored)]), 1)

    assert penalised(5).draws_at_once
    assert not penalised(torch.tensor([5])).draws_at_once


def test_presence_penalty_counts_a_token_once_and_only_in_the_reply() -> None:
    penalty = PresencePenaltyProcessor(1.5, prompt_length=2)
    scores = penalty(torch.tensor([[0, 1, 2, 2, 3]]), torch.zeros(1, 5))
    assert scores.tolist() == [[0.0, 0.0, -1.5, -1.5, 0.0]]
    assert penalty(torch.tensor([[0, 1]]), torch.zeros(1, 5)).tolist() == [[0.0] * 5]


def test_frequency_penalty_counts_a_token_as_often_as_the_reply_has_it() -> None:
    penalty = FrequencyPenaltyProcessor(1.5, prompt_length=2)
    scores = penalty(torch.tensor([[0, 1, 2, 2, 3]]), torch.ones(1, 5))
    assert scores.tolist() == [[1.0, 1.0, -2.0, -0.5, 1.0]]
    assert penalty(torch.tensor([[0, 1]]), torch.ones(1, 5)).tolist() == [[1.0] * 5]
