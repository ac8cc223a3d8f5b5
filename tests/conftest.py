"""What several rooms share: fixtures, one thread of torch for each worker, and the machine."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator

import pytest
import torch

CORES = torch.get_num_threads()
if "PYTEST_XDIST_WORKER" in os.environ:  # two workers with two threads each would wait for one another on two cores
    torch.set_num_threads(1)


@pytest.fixture
def unused_tcp_port() -> int:
    """A free port on this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def every_core() -> Iterator[None]:
    """Torch's threads as where there is one process: for a test that runs alone."""
    share = torch.get_num_threads()
    torch.set_num_threads(CORES)
    yield
    torch.set_num_threads(share)


@pytest.fixture(autouse=True)
def share_of_the_machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test marked ``alone`` measures: it runs while no other worker's test does. Who waits keeps the door."""
    locks = tmp_path_factory.getbasetemp().parent  # the same for all workers
    alone = request.node.get_closest_marker("alone") is not None
    with (locks / "door").open("w") as door, (locks / "machine").open("w") as machine:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
