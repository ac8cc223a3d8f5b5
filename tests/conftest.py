"""What several rooms share: a free port, and one thread of torch for each worker."""

from __future__ import annotations

import os
import socket

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # two workers with two threads each would wait for one another on two cores
    torch.set_num_threads(1)


@pytest.fixture
def unused_tcp_port() -> int:
    """A free port on this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
