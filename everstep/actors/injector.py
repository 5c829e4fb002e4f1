"""Faults as data: fires each fault of the job file once per run, at its named point.

A firing is stored before it acts, by create-if-absent, so it happens once whatever restarts it brings about.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil

from everstep.actors.environment import ray
from everstep.core import clock
from everstep.core.errors import RunFailed
from everstep.platform.settings import FaultSettings
from everstep.storage.chain import Chain
from everstep.storage.keys import BaseKey, CompressorKey, SegmentKey, parse


class InjectedError(RuntimeError):
    """Raised in a worker by the fault `raise_in_worker`."""


def firing_name(number: int, rank: int) -> str:
    """Return the event name of a fault's firing in one worker."""
    return f"fault-{number:03d}-rank-{rank}"


class Injector:
    """Watches the points of a worker's steps.

    Args:
        faults: as in the job file.
        chain: where firings are stored; None when there is no store to keep them (no log).
        strike: called with (kind, rank) for faults that hit something other than this process.
    """

    def __init__(
        self, faults: tuple[FaultSettings, ...], chain: Chain | None, strike: Callable[[str, int], None]
    ) -> None:
        self.faults, self.chain, self.strike = faults, chain, strike
        self.world_rank: int | None = None
        self._fired: set[int] = set()

    def at(self, point: str, lsn: int) -> None:
        """Fire the faults that are due at this point of step `lsn`."""
        for number, fault in enumerate(self.faults):
            if (
                not fault.op
                and fault.step == lsn
                and fault.at == point
                and number not in self._fired
                and self._mine(fault)
            ):
                self._fired.add(number)
                if self._claim(number, fault, lsn):
                    self._act(fault)

    def _mine(self, fault: FaultSettings) -> bool:
        if self.world_rank is None:
            return False
        if fault.kind in ("kill_checkpointer", "kill_fault_handler", "kill_everything"):
            return self.world_rank == 0
        return fault.kind == "kill_workers" or fault.rank == self.world_rank

    def _claim(self, number: int, fault: FaultSettings, lsn: int) -> bool:
        if self.chain is None:
            return True
        body = {"kind": fault.kind, "step": lsn, "at": fault.at, "rank": self.world_rank, "wall": clock.wall()}
        return self.chain.add_event(firing_name(number, self.world_rank or 0), body)

    def _act(self, fault: FaultSettings) -> None:
        if fault.kind in ("kill_worker", "kill_workers"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop_worker":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "raise_in_worker":
            raise InjectedError(f"injected at step {fault.step}, {fault.at}")
        else:
            self.strike(fault.kind, fault.rank or 0)


class StoreInjector:
    """Fires the faults that name a store operation, in a checkpoint actor.

    `op` is "KIND:STEP", KIND one of segment, base, compressor and STEP a step of the folder store's put ("created",
    "written", "synced", "linked", ...), or "restore". It fires for the first object that reaches the fault's step.

    Args:
        faults: as in the job file.
        chain: where firings are stored.
        index: the number of this checkpoint actor.
        killable: the driver's process id, for `kill_everything`.
    """

    def __init__(self, faults: tuple[FaultSettings, ...], chain: Chain, index: int, killable: int | None) -> None:
        self.chain, self.killable = chain, killable
        self.due = {n: f for n, f in enumerate(faults) if f.op and (f.kind != "kill_checkpointer" or f.rank == index)}

    def trace(self, step: str, key: str) -> None:
        """Be told of a step of a put."""
        found = parse(key.removeprefix(f"{self.chain.run}/"))
        if isinstance(found, SegmentKey):
            self._fire(f"segment:{step}", found.last)
        elif isinstance(found, BaseKey):
            self._fire(f"base:{step}", found.lsn)
        elif isinstance(found, CompressorKey):
            self._fire(f"compressor:{step}", found.lsn)

    def restoring(self, lsn: int) -> None:
        """Be told that a shard was restored at `lsn`, with others still to come."""
        self._fire("restore", lsn)

    def _fire(self, op: str, lsn: int) -> None:
        for number, fault in list(self.due.items()):
            if fault.op == op and lsn >= fault.step:
                del self.due[number]
                body = {"kind": fault.kind, "step": fault.step, "at": op, "rank": fault.rank, "wall": clock.wall()}
                if self.chain.add_event(firing_name(number, 0), body):
                    if fault.kind == "kill_everything" and self.killable is not None:
                        kill_tree(self.killable)
                    os.kill(os.getpid(), signal.SIGKILL)


def kill_actor(victim: Any) -> None:
    """Have an actor kill itself."""
    with contextlib.suppress(ray.exceptions.RayError):  # it died
        ray.get(victim.die.remote(), timeout=10)


def kill_cluster(driver: int | None) -> None:
    """SIGKILL everything that this driver started, ourselves included.

    Raises:
        RunFailed: the cluster is not the driver's own.
    """
    if driver is None:
        raise RunFailed(
            "fault kill_everything: this cluster was not started by everstep, so it is not killed",
            hint="run without RAY_ADDRESS, on a local cluster",
        )
    kill_tree(driver)


def kill_tree(root: int) -> None:
    """SIGKILL a process and all that it started, ourselves last: what losing the machine looks like."""
    parent = psutil.Process(root)
    family = [parent, *parent.children(recursive=True)]
    me = os.getpid()
    for process in family:
        if process.pid != me:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
    os.kill(me, signal.SIGKILL)
