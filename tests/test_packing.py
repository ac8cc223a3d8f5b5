"""Packed weights are the model's weights: the same products, in force during a pass only, and never those of yesterday."""

from __future__ import annotations

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from toys import ARCHITECTURES, tiny_model

from specdec import packing
from specdec.packing import PackedWeights
from specdec.target import TargetModel


@pytest.fixture(autouse=True)
def packed_whatever_it_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_is_faster", lambda layer: True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 12, 300])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_a_packed_layer_gives_the_same_product(rows: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 160, bias=bias, dtype=dtype)
    packed = PackedWeights(layer)
    for shape in ((rows, 96), (1, rows, 96), (2, rows, 96)):
        seen = torch.randn(shape, dtype=dtype)
        with torch.inference_mode():
            own = layer(seen)
            with packed.in_force():
                # bfloat16 only where this processor multiplies it
                assert ("forward" in vars(layer)) == packing._fits(layer.weight)
                torch.testing.assert_close(layer(seen), own)


def test_the_model_is_left_as_it_was_also_after_a_pass_that_failed() -> None:
    layer = nn.Linear(8, 8)
    packed = PackedWeights(layer)
    with pytest.raises(RuntimeError, match="a failed pass"), packed.in_force():
        raise RuntimeError("a failed pass")
    assert "forward" not in vars(layer)


def test_a_weight_that_is_changed_converted_or_exchanged_is_seen_in_the_next_pass() -> None:
    layer, rows = nn.Linear(8, 8, bias=False), torch.ones(1, 8)
    packed = PackedWeights(layer)

    def product(rows: torch.Tensor) -> list[list[float]]:
        with packed.in_force():
            return layer(rows).tolist()  # type: ignore[no-any-return]

    with torch.no_grad():
        layer.weight.fill_(2.0)
        assert product(rows) == [[16.0] * 8]
        layer.weight = nn.Parameter(torch.full((8, 8), 3.0))
        assert product(rows) == [[24.0] * 8]
        layer.weight.data = torch.full((8, 8), 4.0)
        assert product(rows) == [[32.0] * 8]
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            layer.to(dtype)
            assert product(rows.to(dtype)) == [[32.0] * 8]


def test_layers_that_were_pruned_or_reparametrised_multiply_by_themselves_and_so_do_all_under_autocast() -> None:
    layer, rows = nn.Linear(8, 8), torch.randn(1, 8)
    packed = PackedWeights(layer)
    for change in (
        lambda: torch.nn.utils.prune.l1_unstructured(layer, "weight", 20),
        lambda: torch.nn.utils.prune.remove(layer, "weight"),
        lambda: torch.nn.utils.parametrizations.weight_norm(layer),
    ):
        change()  # type: ignore[no-untyped-call]
        own = layer(rows)
        with packed.in_force():
            torch.testing.assert_close(layer(rows), own)
    with torch.autocast("cpu", dtype=torch.bfloat16), packed.in_force():
        assert layer(rows).dtype == torch.bfloat16


def test_nothing_is_packed_where_it_is_not_faster_where_memory_is_short_or_where_another_forward_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_packed(layer: nn.Linear) -> bool:
        before = vars(layer).get("forward")
        with PackedWeights(layer).in_force():
            return vars(layer).get("forward") is not before

    assert is_packed(nn.Linear(8, 8))
    assert not is_packed(nn.Linear(8, 8, device="meta"))
    hooked = nn.Linear(8, 8)
    hooked.forward = lambda rows: rows  # type: ignore[method-assign, assignment]
    assert not is_packed(hooked)
    with monkeypatch.context() as patch:
        patch.setenv("SPACES_ZERO_GPU", "true")
        assert not is_packed(nn.Linear(8, 8)), "the CPU only checks what a lent GPU will compute"
    monkeypatch.setattr(packing, "free_bytes", lambda device: 400.0)
    assert not is_packed(nn.Linear(8, 8))
    monkeypatch.undo()
    monkeypatch.setattr(packing, "_is_faster", lambda layer: False)
    assert not is_packed(nn.Linear(8, 8))


@pytest.mark.parametrize("operator", ["_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise"])
@pytest.mark.parametrize("refusal", [AttributeError("no such operator"), RuntimeError("not on this processor")], ids=repr)
def test_nothing_is_packed_where_an_operator_is_missing_or_refuses(
    operator: str, refusal: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise refusal

    monkeypatch.undo()  # the layer is measured
    monkeypatch.setattr(torch.ops.mkldnn, operator, refuse)
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    with PackedWeights(layer).in_force():
        assert "forward" not in vars(layer)


def test_a_build_without_onednn_is_asked_for_none_of_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: asked.append("bfloat16"))
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)
    with PackedWeights(layer).in_force():
        assert "forward" not in vars(layer)
    assert not asked


def test_a_target_verifies_with_packed_weights_and_leaves_the_models_own_forward_alone() -> None:
    model = tiny_model(ARCHITECTURES["llama"])
    target, seen = TargetModel(model), []
    layer = model.lm_head
    handle = layer.register_forward_hook(lambda *_: seen.append("forward" in vars(layer)))
    target.prefill(target.new_cache(), [1, 2, 3], top_k=1)
    model(torch.tensor([[1, 2, 3]]))
    handle.remove()
    assert seen == [True, False]
