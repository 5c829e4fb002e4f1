"""Thirty SIGKILLs at random places, spread over a few runs: every run ends with the bits of an undisturbed one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.helpers import POINTS, References, job, run

# Where a checkpoint actor can be hit while it writes or restores; "restore" needs an actor that was lost before.
OPERATIONS = (
    "segment:created",
    "segment:written",
    "segment:synced",
    "segment:linked",
    "segment:folder_synced",
    "base:written",
    "base:linked",
    "compressor:written",
    "restore",
)
KILLS = 30
RUNS = ("char_lm", "char_lm-topk", "char_lm", "char_lm-topk")


def operations() -> list[list[str]]:
    """Deal the operations out, three a run, "restore" to two of them; only a residual has snapshots."""
    draw = random.Random("operations")
    plain = [op for op in OPERATIONS if op not in ("compressor:written", "restore")]
    draw.shuffle(plain)
    plain += draw.sample(plain, 2)
    hands = [["restore"], ["compressor:written"], [], ["restore"]]
    return [hand + [plain.pop() for _ in range(3 - len(hand))] for hand in hands]


def kills(number: int) -> list[dict[str, Any]]:
    """Return the faults of one run, drawn from a fixed seed."""
    draw = random.Random(f"kill anywhere {number}")
    hand = operations()[number]
    # A restore can be struck only after an actor was lost; from step 8 on, the first one that comes is.
    steps = [8 if op == "restore" else draw.randrange(8, 48) for op in hand]
    faults: list[dict[str, Any]] = [
        {"kind": "kill_checkpointer", "step": step, "op": op} for step, op in zip(steps, hand, strict=True)
    ]
    kinds = ["kill_worker", "kill_worker", "kill_worker", "kill_fault_handler", "kill_workers"]
    for step, kind in zip(draw.sample(range(2, 58), len(kinds)), kinds, strict=True):
        fault: dict[str, Any] = {"kind": kind, "step": step, "at": draw.choice(POINTS)}
        faults.append(fault | ({"rank": draw.randrange(2)} if kind == "kill_worker" else {}))
    return faults


def test_there_are_thirty() -> None:
    assert sum(len(kills(number)) for number in range(len(RUNS))) >= KILLS
    assert {fault.get("op") for number in range(len(RUNS)) for fault in kills(number)} >= set(OPERATIONS)


SOAK = pytest.mark.soak


@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=SOAK), pytest.param(3, marks=SOAK)])
def test_killed_anywhere_it_ends_with_the_same_bits(number: int, references: References, tmp_path: Path) -> None:
    config, faults = RUNS[number], kills(number)
    done = run(job(tmp_path, f"killed-{number}", config, faults))

    struck = {(body["kind"], body["step"]) for body in done.firings()}
    assert struck == {(fault["kind"], fault["step"]) for fault in faults}  # every one of them, really
    assert done.digest == references.digest(config)
    assert done.summary["exactness"] == "bitwise"
    found = done.verify()
    assert found["equal"]
    assert found["digest"] == done.digest
    assert found["step"] == done.summary["steps"]
