"""What this process may use of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from specdec import devices
from specdec.devices import leave_a_core
from specdec.zerogpu import gpu_is_lent

V1 = "5:cpuset:/box\n4:cpu,cpuacct:/box\n"
V2 = "0::/box/app\n"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("", {}, 16),
        (V2, {}, 16),
        (V2, {"cpu.max": "max 100000"}, 16),
        (V2, {"cpu.max": "250000 100000"}, 3),
        (V2, {"box/app/cpu.max": "max 100000", "box/cpu.max": "200000 100000"}, 2),
        (V2, {"box/app/cpu.max": "10000 100000"}, 1),
        (V2, {"cpu.max": "nonsense"}, 16),
        (V1, {"cpu/box/cpu.cfs_quota_us": "400000", "cpu/box/cpu.cfs_period_us": "100000"}, 4),
        (V1, {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, 16),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_cores_are_those_that_this_process_may_use(
    membership: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(devices, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(devices, "_MEMBERSHIP", tmp_path / "membership")
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert devices.usable_cores() == cores


def test_where_nothing_is_told_of_groups_the_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_MEMBERSHIP", tmp_path / "nowhere")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert devices.usable_cores() == 2


def test_threads_are_chosen_from_the_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("specdec.devices.usable_cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    leave_a_core()
    assert chosen == [1]


@pytest.mark.parametrize(
    ("value", "lent"), [(None, False), ("", False), ("0", False), ("false", False), ("1", True), ("True", True)]
)
def test_whether_a_gpu_is_lent_is_read_in_one_way(value: str | None, lent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPACES_ZERO_GPU", raising=False)
    if value is not None:
        monkeypatch.setenv("SPACES_ZERO_GPU", value)
    assert gpu_is_lent() is devices.gpu_is_lent() is lent
