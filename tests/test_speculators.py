"""Laws of the speculators: what must hold of any tree they propose, after any history."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.speculators import DraftRequest, Proposal, Speculator, TopK, mixer
from specdec.speculators.evidence import empty_evidence, tally_text
from specdec.speculators.hybrid import HybridSpeculator
from specdec.speculators.memory import Memory, Remembered
from specdec.speculators.mixer import WEIGHTS_SHAPE
from specdec.speculators.ngram import NGramSpeculator
from specdec.speculators.storage import load_arrays, save_arrays
from specdec.speculators.vocabulary import ChatFrame, Vocabulary
from specdec.tree import TokenTree

VOCAB = 12
texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60)
budgets = st.integers(0, 40)
relaxed = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def view(rows: int, seed: int, k: int = 6) -> TopK:
    """A made-up target's next tokens after ``rows`` positions."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(VOCAB)[:k] for _ in range(rows)]) if rows else np.zeros((0, k))
    logprobs = np.log(rng.dirichlet(np.ones(k), rows)) if rows else np.zeros((0, k))
    return TopK(ids.astype(np.int32), -np.sort(-logprobs, axis=-1).astype(np.float32))


def same(a: Proposal, b: Proposal) -> bool:
    pairs = ((a.tree.token_ids, b.tree.token_ids), (a.tree.parents, b.tree.parents), (a.tree.scores, b.tree.scores))
    return a.match_length == b.match_length and all(np.array_equal(x, y) for x, y in pairs)


def check(proposal: Proposal, budget: int, root: int, vocab_size: int = VOCAB) -> None:
    tree = proposal.tree
    tree.check(vocab_size)
    assert len(tree) <= budget + 1
    assert tree.token_ids[0] == root
    assert tree.scores is not None
    assert tree.sources is not None
    assert tree.scores[0] == 1
    assert np.all(np.diff(tree.scores) <= 0), "best first"
    assert np.all(tree.scores[1:] <= tree.scores[tree.parents[1:]]), "a child is no likelier than its parent"
    assert np.all(tree.scores > 0)
    for size in range(1, len(tree) + 1):
        tree.prefix(size).check(vocab_size)
    children = np.zeros(len(tree))
    np.add.at(children, tree.parents[1:], tree.scores[1:])
    assert np.all(children <= tree.scores * (1 + 1e-4)), "conditional probabilities of siblings sum to at most 1"


def advance(speculator: Speculator, budget: int, reply: Sequence[int], seed: int = 0) -> None:
    """Passes over ``reply`` with greedy acceptance against it."""
    position = 0
    while position < len(reply):
        tree = speculator.propose(DraftRequest(budget)).tree
        children, path = tree.children(), [0]
        while position + len(path) - 1 < len(reply):
            following = children[path[-1]].get(reply[position + len(path) - 1])
            if following is None:
                break
            path.append(following)
        emitted = reply[position : position + len(path)]
        speculator.observe(tree, path, emitted, view(len(tree), seed + position) if speculator.top_k else None)
        position += len(emitted)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    table = Vocabulary(keys=1 << 10)
    table.learn_adjacency(lambda pairs: view(len(pairs), 1), VOCAB, 0, lambda _: True, batch=5)
    return table


class TestTrees:
    @relaxed
    @given(texts, texts, budgets, st.integers(0, 1000))
    def test_invariants(self, vocabulary: Vocabulary, prompt: list[int], reply: list[int], budget: int, seed: int) -> None:
        memory = Memory(megabytes=1)
        for speculator in (
            NGramSpeculator(5, 6, vocab_size=VOCAB),
            HybridSpeculator(vocab_size=VOCAB, memory=memory, vocabulary=vocabulary),
        ):
            top = view(len(prompt) - 1, seed) if speculator.top_k else None
            speculator.begin(prompt, top, 0)
            check(speculator.propose(DraftRequest(budget)), budget, prompt[-1])
            advance(speculator, budget, reply, seed)
            proposal = speculator.propose(DraftRequest(budget))
            check(proposal, budget, reply[-1])
            assert max(proposal.tree.depths()) <= speculator.gamma
            assert proposal.match_length <= speculator.n

    @relaxed
    @given(texts, texts, budgets, st.integers(0, 30), st.frozensets(st.integers(-1, VOCAB)), st.integers(0, 1000))
    def test_nothing_is_drafted_that_the_pass_could_not_emit(
        self,
        vocabulary: Vocabulary,
        prompt: list[int],
        reply: list[int],
        budget: int,
        depth: int,
        ends: frozenset[int],
        seed: int,
    ) -> None:
        """Not deeper than asked for, nor behind a token that ends the reply; nor that token, which the target emits itself."""
        speculator = HybridSpeculator(vocab_size=VOCAB, vocabulary=vocabulary)
        speculator.begin(prompt, view(len(prompt) - 1, seed), 0)
        advance(speculator, budget, reply, seed)
        proposal = speculator.propose(DraftRequest(budget, depth=depth, ends=ends))
        check(proposal, budget, (prompt + reply)[-1])
        assert max(proposal.tree.depths()) <= depth
        assert ends.isdisjoint(proposal.tree.token_ids[1:].tolist())

    def test_the_budget_goes_to_what_the_pass_can_emit(self) -> None:
        """The end token 0 follows a copied sentence; without it and what comes behind it, another branch gets its nodes."""
        speculator = NGramSpeculator(vocab_size=VOCAB)
        speculator.begin([*[5, 6, 7, 0, 8, 9, 10, 11, 5, 6, 4, 3, 2, 1] * 3, 5], None, 0)
        unaware = speculator.propose(DraftRequest(6)).tree
        assert unaware.token_ids.tolist() == [5, 6, 7, 0, 8, 9, 10]
        aware = speculator.propose(DraftRequest(6, ends=frozenset({0}))).tree
        assert aware.token_ids.tolist() == [5, 6, 7, 4, 3, 2, 1]

    @relaxed
    @given(texts, budgets)
    def test_one_branch_is_a_chain(self, prompt: list[int], budget: int) -> None:
        speculator = NGramSpeculator(vocab_size=VOCAB)
        speculator.begin(prompt, None, 0)
        tree = speculator.propose(DraftRequest(budget, branches=1)).tree
        assert tree.parents.tolist() == list(range(-1, len(tree) - 1))

    @relaxed
    @given(texts)
    def test_budget_zero_is_the_root_alone(self, prompt: list[int]) -> None:
        speculator = NGramSpeculator(vocab_size=VOCAB)
        speculator.begin(prompt, None, 0)
        assert speculator.propose(DraftRequest(0)).tree.token_ids.tolist() == [prompt[-1]]

    @relaxed
    @given(texts, st.integers(1, 20))
    def test_a_smaller_budget_is_a_prefix(self, prompt: list[int], budget: int) -> None:
        speculator = NGramSpeculator(vocab_size=VOCAB)
        speculator.begin(prompt, None, 0)
        small, large = speculator.propose(DraftRequest(budget)).tree, speculator.propose(DraftRequest(budget + 10)).tree
        assert np.array_equal(large.prefix(budget + 1).token_ids, small.token_ids)


class TestContext:
    @relaxed
    @given(texts, texts)
    def test_incremental_is_reindexed(self, prompt: list[int], reply: list[int]) -> None:
        grown, fresh = (NGramSpeculator(vocab_size=VOCAB, learning_rate=0.0) for _ in range(2))
        grown.begin(prompt, None, 0)
        advance(grown, 8, reply)
        fresh.begin(prompt + reply, None, 0)
        assert same(grown.propose(DraftRequest(32)), fresh.propose(DraftRequest(32)))

    @relaxed
    @given(texts, texts, texts)
    def test_rewound_is_fresh(self, prompt: list[int], reply: list[int], other: list[int]) -> None:
        rewound, fresh = (NGramSpeculator(vocab_size=VOCAB, learning_rate=0.0) for _ in range(2))
        rewound.begin(prompt, None, 0)
        advance(rewound, 8, reply)
        rewound.begin(prompt + other, None, 0)
        fresh.begin(prompt + other, None, 0)
        assert same(rewound.propose(DraftRequest(32)), fresh.propose(DraftRequest(32)))

    def test_a_repeated_text_is_continued(self) -> None:
        text = np.random.default_rng(0).permutation(200).tolist()
        speculator = NGramSpeculator(vocab_size=200)
        speculator.begin(text + text[:20], None, 0)
        proposal = speculator.propose(DraftRequest(8))
        assert proposal.match_length == 16
        assert proposal.tree.token_ids.tolist()[1:4] == text[20:23]

    def test_n_bounds_the_match_and_gamma_the_depth(self) -> None:
        text = np.random.default_rng(0).permutation(200).tolist()
        speculator = NGramSpeculator(n=3, gamma=2, vocab_size=200)
        speculator.begin(text + text[:20], None, 0)
        proposal = speculator.propose(DraftRequest(32))
        assert proposal.match_length == 3
        assert max(proposal.tree.depths()) == 2

    @pytest.mark.parametrize("arguments", [{"n": 0}, {"n": 17}, {"gamma": 0}])
    def test_senseless_limits_are_refused(self, arguments: dict[str, int]) -> None:
        with pytest.raises(ValueError, match=next(iter(arguments))):
            NGramSpeculator(**arguments)

    def test_nothing_to_continue(self) -> None:
        with pytest.raises(ValueError, match="begin"):
            NGramSpeculator().propose(DraftRequest(4))


class TestHostile:
    @relaxed
    @given(
        st.lists(st.integers(-5, 2**31 - 1), min_size=1, max_size=30),
        st.lists(st.integers(-(2**40), 2**40), max_size=5),
        st.lists(st.integers(-9, 9), min_size=1, max_size=6),
        st.lists(st.integers(-9, 9), max_size=4),
        st.integers(0, 100),
    )
    def test_stale_and_senseless_observations(
        self, prompt: list[int], emitted: list[int], parents: list[int], path: list[int], seed: int
    ) -> None:
        speculator = HybridSpeculator(vocab_size=VOCAB, memory=Memory(megabytes=1))
        wild = TopK(np.full((9, 4), -7, np.int32), np.full((9, 4), np.nan, np.float32))
        speculator.begin(prompt, view(40, seed), 3)
        speculator.begin(prompt, wild, -4)
        tree = TokenTree(np.arange(len(parents)), np.array(parents))
        for top in (wild, view(len(parents), seed), view(40, seed), None):
            speculator.observe(tree, path, emitted, top)
        speculator.begin([1, 2, 1, 2, 1], None, 0)
        check(speculator.propose(DraftRequest(16)), 16, 1)
        advance(speculator, 16, [2, 1, 3, 1, 2])
        check(speculator.propose(DraftRequest(16)), 16, 2)

    def test_ids_outside_the_vocabulary_are_never_proposed(self) -> None:
        speculator = NGramSpeculator(vocab_size=VOCAB)
        speculator.begin([1, 2, 99, 1, 2, -3, 1, 2], None, 0)
        assert set(speculator.propose(DraftRequest(16)).tree.token_ids.tolist()) <= {1, 2}


class TestLearning:
    def test_calibrates_to_what_it_sees(self) -> None:
        """Context says 1 2 -> 3, the target never agrees: the estimate falls."""
        speculator = HybridSpeculator(vocab_size=VOCAB, learning_rate=0.01)
        speculator.begin([1, 2, 3] * 5 + [1, 2], None, 0)
        before = speculator.propose(DraftRequest(1)).tree
        for wrong in (4, 5, 6, 7, 8, 9, 10, 4, 5, 6, 7, 8):
            speculator.begin([1, 2, 3] * 5 + [1, 2], None, 0)
            speculator.observe(TokenTree.root(2), [0], [wrong], None)
        speculator.begin([1, 2, 3] * 5 + [1, 2], None, 0)
        after = speculator.propose(DraftRequest(1)).tree
        assert before.scores is not None
        assert after.scores is not None
        assert after.scores[1] < before.scores[1]

    def test_the_targets_logits_are_recycled(self) -> None:
        speculator = HybridSpeculator(vocab_size=VOCAB)
        speculator.begin([1, 2, 3], None, 0)
        tree = TokenTree(np.array([3, 5]), np.array([-1, 0]))
        top = TopK(np.array([[4], [7]], np.int32), np.log(np.array([[0.9], [0.9]], np.float32)))
        speculator.observe(tree, [0], [4], top)  # 5 was rejected, yet what follows it is known now
        speculator.observe(TokenTree.root(4), [0], [5], None)
        assert 7 in speculator.propose(DraftRequest(8)).tree.token_ids

    def test_memory_outlives_the_conversation(self) -> None:
        memory = Memory(megabytes=1)
        for expected in (False, True):
            speculator = HybridSpeculator(vocab_size=VOCAB, memory=memory, recycling=False)
            speculator.begin([1, 2, 3], None, 0)
            assert (4 in speculator.propose(DraftRequest(8)).tree.token_ids) is expected
            advance(speculator, 8, [4, 5, 6])

    def test_a_memory_of_nothing_but_this_conversation_changes_no_proposal(self) -> None:
        speculators = [HybridSpeculator(vocab_size=VOCAB, memory=memory) for memory in (None, Memory(megabytes=1))]
        text = np.random.default_rng(0).integers(0, VOCAB, 200).tolist()
        for speculator in speculators:
            speculator.begin(text[:100], view(99, 1), 0)
            advance(speculator, 8, text[100:], seed=3)
        assert same(*(speculator.propose(DraftRequest(24)) for speculator in speculators))


class TestMemory:
    def test_round_trip(self, tmp_path: Path) -> None:
        memory, loaded = Memory(megabytes=1), Memory(megabytes=2)
        speculator = HybridSpeculator(vocab_size=VOCAB, memory=memory, learning_rate=0.01)
        speculator.begin(list(np.random.default_rng(0).integers(0, VOCAB, 300)), view(299, 1), 0)
        advance(speculator, 8, [1, 2, 3, 4] * 3)
        for number in range(Memory.REPLIES + 5):
            memory.note(Remembered(1, number, 3))
        memory.save(tmp_path / "sub" / "memory.npz")
        loaded.load(tmp_path / "sub" / "memory.npz")
        assert len(loaded) == len(memory) > 0
        assert loaded.replies == memory.replies
        assert [reply.tokens for reply in loaded.replies] == list(range(5, Memory.REPLIES + 5))
        proposals = []
        for store in (memory, loaded):
            reader = HybridSpeculator(vocab_size=VOCAB, memory=store)
            reader.begin([1, 2, 3], None, 0)
            proposals.append(reader.propose(DraftRequest(24)))
            store.wipe()
            assert (len(store), store.replies) == (0, [])
        assert same(*proposals)

    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "memory.npz"
        for content in (b"", b"not an archive", b"PK\x03\x04broken"):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"memory\.npz"):
                Memory(megabytes=1).load(path)
        np.savez(path.open("wb"), other=np.zeros(3))
        with pytest.raises(ValueError, match=r"memory\.npz"):
            Memory(megabytes=1).load(path)

    def test_the_cap_holds_and_the_new_survives(self) -> None:
        memory = Memory(megabytes=1)
        size = memory.nbytes
        assert size <= 1 << 20
        rng = np.random.default_rng(0)
        memory.read(rng.integers(0, 40_000, 50_000).tolist())
        memory.read([7, 8, 9, 10, 11])
        assert memory.nbytes == size
        speculator = HybridSpeculator(vocab_size=50_000, memory=memory)
        speculator.begin([7, 8, 9], None, 0)
        assert 10 in speculator.propose(DraftRequest(8)).tree.token_ids

    def test_too_small(self) -> None:
        with pytest.raises(ValueError, match="megabyte"):
            Memory(megabytes=0)

    @relaxed
    @given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, VOCAB)), max_size=200))
    def test_shares_are_a_distribution(self, events: list[tuple[int, int]]) -> None:
        evidence = empty_evidence(16)
        for context, token in events:
            tally_text(evidence, np.array([context, token]), 1, 2, np.array([1]), 0.1)
        assert np.all(evidence.shares >= 0)
        assert np.all(evidence.shares.sum(1) <= 1 + 1e-5)
        if events:
            assert events[-1][1] in evidence.tokens[np.argmax(evidence.touched)]


class EchoWriter:
    """A target that always continues i with i + 1, and ends a message (11) after 10."""

    def start(self, prompt: np.ndarray, rows: int) -> TopK:
        return self.step(np.full(rows, prompt[-1]))

    def step(self, token_ids: np.ndarray) -> TopK:
        ids = np.stack([(token_ids + 1) % VOCAB, (token_ids + 2) % VOCAB], axis=1)
        return TopK(ids.astype(np.int32), np.log(np.tile([[0.99, 0.01]], (len(ids), 1))).astype(np.float32))


class TestVocabulary:
    FRAME = ChatFrame((0, 1), (11, 2), (11, 3), frozenset({11}))

    def test_built_saved_loaded_resumed(self, tmp_path: Path) -> None:
        table = Vocabulary(keys=1 << 10)
        calls: list[float] = []

        def twice(share: float) -> bool:
            calls.append(share)
            return len(calls) <= 2

        table.learn_adjacency(lambda pairs: view(len(pairs), 1), VOCAB, 0, twice, batch=4)
        assert table.adjacent == 8
        table.save(tmp_path / "vocabulary.npz")
        resumed = Vocabulary.load(tmp_path / "vocabulary.npz", keys=1 << 10)
        resumed.learn_adjacency(lambda pairs: view(len(pairs), 1), VOCAB, 0, lambda _: True, batch=4)
        assert resumed.adjacent == VOCAB
        resumed.self_talk(EchoWriter(), self.FRAME, lambda _: True, rounds=2, rows=3, length=40)
        assert resumed.rounds == 2
        speculator = HybridSpeculator(vocab_size=VOCAB, vocabulary=resumed)
        speculator.begin([4, 5], None, 0)
        assert speculator.propose(DraftRequest(8)).tree.token_ids.tolist()[1] == 6

    def test_a_stopped_round_is_done_again(self) -> None:
        table = Vocabulary(keys=1 << 10)
        table.self_talk(EchoWriter(), self.FRAME, lambda share: share < 0.3, rounds=1, rows=2, length=20)
        assert table.rounds == 0

    def test_a_damaged_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "v.npz").write_bytes(b"PK")
        with pytest.raises(ValueError, match=r"v\.npz"):
            Vocabulary.load(tmp_path / "v.npz")

    @pytest.mark.parametrize(
        ("array", "change"),
        [
            ("logits.keys", lambda keys: np.stack([keys, keys], axis=1)),
            ("logits.keys", lambda keys: keys.astype(np.float64)),
            ("logits.tokens", lambda tokens: tokens[:, :7]),
            ("logits.tokens", lambda tokens: tokens * np.nan),
            ("logits.shares", lambda shares: -shares),
            ("logits.seen", lambda seen: -seen),
            ("logits.seen", lambda seen: seen * 1j),
            ("done", lambda done: -1 - done),
            ("done", lambda done: np.append(done, 1)),
        ],
    )
    def test_an_array_of_another_shape_or_kind_is_refused(
        self, tmp_path: Path, array: str, change: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Compiled code reads the arrays without checking bounds."""
        table = Vocabulary(keys=16)
        table.study(np.array([1, 2]), view(2, 0), 0)
        table.save(tmp_path / "v.npz")
        arrays = load_arrays(tmp_path / "v.npz")
        assert Vocabulary.load(tmp_path / "v.npz").logits.clock[0] > 0
        save_arrays(tmp_path / "v.npz", {**arrays, array: change(arrays[array])})
        with pytest.raises(ValueError, match=r"v\.npz"):
            Vocabulary.load(tmp_path / "v.npz")


class TestPrior:
    @pytest.mark.parametrize(
        "weights",
        [np.zeros((3, 16), np.float32), np.zeros(WEIGHTS_SHAPE, np.int32), np.full(WEIGHTS_SHAPE, np.nan, np.float32)],
    )
    def test_weights_of_another_shape_or_kind_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: np.ndarray
    ) -> None:
        np.save(tmp_path / "prior.npy", weights)
        monkeypatch.setattr(mixer, "PRIOR", tmp_path / "prior.npy")
        with pytest.raises(ValueError, match=r"prior\.npy"):
            HybridSpeculator()


@pytest.mark.parametrize("logprobs", [np.zeros((3, 4), np.float32), np.zeros(3, np.float32)])
def test_a_view_has_a_log_probability_for_each_token(logprobs: np.ndarray) -> None:
    with pytest.raises(ValueError, match="logprobs"):
        TopK(np.zeros((3, 8), np.int32), logprobs)


class TestCost:
    @pytest.mark.measured
    def test_does_not_grow_with_the_context(self) -> None:
        """A hundred times the context costs at most four times the proposal (measured: about the same)."""
        seconds = []
        for size in (500, 50_000):
            speculator = NGramSpeculator(vocab_size=1000)
            speculator.begin(np.random.default_rng(0).zipf(1.3, size).clip(0, 999).tolist(), None, 0)
            speculator.propose(DraftRequest(64))
            runs = []
            for _ in range(15):
                start = time.perf_counter()
                speculator.propose(DraftRequest(64))
                runs.append(time.perf_counter() - start)
            seconds.append(min(runs))
        assert seconds[1] < 4 * seconds[0] + 0.001
