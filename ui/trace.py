"""Traces: a reply as a file. What the panel draws live is what a trace replays; no model is needed for it.

The format (JSON, UTF-8)::

    {
      "format": "specdec-trace", "version": 1,
      "model":    {"name": ..., ...},           # facts about model and device, for display
      "settings": {"decoding": ..., ...},       # the arguments of the reply, for display
      "prompt":   [{"role": ..., "content": ...}, ...],
      "text":     "the reply",
      "steps":    [record, ...]
    }

A *record* is one step, that is one target pass, over a tree of N nodes (the root included) that emitted E tokens::

    "index":          int            # of the step, from 0 without gaps
    "tree":
      "token_ids":    [N] ints       # the root first: the last committed token
      "parents":      [N] ints       # index of each node's parent, before the node; -1 for the root
      "scores":       [N] floats     # estimated probability, 0 to 1, that the node is accepted; or null
      "sources":      [N] strings    # "root", "context", "recycled", "memory" or "vocabulary"; or null
    "verdict":
      "path":         ints           # indices of the accepted nodes, the root first
      "next_token":   int            # id of the target's own token after them
      "kind":         string         # "bonus" (the path ends at a leaf) or "recovered"
    "token_ids":      [E] ints       # the emitted tokens: the path without its root, then next_token; cut at a stop
    "text":           string         # the characters that became complete with them
    "timings":        floats         # seconds of "prefill" (0 but in the first step), "draft", "verify", "accept", "commit"
    "context_length": int            # tokens before the root
    "plain_seconds":  float          # seconds of a plain single-token pass at this moment; of a plain pass of the same replies,
                                     # one token each, where several share the pass
    "finish_reason":  string         # of the last step: "eos", "stop_string", "stopping_criteria", "length", "context" or
                                     # "cancelled"; else null
    "target":                        # what the target thought of the nodes; or null
      "probs":        [N] floats     # probability, 0 to 1, of the node after its parent; the root's is 1
      "ranks":        [N] ints       # how many tokens were likelier there
      "next_prob":    float          # the same of next_token; or null, as both were not recorded at first
      "next_rank":    int
    "note":           string         # why nothing was drafted; or null
    "sequences":      int            # how many replies were verified in this pass, this one included; 1 if it is missing
    "texts":          [N] strings    # the text of each node's token
    "token_texts":    [E] strings    # of each emitted token
    "next_text":      string         # of next_token
    "special":        strings        # by token id, those of these tokens that are no text: what they stand for, such as
                                     # "end of reply"; none in older traces
    "figures":                       # totals from the first step to this one; loading recomputes them
      "tokens", "passes", "drafted", "accepted":        ints   # emitted, target passes, drafted, drafted and emitted
      "tokens_per_pass", "expected_tokens_per_pass":    floats # the latter as the scores foretold
      "acceptance_rate":                                float  # accepted / drafted
      "decode_seconds":                                 float  # all timings but the prefill
      "tokens_per_second":                              float
      "speedup", "expected_speedup":                    floats # against plain passes; the latter as the scores foretold
      "pass_cost":                                      float  # of a pass, in plain ones: tokens_per_pass / speedup
      "passes_saved":                                   int    # tokens - passes
      "time_to_first_token":                            float  # seconds of prefill and the first pass
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from specdec.accept import Verdict
from specdec.stats import Stats
from specdec.step import FinishReason, Step, TargetView, Timings
from specdec.text import SpecialText
from specdec.tree import Source, TokenTree

FORMAT, VERSION = "specdec-trace", 1
MAX_BYTES = 32 * 2**20
MAX_STEPS = 20_000
MAX_NODES = 1_024
MAX_SECONDS = 1e6
_PARTS = 20
"""Lists and objects of a record, at most; counted before they are read, for empty ones take much more room than their text."""

TokenText = Callable[[Sequence[int]], list[str]]
"""The text of each token, one by one; `specdec.engine.SpeculativeEngine.token_texts`."""
Json = dict[str, Any]
T = TypeVar("T")


class TraceError(ValueError):
    """A file that is no trace; one line that says what is wrong with it."""


def record(step: Step, stats: Stats, token_text: TokenText) -> Json:
    """A step as traces and the panel hold it; ``stats`` have folded it in already."""
    tree_ids, emitted = step.tree.token_ids.tolist(), list(step.token_ids)
    token_ids = [*tree_ids, *emitted, step.verdict.next_token]
    texts = token_text(token_ids)
    special = {str(token): text.meaning for token, text in zip(token_ids, texts, strict=True) if isinstance(text, SpecialText)}
    return {
        **step.to_json(),
        "texts": texts[: len(tree_ids)],
        "token_texts": texts[len(tree_ids) : -1],
        "next_text": texts[-1],
        "special": special,
        "figures": stats.to_json(),
    }


class Recorder:
    """A reply being recorded: add its steps as they come, take the trace at any time."""

    def __init__(
        self, model: Mapping[str, Any], settings: Mapping[str, Any], prompt: Sequence[Mapping[str, str]], token_text: TokenText
    ) -> None:
        self.header = {"model": dict(model), "settings": dict(settings), "prompt": [dict(message) for message in prompt]}
        self.records: list[Json] = []
        self.stats = Stats()
        self._token_text = token_text
        self._texts: dict[int, str] = {}

    def add(self, step: Step) -> Json:
        """Record a step; returns its record."""
        self.stats.add(step)
        self.records.append(record(step, self.stats, self._text_of))
        return self.records[-1]

    def trace(self) -> Json:
        """The reply so far as a trace."""
        text = "".join(rec["text"] for rec in self.records)
        return {"format": FORMAT, "version": VERSION, **self.header, "text": text, "steps": list(self.records)}

    def _text_of(self, token_ids: Sequence[int]) -> list[str]:
        """Each token's text, asked of the tokenizer once per reply: the same tokens come again and again."""
        new = [token for token in dict.fromkeys(token_ids) if token not in self._texts]
        self._texts.update(zip(new, self._token_text(new), strict=True))
        return [self._texts[token] for token in token_ids]


def save_trace(trace: Json, path: Path) -> None:
    """Write a trace file."""
    path.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")


def load_trace(source: Path | str) -> Json:
    """A trace from a file (a Path) or from its text (a str). Raises TraceError, in one line, for anything else."""
    if isinstance(source, Path):
        try:
            return load_trace(_read(source))
        except TraceError as error:
            raise TraceError(f"{source.name}: {error}") from None
    _check(len(source) <= MAX_BYTES, f"larger than {MAX_BYTES >> 20} MiB")
    _check(source.count("{") + source.count("[") <= _PARTS * MAX_STEPS, "not a trace: too many lists and objects")
    try:
        trace = json.loads(source.removeprefix("\ufeff"))  # the byte order mark of some editors
    except (ValueError, RecursionError):
        raise TraceError("not a trace: no valid JSON") from None
    _check(isinstance(trace, dict) and trace.get("format") == FORMAT, f'not a trace: "format" is not "{FORMAT}"')
    _check(trace.get("version") == VERSION, f"a trace of another version; this program reads version {VERSION}")
    header = {name: _facts(trace, name) for name in ("model", "settings")}
    steps = _field(trace, "steps", list)
    _check(0 < len(steps) <= MAX_STEPS, f'"steps" must hold 1 to {MAX_STEPS} records')
    return {
        "format": FORMAT,
        "version": VERSION,
        **header,
        "prompt": [_message(message) for message in _field(trace, "prompt", list)],
        "text": _field(trace, "text", str),
        "steps": list(_records(steps)),
    }


def _read(path: Path) -> str:
    try:
        _check(path.stat().st_size <= MAX_BYTES, f"larger than {MAX_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TraceError(f"cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise TraceError("not a trace: no UTF-8 text") from None


def _records(steps: list[Any]) -> Iterable[Json]:
    stats = Stats()
    for position, raw in enumerate(steps):
        try:
            _check(isinstance(raw, dict), "not an object")
            step = _step(raw)
            _check(step.index == position, f'"index" must be {position}')
            stats.add(step)
            texts = _list(raw, "texts", str, len(step.tree))
            token_texts = _list(raw, "token_texts", str, len(step.token_ids))
            next_text = _field(raw, "next_text", str)
            special = _special(raw.get("special", {}))
        except (ValueError, OverflowError) as error:
            raise TraceError(f"step {position}: {error}") from None
        yield {
            **step.to_json(),
            "texts": texts,
            "token_texts": token_texts,
            "next_text": next_text,
            "special": special,
            "figures": stats.to_json(),
        }


def _step(raw: Json) -> Step:
    """A Step from its JSON, every invariant checked."""
    tree = _tree(_field(raw, "tree", dict))
    verdict = _verdict(_field(raw, "verdict", dict), tree)
    token_ids = tuple(_list(raw, "token_ids", int))
    full = (*(int(tree.token_ids[node]) for node in verdict.path[1:]), verdict.next_token)
    _check(bool(token_ids) and token_ids == full[: len(token_ids)], '"token_ids" must follow the verdict')
    finish, note, sequences = raw.get("finish_reason"), raw.get("note"), raw.get("sequences", 1)
    _check(finish is None or finish in get_args(FinishReason), '"finish_reason" is unknown')
    _check(note is None or isinstance(note, str), '"note" must be a string or null')
    _check(_is_a(sequences, int) and sequences > 0, '"sequences" must be 1 or more')
    timings = _field(raw, "timings", dict)
    return Step(
        index=_field(raw, "index", int),
        tree=tree,
        verdict=verdict,
        token_ids=token_ids,
        text=_field(raw, "text", str),
        timings=Timings(**{name: _seconds(timings, name) for name in Timings.__slots__}),
        context_length=_field(raw, "context_length", int),
        plain_seconds=_seconds(raw, "plain_seconds"),
        finish_reason=finish,
        target=_target(raw.get("target"), len(tree)),
        note=note,
        sequences=sequences,
    )


def _tree(raw: Json) -> TokenTree:
    token_ids = _list(raw, "token_ids", int)
    size = len(token_ids)
    _check(0 < size <= MAX_NODES, f"a tree must hold 1 to {MAX_NODES} nodes")
    scores = None if raw.get("scores") is None else _probabilities(raw, "scores", size)
    sources = None
    if raw.get("sources") is not None:
        names = _list(raw, "sources", str, size)
        unknown = set(names) - {source.name.lower() for source in Source}
        _check(not unknown, '"sources" holds an unknown name')
        sources = np.asarray([Source[name.upper()] for name in names], np.int8)
    tree = TokenTree(np.asarray(token_ids, np.int64), np.asarray(_list(raw, "parents", int, size), np.int64), scores, sources)
    tree.check()
    return tree


def _verdict(raw: Json, tree: TokenTree) -> Verdict:
    path = tuple(_list(raw, "path", int))
    inside = all(0 <= node < len(tree) for node in path)
    _check(bool(path) and inside and list(path) == tree.path(path[-1]), '"path" must lead from the root to a node')
    kind = raw.get("kind")
    if kind not in ("bonus", "recovered"):
        raise TraceError('"kind" must be "bonus" or "recovered"')
    return Verdict(path, _field(raw, "next_token", int), kind)


def _target(raw: Any, size: int) -> TargetView | None:
    if raw is None:
        return None
    _check(isinstance(raw, dict), '"target" must be an object or null')
    prob, rank = raw.get("next_prob"), raw.get("next_rank")
    _check(prob is None or (_is_a(prob, float) and 0 <= prob <= 1), '"next_prob" must lie between 0 and 1, or be null')
    _check(rank is None or (_is_a(rank, int) and rank >= 0), '"next_rank" must be 0 or more, or null')
    _check((prob is None) == (rank is None), '"next_prob" and "next_rank" go together')
    return TargetView(_probabilities(raw, "probs", size), np.asarray(_list(raw, "ranks", int, size), np.int64), prob, rank)


def _special(raw: Any) -> dict[str, str]:
    named = isinstance(raw, dict) and all(token.isdecimal() and _is_a(meaning, str) for token, meaning in raw.items())
    _check(named, '"special" must hold a string for each token id')
    return dict(raw)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise TraceError(message)


def _is_a(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float) and bool(np.isfinite(value))
    return type(value) is kind


def _field(raw: Json, name: str, kind: type[T]) -> T:
    value = raw.get(name)
    if not _is_a(value, kind):
        raise TraceError(f'"{name}" is missing or of the wrong type')
    return value  # type: ignore[return-value]


def _list(raw: Json, name: str, kind: type[T], size: int | None = None) -> list[T]:
    values = _field(raw, name, list)
    _check(size is None or len(values) == size, f'"{name}" must hold {size} values')
    _check(all(_is_a(value, kind) for value in values), f'"{name}" holds a value of the wrong type')
    return values


def _seconds(raw: Json, name: str) -> float:
    seconds = _field(raw, name, float)
    _check(0 <= seconds <= MAX_SECONDS, f'"{name}" must lie between 0 and {MAX_SECONDS:,.0f} seconds')
    return round(seconds, 6)


def _probabilities(raw: Json, name: str, size: int) -> NDArray[np.float32]:
    values = _list(raw, name, float, size)
    _check(all(0 <= value <= 1 for value in values), f'"{name}" must lie between 0 and 1')
    return np.asarray(values, np.float32)


def _facts(raw: Json, name: str) -> Json:
    facts = _field(raw, name, dict)
    plain = all(value is None or type(value) in (str, bool, int) or _is_a(value, float) for value in facts.values())
    _check(plain, f'"{name}" must be flat, of texts and finite numbers')
    return facts


def _message(raw: Any) -> Json:
    _check(isinstance(raw, dict), '"prompt" must hold messages')
    return {"role": _field(raw, "role", str), "content": _field(raw, "content", str)}
