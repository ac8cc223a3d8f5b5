"""From what a user names to a model that is ready: `load` takes a hub id, a local folder, a `.gguf` file or nothing.

What always holds: the model is a plain Hugging Face causal language model in one dtype, on one device or (where it does not
fit on one GPU) on several, in eval mode and without gradients; whatever goes wrong on the way is a `LoadError` of one line
that names the culprit and the remedy.
With nothing named, the default loads (see `specdec.embedded`).
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdec.devices import DeviceMap, choose_device, choose_dtype, place_weights
from specdec.embedded import EMBEDDED_NAME, Progress, embedded_folder, reporting_bar
from specdec.errors import LoadError, first_line, is_out_of_memory
from specdec.gguf_file import GgufFile

__all__ = ["CUDA_DEFAULT", "LoadError", "LoadedModel", "load"]

CUDA_DEFAULT = "Qwen/Qwen2.5-1.5B-Instruct"
"""The hub id of what is loaded on CUDA if nothing is named."""
_HUB_SECONDS = 5.0
_INSIDE_LAYERS = {"LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "FOURIERFT", "HRA", "VBLORA", "RANDLORA"}
_INSIDE_LAYERS |= {"SHIRA", "MISS", "C3A", "LN_TUNING", "TRAINABLE_TOKENS"}
"""Kinds of PEFT adapters that act within the layers they are injected into, for every token alike."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for its first forward, its tokenizer, and the short name to show for it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a model is read from: `location` is a folder or a hub id; `gguf` the path of a file that stands for all."""

    location: str
    name: str
    gguf: str | None = None
    cached_only: bool = False

    def __str__(self) -> str:
        return self.gguf or self.location


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load `model`: a hub id, a local folder, a `.gguf` file, the embedded model's name, or None for the default.

    The default is Qwen2.5-1.5B-Instruct on CUDA with the hub in reach, otherwise the embedded model. The latter's
    weights are de-quantised (Q4_1) and kept in bfloat16, so in float32 it computes in float32 on bfloat16 weights.
    `device` "auto" prefers CUDA, then MPS; `dtype` "auto" is bfloat16 where the device is fast in it, else float32.
    `progress` is told what is being done and, where known, the fraction done, maybe from another thread; bars go to stderr
    either way.
    Raises `LoadError`.
    """
    report = progress or (lambda *_: None)
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    source = _find(None if model is None else os.fspath(model), place, report)
    return _read(source, place, kind, trust_remote_code, report)


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The causal language model of transformers inside ``model``, which may be wrapped by others.

    What `torch.compile` and data parallelism wrap computes the same without them; an adapter of PEFT that lies inside the
    model's own layers comes along. Raises LoadError, by name, for every other wrapper, and for a model that lies on disk.
    """
    name = type(model).__name__
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(compiled := getattr(inner, "_orig_mod", None), nn.Module):
            inner = compiled
        elif isinstance(inner, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = inner.module
        elif hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            for adapter in inner.peft_config.values():
                kind = str(getattr(adapter.peft_type, "value", adapter.peft_type))
                if kind not in _INSIDE_LAYERS or getattr(adapter, "alora_invocation_tokens", None):
                    raise LoadError(
                        f"The adapter of this {name} ({kind}) does not act on every token alike within the model's layers: "
                        "use a LoRA adapter, or merge it into the model first."
                    )
            inner = inner.get_base_model()
        else:
            raise LoadError(f"{name} is no model of transformers: pass the causal language model that it wraps.")
    if any(weight.is_meta for weight in inner.parameters()):
        raise LoadError(
            f"A part of this {type(inner).__name__} lies on disk or waits on another device (offloaded by accelerate): load it "
            "without offloading, or choose a smaller model."
        )
    if inner._compiled_call_impl is not None:  # in place, which a copy leaves out; its layers stay the same ones
        inner = copy.copy(inner)
    return inner


def _find(model: str | None, device: torch.device, report: Progress) -> _Source:
    if model is None and device.type == "cuda":
        with contextlib.suppress(LoadError):
            source = _on_hub(CUDA_DEFAULT)
            if not source.cached_only:
                return source
    if model in (None, EMBEDDED_NAME):
        return _Source(str(embedded_folder(_convert, report)), EMBEDDED_NAME)
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path.resolve())
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _in_gguf(path.resolve())
    if path.exists():
        raise LoadError(f"{model} is no .gguf file: give --model a .gguf file, a model folder or a hub id.")
    if path.suffix.lower() == ".gguf" or path.is_absolute() or model.startswith((".", "~")):
        raise LoadError(f"{model} does not exist: check the path given to --model.")
    return _on_hub(model)


def _in_gguf(file: Path) -> _Source:
    return _Source(str(file.parent), file.stem, gguf=str(file))


def _in_folder(folder: Path) -> _Source:
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1 and not any(folder.glob("*.safetensors")):
        return _in_gguf(gguf_files[0])
    if (folder / "config.json").is_file():
        return _Source(str(folder), folder.name)
    if gguf_files:
        raise LoadError(f"{folder} holds {len(gguf_files)} .gguf files: name one of them with --model.")
    raise LoadError(f"{folder} holds no config.json: give --model a folder saved by save_pretrained, or a .gguf file.")


def _on_hub(model_id: str) -> _Source:
    """Ask the hub once and briefly, so that without it the local cache serves at once and not after many retries."""
    refusal: Exception | None = None
    try:
        try:
            HfApi().model_info(model_id, timeout=_HUB_SECONDS)
        except (HFValidationError, RepositoryNotFoundError):
            raise
        except Exception as error:  # offline mode, or any error of the hub client's HTTP library
            refusal = error
        hf_hub_download(model_id, "config.json", local_files_only=refusal is not None)
    except HFValidationError as error:
        raise LoadError(f"{model_id!r} is neither a file or folder here nor a hub id like owner/name.") from error
    except GatedRepoError as error:
        raise LoadError(
            f"{model_id} is gated on the hub: ask for access on its page, then log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise LoadError(
            f"{model_id} is neither a folder here nor a public model on the hub: check the spelling, or, if it is "
            "private, log in with `hf auth login`."
        ) from error
    except LocalEntryNotFoundError as error:
        raise LoadError(
            f"{model_id} is neither a folder here nor in the local hub cache, and the hub does not answer "
            f"({first_line(refusal or error)}): check the connection, or give --model a local folder or .gguf file."
        ) from error
    except EntryNotFoundError as error:
        raise LoadError(
            f"{model_id} has no config.json on the hub: download one of its .gguf files and give --model its path."
        ) from error
    except Exception as error:
        raise LoadError(f"The hub does not give {model_id} ({first_line(error)}): try again later.") from error
    return _Source(model_id, model_id.split("/")[-1], cached_only=refusal is not None)


def _convert(gguf: Path, folder: Path) -> None:
    """De-quantise once, into the safetensors format that loads in a second."""
    loaded = _read(_in_gguf(gguf), torch.device("cpu"), torch.bfloat16, False, lambda *_: None)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def _read(source: _Source, device: torch.device, dtype: torch.dtype, trust_remote_code: bool, report: Progress) -> LoadedModel:
    report(f"loading {source.name}", None)
    auto: Any = AutoModelForCausalLM  # its methods are untyped
    options: dict[str, Any] = {
        "gguf_file": source.gguf,
        "trust_remote_code": trust_remote_code,
        "local_files_only": source.cached_only,
    }
    with _one_line(source):
        config = AutoConfig.from_pretrained(source.location, **options)
        _check_causal(config, source, trust_remote_code)
        file = GgufFile(source.gguf) if source.gguf else None
        if file:
            file.settle(config)
        with torch.device("meta"):
            skeleton = auto.from_config(config, trust_remote_code=trust_remote_code)
        if file:
            file.check_weights(skeleton)
        place: DeviceMap = {"": device}
        if getattr(config, "quantization_config", None) is None:
            place = place_weights(str(source), sum(weight.numel() for weight in skeleton.parameters()), dtype, device)
        tokenizer = _read_tokenizer(source, options)
        if source.gguf:  # transformers may keep weights packed in their blocks; ask for plain ones
            options["quantization_config"] = GgufConfig(dequantize=True)
        model, info = auto.from_pretrained(
            source.location,
            config=config,
            dtype=dtype,
            device_map=None if device.type == "cpu" else place,
            attn_implementation="sdpa" if skeleton._supports_sdpa else "eager",
            output_loading_info=True,
            tqdm_class=reporting_bar(report, f"downloading {source.name}"),
            **options,
        )
        if missing := sorted(info["missing_keys"]):
            raise LoadError(
                f"{source} lacks {len(missing)} weights of a {type(model).__name__}, {missing[0]} among them: it is "
                "incomplete or no causal language model. Get it again, or choose another --model."
            )
        if any(weight.device.type != device.type for weight in model.parameters()):
            raise LoadError(
                f"{source} does not fit on the GPUs, a part of it would lie elsewhere: choose a smaller --model or another "
                "--device."
            )
        if file:
            file.scale_positions(model)
    return LoadedModel(model.eval().requires_grad_(False), tokenizer, source.name)


def _check_causal(config: PreTrainedConfig, source: _Source, trust_remote_code: bool) -> None:
    """Refuse what would load but not speak: an encoder, a classifier, an encoder-decoder."""
    own_code = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    speaks = own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    names = list(config.architectures or [])
    if speaks and names and not own_code:
        expected = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "__name__", "")
        speaks = any(name == expected or name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    if not speaks:
        raise LoadError(
            f"{source} is a {' / '.join(names) or config.model_type}, not a causal language model: choose a chat or "
            "text-generation model with --model."
        )


def _read_tokenizer(source: _Source, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    remedy = "put the tokenizer files (tokenizer.json, tokenizer_config.json) beside its weights."
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.location, **options)
    except Exception as error:  # transformers raises whatever the missing piece led to
        raise LoadError(f"{source} has no usable tokenizer ({first_line(error)}): {remedy}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise LoadError(f"{source} has no tokenizer vocabulary: {remedy}")
    return tokenizer


def out_of_memory(what: str) -> str:
    """The line of a LoadError where memory runs out for ``what``."""
    return f"Out of memory while loading {what}: choose a smaller --model, --dtype bfloat16, or another --device."


@contextlib.contextmanager
def _one_line(source: _Source) -> Iterator[None]:
    """Whatever transformers raises (it raises everything) becomes one line about `source`."""
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        raise LoadError(_explain(source, error)) from error


def _explain(source: _Source, error: Exception) -> str:
    text, detail = str(error), first_line(error)
    if is_out_of_memory(error):
        return out_of_memory(str(source))
    if "trust_remote_code" in text:
        return f"{source} runs its own Python code: start with --trust-remote-code if you trust its author."
    if "does not recognize this architecture" in text or "is not supported yet" in text:
        return (
            f"{source} is beyond transformers {transformers.__version__} ({detail.split('. ')[0]}): upgrade it, or choose "
            "another --model."
        )
    if isinstance(error, ImportError):
        return f"{source} needs a package that is not installed ({detail}): install it, or choose another --model."
    if "ignore_mismatched_sizes" in text:
        return f"{source} holds weights that do not fit its config.json: get it again, or choose another --model."
    if source.gguf or isinstance(error, SafetensorError):
        return f"{source} is broken or truncated ({detail}): delete it and get it again."
    if not Path(source.location).is_dir():
        return f"{source} did not come whole from the hub ({detail}): start again, or choose another --model."
    return f"{source} cannot be loaded ({detail}): get it again, or choose another --model."
