"""What the tests of the kernels share: the shim in the CUDA launcher's place, one thread, filled empty tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from everstep.kernels import cuda
from tests.kernels.shim import UNDER_ASAN, ShimLauncher

SEEDS = [0] if UNDER_ASAN else [0, 1, 2]  # 0: threads in order


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "asan: also run under AddressSanitizer, by test_shim.py in another process")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=SEEDS, ids=lambda seed: f"order{seed}")
def shim(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShimLauncher]:
    """Send every `launch` to the shim: see tests/kernels/shim.py for what it checks and how to use it."""
    launcher = ShimLauncher(seed=request.param)
    monkeypatch.setattr(cuda, "launcher", launcher)
    torch.use_deterministic_algorithms(True)  # torch.empty is then filled with NaN, or the largest integer
    yield launcher
    torch.use_deterministic_algorithms(False)
