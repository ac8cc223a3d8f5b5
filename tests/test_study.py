"""The study of a model: resumable, saved per model, of nothing but the model; everything works without it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from test_laws import ids
from toys import ARCHITECTURES, VOCAB, tiny_model, tokenizer

from specdec import folders, study
from specdec.engine import SpeculativeEngine
from specdec.folders import model_file
from specdec.study import chat_frame


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(study, "ROWS", 3)
    monkeypatch.setattr(study, "LENGTH", 20)


def engine(seed: int = 0) -> SpeculativeEngine:
    return SpeculativeEngine(tiny_model(ARCHITECTURES["llama"], seed), tokenizer())


def test_an_interrupted_study_goes_on_where_it_stopped_and_the_next_engine_finds_it() -> None:
    first = engine()
    first.study(lambda what, share: share == 0 and "vocabulary" in what, rounds=1)
    assert first.vocabulary.adjacent > 0
    assert first.vocabulary.rounds == 0
    second = engine()
    assert second.vocabulary.adjacent == first.vocabulary.adjacent
    second.study(lambda what, share: True, rounds=1)
    assert second.vocabulary.adjacent == VOCAB
    assert second.vocabulary.rounds == 1
    assert engine().vocabulary.rounds == 1


def test_what_was_studied_changes_the_proposals_and_not_the_text() -> None:
    plain = ids(list(engine().stream("q", decoding="plain", max_new_tokens=20)))
    before = list(engine().stream("q", max_new_tokens=20, budget=16))
    studied = engine()
    studied.study(lambda what, share: True, rounds=1)
    after = list(studied.stream("q", max_new_tokens=20, budget=16))
    assert ids(before) == ids(after) == plain
    assert sum(len(step.tree) for step in after[:3]) > sum(len(step.tree) for step in before[:3])


def test_each_model_has_a_file_of_its_own_and_a_damaged_one_is_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    one, other = engine(0), engine(1)
    path = model_file("vocabulary", one.model)
    assert path != model_file("vocabulary", other.model)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a table")
    assert engine(0).vocabulary.adjacent == 0
    assert str(path) in caplog.text


def test_a_study_that_is_shipped_serves_until_there_is_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "SHIPPED", tmp_path / "shipped")
    first = engine()
    first.study(lambda what, share: True, rounds=1)
    own = model_file("vocabulary", first.model)
    folders.SHIPPED.mkdir()
    own.rename(folders.SHIPPED / own.name)
    second = engine()
    assert (second.vocabulary.adjacent, second.vocabulary.rounds) == (VOCAB, 1)
    second.study(lambda what, share: True, rounds=2)
    assert engine().vocabulary.rounds == 2
    own.unlink()
    assert engine().vocabulary.rounds == 1


def test_a_model_has_one_study_in_every_number_format() -> None:
    model = engine().model
    name = model_file("vocabulary", model).name
    assert model_file("vocabulary", model.to(torch.bfloat16)).name == name


def test_the_chat_template_is_cut_where_messages_go() -> None:
    frame = chat_frame(tokenizer())
    assert frame is not None
    texts = [tokenizer().decode(list(piece)) for piece in (frame.head, frame.to_reply, frame.to_question)]
    assert texts == ["<|user|>", "<|end|><|assistant|>", "<|end|><|user|>"]
    bare = copy.deepcopy(tokenizer())
    bare.chat_template = None
    assert chat_frame(bare) is None
