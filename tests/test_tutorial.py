"""What the well-known tutorial version of this engine gets wrong, a test for each point.

The README's section of the same name refers to these tests.
"""

from __future__ import annotations

import itertools
import math

import torch
from test_laws import ids, oracle
from toys import ARCHITECTURES, OracleSpeculator, tiny_engine, tiny_model, tokenizer
from transformers import LogitsProcessorList

from specdec.accept import accept
from specdec.engine import SpeculativeEngine
from specdec.sampling import Sampler
from specdec.speculators import DraftRequest, Proposal
from specdec.tree import TokenTree

PROMPT = "one two three one two"


def test_the_kv_of_rejected_tokens_is_rolled_back() -> None:
    """Wrong there: rejected tokens stay in the cache, and every later token attends to them."""
    engine = tiny_engine()
    plain = ids(list(engine.stream(PROMPT, decoding="plain", max_new_tokens=20)))
    chat = oracle(engine, plain, honesty=0.5)
    list(engine.stream(PROMPT, conversation=chat, budget=12, max_new_tokens=20))
    assert chat.token_ids == (tokenizer()(PROMPT)["input_ids"] + plain)[:-1]
    fresh = engine.target.new_cache()
    engine.target.prefill(fresh, chat.token_ids)
    kept, recomputed = (cache.slabs[0].keys[:, :, : fresh.length] for cache in (chat.cache, fresh))
    torch.testing.assert_close(kept, recomputed, atol=1e-5, rtol=1e-5)


def test_the_last_committed_token_is_fed_so_that_logits_are_not_off_by_one() -> None:
    """Wrong there: drafts are verified without the token before them, so each is judged by its successor's logits."""
    engine = tiny_engine()
    prompt = tokenizer()(PROMPT)["input_ids"]
    step = next(engine.stream(prompt, decoding="plain", max_new_tokens=1))
    assert step.tree.token_ids.tolist() == [prompt[-1]]
    assert step.context_length == len(prompt) - 1
    with torch.inference_mode():
        assert step.token_ids[0] == int(engine.model(torch.tensor([prompt])).logits[0, -1].argmax())


def test_after_a_rejection_the_token_follows_the_targets_distribution_without_the_rejected_one() -> None:
    """Wrong there: the residual is taken between log-probabilities, which is no distribution at all.

    A chain of one draft: over 4,000 positions the emitted token must follow p, whether or not the draft was kept. Each
    share is within 0.03, four standard deviations.
    """
    logits = torch.tensor([1.0, 0.2, -0.4, 0.6])
    sampler, tree, counts, accepted = Sampler(LogitsProcessorList(), seed=4), TokenTree.chain([0, 3]), torch.zeros(4), 0
    for position in range(4000):
        verdict = accept(tree, lambda _, p=position: sampler.choose(logits, torch.empty(1, p, dtype=torch.int64)))
        emitted = 3 if len(verdict.path) > 1 else verdict.next_token
        counts[emitted] += 1
        accepted += len(verdict.path) > 1
    p = torch.softmax(logits, 0)
    assert torch.all((counts / 4000 - p).abs() < 0.03)
    assert abs(accepted / 4000 - p[3]) < 0.03


def test_a_deterministic_branch_is_kept_with_the_targets_probability_whatever_the_draft_believed() -> None:
    """Wrong there: one n-gram frequency stands in as q for a whole tail, and p / q decides."""
    engine = tiny_engine()
    arguments = {"max_new_tokens": 30, "do_sample": True, "seed": 2}
    plain = ids(list(engine.stream(PROMPT, decoding="plain", **arguments)))

    class Boastful(OracleSpeculator):
        def propose(self, request: DraftRequest) -> Proposal:
            proposal = super().propose(request)
            tree = proposal.tree
            scores = torch.full((len(tree),), 1.0).numpy()  # sure of everything
            return Proposal(TokenTree(tree.token_ids, tree.parents, scores))

    chat = engine.conversation()
    chat.speculator = Boastful(plain, seed=3, honesty=0.3)
    assert ids(list(engine.stream(PROMPT, conversation=chat, budget=12, **arguments))) == plain


def test_the_draws_of_a_reply_are_independent_not_the_same_noise_at_every_call() -> None:
    """Wrong there: the generator is re-seeded on each call, so every position draws with the same noise."""
    sampler, logits = Sampler(LogitsProcessorList(), seed=1), torch.zeros(16)
    draws = [sampler.choose(logits, torch.empty(1, position, dtype=torch.int64)) for position in range(400)]
    repeats = sum(a == b for a, b in itertools.pairwise(draws))
    assert repeats < 25 + 5 * math.sqrt(25)  # 1 in 16 by chance, five standard deviations


def test_a_recovered_token_is_emitted_once() -> None:
    """Wrong there: the token drawn after a rejection is appended twice."""
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES["llama"]), tokenizer())
    plain = ids(list(engine.stream(PROMPT, decoding="plain", max_new_tokens=24)))
    steps = list(engine.stream(PROMPT, conversation=oracle(engine, plain, honesty=0.4), budget=8, max_new_tokens=24))
    assert any(step.verdict.kind == "recovered" for step in steps)
    for step in steps:
        path = [int(step.tree.token_ids[node]) for node in step.verdict.path[1:]]
        assert list(step.token_ids) == [*path, step.verdict.next_token][: len(step.token_ids)]
    assert ids(steps) == plain
