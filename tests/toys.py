"""Toy models, a toy tokenizer and toy speculators for tests: nothing is downloaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from specdec.engine import SpeculativeEngine
from specdec.sequence import Sequence as Running
from specdec.speculators import DraftRequest, Proposal, TopK
from specdec.static import StaticPass
from specdec.target import TargetModel
from specdec.tree import TokenTree

CONTEXT = 192
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
EOS = 0


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte level, no merges: every byte a token, so any character beyond ASCII comes in parts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(SPECIAL + alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", extra_special_tokens=SPECIAL[1:])
    fast.chat_template = TEMPLATE
    return fast


VOCAB = len(SPECIAL) + 256
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}

ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_GROUPED),
    "qwen2": Qwen2Config(**_GROUPED),
    "qwen3": Qwen3Config(**_GROUPED, head_dim=8),
    "mistral": MistralConfig(**_GROUPED, sliding_window=None),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, eos_token_id=EOS, initializer_range=0.3
    ),
    "gpt-neox": GPTNeoXConfig(**_SIZES),
    "phi3": Phi3Config(**_GROUPED),
    "olmo2": Olmo2Config(**_GROUPED),
}


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A random float32 model of the given shape; dropout off."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)  # which the model keeps, and may change
    return model.eval()


PATHS = ("exact", "replayed")
"""How trees are verified: as they are, or in fixed shapes by replaying kernels as a CUDA graph does."""


@cache
def tiny_engine(architecture: str = "llama", path: str = "exact") -> SpeculativeEngine:
    """An engine over a tiny random model with the default speculator."""
    engine = SpeculativeEngine(tiny_model(ARCHITECTURES[architecture]), tokenizer(), static=path == "replayed")
    if path == "replayed":
        replay_passes(engine.target)
    return engine


def unhurried(engine: SpeculativeEngine) -> None:
    """Let every pass take the same time, whatever its width, so that drafting pays on any machine."""
    run = engine.target.run

    def at_leisure(spans: Any) -> Any:
        time.sleep(0.005)
        return run(spans)

    engine.target.run = at_leisure  # type: ignore[method-assign]


def replay_passes(target: TargetModel) -> StaticPass:
    """Let the static passes of ``target`` be recorded once and replayed from then on."""
    static = target._static
    assert static is not None

    def recorded(count: int, width: int, length: int) -> Recording:
        return Recording(lambda: static._pass(count, width, length))

    static._capture, static._captured = True, recorded  # type: ignore[assignment, method-assign]
    return static


class Recording(TorchDispatchMode):
    """A CUDA graph for the CPU: the kernels of one call with their arguments, launched again without any Python between.

    A tensor that the call itself did not make is the same memory at every replay. Fails if a kernel's result went to the host.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.launches: list[tuple[Any, Any, Any, Any]] = []
        with self:
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), "a wait for the device"
        result = func(*args, **(kwargs or {}))
        self.launches.append((func, args, kwargs or {}, result))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        made: dict[int, Any] = {}
        for func, args, kwargs, result in self.launches:
            args, kwargs = tree_map(lambda value: made.get(id(value), value), (args, kwargs))
            again = func(*args, **kwargs)
            for then, now in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                if isinstance(then, torch.Tensor):
                    made[id(then)] = now


def count_what_is_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the tokens of every chunk of a prompt that is read from now on."""
    counts: list[int] = []
    read = Running.read

    def counting(sequence: Running, chunk: TokenTree, logits: torch.Tensor) -> None:
        counts.append(len(chunk))
        read(sequence, chunk, logits)

    monkeypatch.setattr(Running, "read", counting)
    return counts


class OracleSpeculator:
    """Knows the coming text and hides it in noise: long accepted paths, rejections and bonus tokens in one reply.

    ``future`` is the plain reply. With probability ``honesty`` a node of the true path gets its true child; random siblings
    and random branches are mixed in, duplicates merged.
    """

    top_k = 4

    def __init__(self, future: Sequence[int], seed: int, honesty: float = 0.8) -> None:
        self.future, self.honesty = list(future), honesty
        self.random = np.random.default_rng(seed)
        self.done = 0
        self.root = 0

    def begin(self, token_ids: Sequence[int], top: TopK | None, start: int) -> None:
        self.root, self.done = token_ids[-1], 0

    def propose(self, request: DraftRequest) -> Proposal:
        tokens, parents, true_node = [self.root], [-1], 0
        for depth in range(request.budget):
            if len(tokens) > request.budget:
                break
            coming = self.future[self.done + depth : self.done + depth + 1]
            honest = bool(coming) and self.random.random() < self.honesty and true_node >= 0
            parent = true_node if honest or request.branches == 1 else int(self.random.integers(len(tokens)))
            if request.branches == 1:
                parent = len(tokens) - 1
            token = coming[0] if honest else int(self.random.integers(VOCAB))
            if (parent, token) in zip(parents, tokens, strict=True):
                continue
            tokens.append(token)
            parents.append(parent)
            if honest:
                true_node = len(tokens) - 1
        return Proposal(TokenTree(np.array(tokens, np.int64), np.array(parents, np.int64)))

    def observe(self, tree: TokenTree, path: Sequence[int], emitted: Sequence[int], top: TopK | None) -> None:
        assert top is None or top.token_ids.shape == (len(tree), self.top_k)
        self.done += len(emitted)
        self.root = emitted[-1]
