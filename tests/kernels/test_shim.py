"""The shim itself: it computes what a GPU would, and it catches what it is there to catch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from everstep.kernels import sources
from tests.kernels.shim import ShimError, ShimLauncher, kernels

PARTS = """
#include "common.cuh"
extern "C" __global__ void __launch_bounds__(THREADS) sums(const float *__restrict__ in, float *__restrict__ out,
                                                           int64_t n) {
  __shared__ float shared[WARPS];
  float mine = 0.0f;
  for (int64_t i = threadIdx.x; i < n; i += THREADS) mine += in[blockIdx.x * n + i];
  float sum = block_sum(mine, shared);
  out[blockIdx.x * THREADS + threadIdx.x] = sum + block_sum(1.0f, shared);
}
extern "C" __global__ void scans(const int32_t *in, uint32_t *before, uint32_t *total) {
  __shared__ uint32_t shared[WARPS];
  before[threadIdx.x] = block_scan((uint32_t)in[threadIdx.x], shared, total + threadIdx.x);
}
extern "C" __global__ void warps(const float *in, int32_t *out) {
  uint32_t positive = __ballot_sync(ALL, in[threadIdx.x] > 0.0f);
  float up = __shfl_down_sync(ALL, in[threadIdx.x], 3);
  out[2 * threadIdx.x] = (int32_t)(__popc(positive) + __reduce_max_sync(ALL, (int)threadIdx.x));
  out[2 * threadIdx.x + 1] = __float_as_int(up);
}
"""

FAULTS = """
#include "common.cuh"
extern "C" __global__ void some_stay_away(float *out) {
  if (threadIdx.x < 40) __syncthreads();
}
extern "C" __global__ void a_lane_leaves(float *out) {
  if (threadIdx.x == 5) return;
  out[threadIdx.x] = warp_sum(1.0f);
}
extern "C" __global__ void half_a_mask(float *out) { out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 1); }
extern "C" __global__ void two_collectives(float *out) {
  if (threadIdx.x % 2) __syncwarp(); else __ballot_sync(ALL, 1);
}
extern "C" __global__ void misaligned(float *out) { ((float4 *)(out + 1))[threadIdx.x].x = 0.0f; }
extern "C" __global__ void past_shared(float *out) {
  __shared__ float shared[32];
  shared[threadIdx.x + 1] = 0.0f;
}
extern "C" __global__ void shifted_too_far(uint32_t *out) { out[threadIdx.x] = 1u << (threadIdx.x + 1); }
extern "C" __global__ void stale_shared(float *out, int write) {
  __shared__ float shared[32];
  if (write) shared[threadIdx.x] = 1.0f;
  out[threadIdx.x] = shared[threadIdx.x];
}
"""


def folder_with(folder: Path, text: str) -> Path:
    for header in [*sources.FOLDER.glob("*.h"), *sources.FOLDER.glob("*.cuh")]:
        (folder / header.name).write_text(header.read_text())
    (folder / "probe.cu").write_text(text)
    return folder


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory.mktemp("parts"), PARTS)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(tmp_path_factory.mktemp("faults"), FAULTS)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_barriers_shuffles_and_ballots_are_real(parts: Path, seed: int) -> None:
    launcher = ShimLauncher(seed, parts)
    values = torch.arange(3 * 1000, dtype=torch.float32)
    sums = torch.full((3, 256), torch.nan)
    launcher.launch("probe.cu", "sums", 3, 256, values, sums, np.int64(1000))
    assert torch.equal(sums, values.view(3, -1).sum(1, keepdim=True).expand(3, 256) + 256)

    counts = torch.arange(256, dtype=torch.int32) % 7
    before, total = torch.empty(2, 256, dtype=torch.int32)
    launcher.launch("probe.cu", "scans", 1, 256, counts, before, total)
    assert torch.equal(before, counts.cumsum(0) - counts) and torch.equal(total, counts.sum().expand(256))

    values, seen = torch.randn(64), torch.empty(64, 2, dtype=torch.int32)
    launcher.launch("probe.cu", "warps", 1, 64, values, seen)
    positive = (values > 0).view(2, 32).sum(1).repeat_interleave(32)
    assert torch.equal(seen[:, 0], positive + torch.tensor([31, 63]).repeat_interleave(32))
    lanes = torch.arange(32)
    taken = values.view(2, 32)[:, torch.where(lanes + 3 < 32, lanes + 3, lanes)].flatten()
    assert torch.equal(seen[:, 1].contiguous().view(torch.float32), taken)
    assert launcher.launched == ["sums", "scans", "warps"]


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        ("some_stay_away", "stuck, 40 threads at __syncthreads"),
        ("a_lane_leaves", "stuck, 0 threads at __syncthreads and 31 in a warp collective"),
        ("half_a_mask", "full mask"),
        ("two_collectives", "different collectives"),
        ("misaligned", r"probe.cu:14: block 0, thread 0: misaligned"),
        ("past_shared", r"probe.cu:17: block 0, thread 31: index out of bounds"),
        ("shifted_too_far", r"probe.cu:19: block 0, thread 31: shift"),
    ],
)
def test_what_a_gpu_leaves_undefined_is_refused(faults: Path, kernel: str, why: str) -> None:
    launcher = ShimLauncher(0, faults)
    out = torch.zeros(256)
    with pytest.raises(ShimError, match=why):
        launcher.launch("probe.cu", kernel, 1, 64 if kernel == "some_stay_away" else 32, out)
    launcher.launch("probe.cu", "stale_shared", 1, 32, out, np.int32(1))  # and the next launch is a whole one
    assert torch.equal(out[:32], torch.ones(32))


def test_shared_memory_of_another_block_is_not_there(faults: Path) -> None:
    launcher = ShimLauncher(0, faults)
    out = torch.zeros(32)
    launcher.launch("probe.cu", "stale_shared", 1, 32, out, np.int32(1))
    launcher.launch("probe.cu", "stale_shared", 1, 32, out, np.int32(0))
    assert out.isnan().all()


@pytest.mark.parametrize(
    "arguments", [(torch.zeros(9),), (torch.zeros(9), np.int64(1)), (torch.zeros(9), 1), (np.int32(1), torch.zeros(9))]
)
def test_arguments_of_another_type_are_refused(faults: Path, arguments: tuple[object, ...]) -> None:
    launcher = ShimLauncher(0, faults)
    with pytest.raises(ShimError, match="its parameters are 'pi'"):
        launcher.launch("probe.cu", "stale_shared", 1, 32, *arguments)


def test_a_block_is_made_of_whole_warps(faults: Path) -> None:
    launcher = ShimLauncher(0, faults)
    for block in [0, 33, 1056]:
        with pytest.raises(ShimError, match="whole warps"):
            launcher.launch("probe.cu", "half_a_mask", 1, block, torch.zeros(9))


def test_the_kernels_of_a_source_are_found() -> None:
    assert kernels(PARTS) == ["sums", "scans", "warps"]
    for path in sources.FOLDER.glob("*.cu"):
        text = path.read_text()
        assert len(kernels(text)) == text.count("__global__") > 0, path


def test_a_missing_barrier_is_noticed(tmp_path: Path) -> None:
    """`block_sum` twice in a row: without its first barrier, a fast warp overwrites what a slow one still reads."""
    folder = folder_with(tmp_path, PARTS)
    values = torch.arange(1000, dtype=torch.float32)
    first = "  __syncthreads();  // whoever still reads an earlier sum has read it\n"
    for barrier in [first, "/ WARP] = value;\n  __syncthreads();\n"]:
        header = (sources.FOLDER / "common.cuh").read_text()
        assert barrier in header
        (folder / "common.cuh").write_text(header.replace(barrier, barrier.replace("__syncthreads();", "")))
        results = []
        for seed in range(3):
            sums = torch.empty(1, 256)
            ShimLauncher(seed, folder).launch("probe.cu", "sums", 1, 256, values, sums, np.int64(1000))
            results.append(sums)
        assert not all(torch.equal(sums, torch.full((1, 256), 499500.0 + 256)) for sums in results)
