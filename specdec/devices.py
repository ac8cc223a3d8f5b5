"""Where a model runs and in which number format: chosen by asking torch or by measuring, never by guessing."""

from __future__ import annotations

import math
import os
import time
import traceback
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from specdec.errors import LoadError
from specdec.zerogpu import gpu_is_lent as gpu_is_lent

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def choose_device(name: str) -> torch.device:
    """The device called `name`, if it is there; "auto" prefers CUDA, then MPS."""
    if name == "auto":
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cuda", "mps", "cpu"):
        raise LoadError(f"Unknown device {name!r}: use --device auto, cuda, cuda:N, mps or cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LoadError(
            f"Device {name!r} is not there: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices. "
            "Use --device cpu, or install a torch build for your GPU."
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise LoadError(f"Device {name!r} is not there: torch {torch.__version__} has no MPS here. Use --device cpu.")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" is bfloat16 where `device` is fast in it, else float32."""
    if name == "auto":
        return torch.bfloat16 if _fast_in_bfloat16(device) else torch.float32
    if name not in _DTYPES:
        raise LoadError(f"Unknown dtype {name!r}: use --dtype auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """What `choose_dtype` calls ``dtype``."""
    return str(dtype).removeprefix("torch.")


def _fast_in_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        seconds = _linear_seconds(device)
    except (RuntimeError, TypeError):  # an older MPS has no bfloat16 at all
        return False
    return seconds[torch.bfloat16] < seconds[torch.float32]


def _linear_seconds(device: torch.device) -> dict[torch.dtype, float]:
    """Best time per dtype of a linear layer over 16 positions, the shape of verifying a token tree.

    The dtypes take turns, so that warming up and what else runs on the machine weigh on both alike.
    """
    best = {torch.bfloat16: math.inf, torch.float32: math.inf}
    nodes = {dtype: torch.ones(16, 1024, dtype=dtype, device=device) for dtype in best}  # [N, in]
    weight = {dtype: torch.ones(4096, 1024, dtype=dtype, device=device) for dtype in best}  # [out, in]
    for _ in range(16):
        for dtype in best:
            start = time.perf_counter()
            torch.nn.functional.linear(nodes[dtype], weight[dtype])[0, 0].item()  # .item() waits for the device
            best[dtype] = min(best[dtype], time.perf_counter() - start)
    return best


_ROOM = 1.15
"""What a model needs, in sizes of its weights: K/V and what a pass computes lie beside them."""

DeviceMap = dict[str, torch.device] | str
"""What `from_pretrained` calls a device map: the device of each module (""; of the whole model), or "auto"."""


def place_weights(what: str, weights: int, dtype: torch.dtype, device: torch.device) -> DeviceMap:
    """Where the `weights` numbers of `dtype` of `what` go: on `device`, or over all GPUs where "cuda" is more than one.

    Refuses what does not fit, with some room to compute, into what is free there.
    """
    several = device.type == "cuda" and device.index is None
    places = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if several else [device]
    need, free = _ROOM * weights * dtype.itemsize, [free_bytes(place) for place in places]
    if need > sum(free):
        smaller_dtype = "--dtype bfloat16, " if dtype.itemsize > 2 else ""
        raise LoadError(
            f"{what} needs {need / 1e9:.1f} GB in {dtype_name(dtype)}, but only "
            f"{sum(free) / 1e9:.1f} GB are free on {device}: choose a smaller --model, {smaller_dtype}or another --device."
        )
    return "auto" if need > free[0] else {"": device}


def usable_cores() -> int:
    """How many cores this process may use: those it is bound to, and no more than its container's share of time (cgroup)."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(math.ceil(min([float(bound), *map(_core_quota, _cgroups())])), 1)


def leave_a_core() -> None:
    """Keep one core for the page and the browser, unless ``OMP_NUM_THREADS`` says otherwise; call it in the device's thread.

    The target's threads wait for the slowest of them, so on two busy cores one thread is faster than two.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(usable_cores() - 1, 1))


def free_bytes(device: torch.device) -> float:
    """What is free there, with what torch keeps for later use: on the CPU no more than the container may take."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + kept)
    return min(float(psutil.virtual_memory().available), _container_bytes())


def give_back_memory(error: BaseException, device: torch.device) -> None:
    """Once memory ran out on ``device`` with ``error``: free what the failed pass held, and what torch keeps for later."""
    traceback.clear_frames(error.__traceback__)  # they hold the pass's tensors for as long as somebody keeps the error
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def _cgroups() -> list[Path]:
    """The folders of this process's control groups (cgroup v2, and v1's of the CPU), each with all that contain it."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0" or "cpu" in controllers.split(","):
            root = _CGROUP if number == "0" else _CGROUP / "cpu"
            inside = root / path.lstrip("/")
            folders += [folder for folder in (inside, *inside.parents) if folder.is_relative_to(root)]
    return folders


def _core_quota(group: Path) -> float:
    """How many cores' time the control group may take; infinity where it is not limited."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf


def _container_bytes() -> float:
    """What a memory-limited container (cgroup v2) has left; without such a limit, infinity."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return math.inf
    return limit - used + int(stat.get("inactive_file", 0))  # file pages not in use give way
