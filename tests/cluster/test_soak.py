"""A hundred random faults in one run: kills, stops, machines, the store, the fault handler, the driver.

    EVERSTEP_SOAK_FAULTS=20 EVERSTEP_SOAK_SEED=3 pytest tests/cluster/test_soak.py -m soak -s

Three raylets and a real S3 server. Faults strike from outside, whatever is going on; then the run is stopped, and has
to end with the bits of a run of as many steps that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep.core import clock
from everstep.platform.settings import JobSettings
from everstep.storage.chain import Chain
from everstep.storage.store import open_store
from tests.cluster.head import BIN, Head, Node
from tests.cluster.helpers import MARK, ROOT, job, marked, write_job
from tests.cluster.test_elastic import GLOBAL, LEDGER, assert_every_sample_once, counts, done_of
from tests.seaweed import Seaweed

pytestmark = [pytest.mark.soak, pytest.mark.timeout(5400)]

FAULTS = int(os.environ.get("EVERSTEP_SOAK_FAULTS", "50"))  # of each of the two configurations
SEED = int(os.environ.get("EVERSTEP_SOAK_SEED", "1"))
PATIENCE_S = 180.0
ROLES = ("TrainWorker", "CheckpointActor", "FaultHandler")
KINDS = {
    "kill_worker": 20, "stop_worker": 10, "kill_all_workers": 5, "kill_checkpointer": 15, "kill_fault_handler": 15,
    "kill_node": 10, "kill_store": 10, "stop_store": 10, "kill_driver": 5,
}  # fmt: skip


class Soak:
    """A run and everything around it that can be broken."""

    def __init__(self, folder: Path, head: Head, seaweed: Seaweed, settings: JobSettings, seed: int) -> None:
        self.folder, self.head, self.seaweed, self.settings = folder, head, seaweed, settings
        self.random = random.Random(seed)
        self.nodes = [Node(head, f"127.0.0.{place}", cpus=2) for place in (11, 12)]
        self.struck: Counter[str] = Counter()
        self.memory: dict[str, list[int]] = {role: [] for role in ROLES}
        self.driver: subprocess.Popen[bytes] | None = None

    def everstep(self, *words: str) -> subprocess.Popen[bytes]:
        env = self.head.env | {MARK: os.environ[MARK], "RAY_ADDRESS": self.head.address, "PYTHONPATH": str(ROOT)}
        with (self.folder / "driver.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "everstep", *words, "--json"], cwd=self.folder, env=env, stdout=log, stderr=log
            )

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        self.driver = self.everstep("train", write_job(self.folder / "soak.toml", self.settings))

    def logged(self) -> int:
        """Return the last step that is in the store, -1 while it does not answer."""
        try:
            chain = Chain.open(open_store(self.settings.run.store, endpoint=self.seaweed.endpoint), self.name)
            return max((key.last for key in chain.listing().segments(0)), default=0)
        except Exception:
            return -1

    @property
    def name(self) -> str:
        return self.settings.run.name or ""

    def goes_on(self, steps: int) -> None:
        """Wait until so many more steps are in the store."""
        before, deadline = -1, clock.monotonic() + PATIENCE_S
        while before < 0 or self.logged() < before + steps:
            before = self.logged() if before < 0 else before
            for node in self.nodes:
                node.keep()
            ended = self.driver is not None and self.driver.poll() is not None
            assert not ended and clock.monotonic() < deadline, self.said()
            clock.sleep(0.2)

    def said(self) -> str:
        """Return the last words of the drivers and of the machines."""
        logs = [self.folder / "driver.log", *sorted(self.head.folder.glob("*.log"))]
        return "\n".join(f"{log.name}:\n{log.read_text()[-4000:]}" for log in logs)

    def actors(self, role: str) -> list[psutil.Process]:
        found = []
        for process in marked(self.head.mark):
            with contextlib.suppress(psutil.Error):
                if f"ray::{role}" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def strike(self, kind: str) -> None:
        self.struck[kind] += 1
        strikes: dict[str, Callable[[], None]] = {
            "kill_worker": lambda: self.signal("TrainWorker", signal.SIGKILL),
            "stop_worker": lambda: self.signal("TrainWorker", signal.SIGSTOP),
            "kill_checkpointer": lambda: self.signal("CheckpointActor", signal.SIGKILL),
            "kill_fault_handler": lambda: self.signal("FaultHandler", signal.SIGKILL),
            "kill_all_workers": self.lose_workers,
            "kill_node": self.lose_node,
            "kill_store": self.restart_store,
            "stop_store": self.halt_store,
            "kill_driver": self.lose_driver,
        }
        with contextlib.suppress(psutil.NoSuchProcess):
            strikes[kind]()

    def signal(self, role: str, number: int) -> None:
        found = self.actors(role)
        if found:
            self.random.choice(found).send_signal(number)

    def lose_workers(self) -> None:
        for process in self.actors("TrainWorker"):
            process.kill()

    def lose_node(self) -> None:
        place = self.random.randrange(len(self.nodes))
        address = self.nodes[place].address
        self.nodes[place].kill()
        self.nodes[place] = Node(self.head, address, cpus=2)
        self.nodes[place].start()

    def restart_store(self) -> None:
        self.seaweed.restart()

    def halt_store(self) -> None:
        self.seaweed.stop()
        clock.sleep(3.0)
        self.seaweed.cont()

    def lose_driver(self) -> None:
        assert self.driver is not None
        self.driver.kill()
        self.driver.wait()
        self.driver = self.everstep("follow", self.name)

    def remember(self) -> None:
        """Note how much memory the actors hold."""
        for role in ROLES:
            for process in self.actors(role):
                with contextlib.suppress(psutil.Error):
                    self.memory[role].append(process.memory_info().rss)

    def stop(self) -> dict[str, Any]:
        """Stop the run; return its summary."""
        stopping = self.everstep("stop", self.name)
        assert stopping.wait(PATIENCE_S) == 0, (self.folder / "driver.log").read_text()[-6000:]
        lines = (self.folder / "driver.log").read_text().splitlines()
        return next(
            found for line in reversed(lines) if line.startswith("{") and "digest" in (found := json.loads(line))
        )

    def close(self) -> None:
        if self.driver is not None:
            self.driver.kill()
            self.driver.wait()
        for node in self.nodes:
            node.kill()


@pytest.fixture
def head() -> Iterator[Head]:
    with Head(cpus=1, ip="127.0.0.10") as head:
        yield head


@pytest.mark.parametrize("method", ["none", "topk"])
def test_random_faults_leave_no_trace_in_the_bits(tmp_path: Path, head: Head, seaweed: Seaweed, method: str) -> None:
    settings = job(
        tmp_path, f"soak-{method}", LEDGER, run={"steps": 1_000_000, "store": seaweed.url},
        workers={"spares": 1, "hang_timeout_s": 2.0}, compression={"method": method, "density": 0.2},
        store={"endpoint": seaweed.endpoint}, checkpoint={"shards": 2, "actors": 2, "on_total_loss": "exact"},
    )  # fmt: skip
    soak = Soak(tmp_path, head, seaweed, settings, SEED)
    began = clock.monotonic()
    try:
        soak.start()
        soak.goes_on(10)
        for number in range(FAULTS):
            kind = soak.random.choices(list(KINDS), list(KINDS.values()))[0]
            soak.strike(kind)
            soak.goes_on(soak.random.randrange(3, 20))
            soak.remember()
            print(f"{clock.monotonic() - began:7.1f} s  fault {number + 1}: {kind}, step {soak.logged()}", flush=True)
        summary = soak.stop()
        undisturbed = _undisturbed(soak, summary["steps"])
        status = subprocess.run([str(BIN / "ray"), "status", f"--address={head.address}"], env=head.env,
                                capture_output=True, text=True, timeout=60).stdout  # fmt: skip
        gone = not any(soak.actors(role) for role in ROLES)
    finally:
        soak.close()
    print(f"seed {SEED}, {method}: {dict(soak.struck)}; {summary['steps']} steps, {clock.monotonic() - began:.0f} s")
    print(f"healed: {Counter((row['kind'], row['tier']) for row in summary['faults'])}")
    print(f"steps lost {sum(row['steps_lost'] for row in summary['faults'])}, exactness {summary['exactness']}")
    for role, sizes in soak.memory.items():
        third = max(len(sizes) // 3, 1)
        print(f"{role}: at most {max(sizes[:third]) >> 20} MiB in the first third, then {max(sizes[-third:]) >> 20}")
        assert max(sizes[-third:]) < 1.5 * max(sizes[:third]), role
    assert summary["digest"] == undisturbed["digest"]
    assert summary["exactness"] == "bitwise"
    assert gone, "actors are left"
    assert "0B/" in next(line for line in status.splitlines() if "object_store_memory" in line), status
    done = done_of(settings, summary)
    if method == "none":
        assert_every_sample_once(done)
    else:
        assert float(counts(done).sum()) <= summary["steps"] * GLOBAL
    done.verify()


def _undisturbed(soak: Soak, steps: int) -> dict[str, Any]:
    run = soak.settings.run.model_copy(update={"name": "undisturbed", "steps": steps})
    settings = soak.settings.model_copy(update={"run": run})
    alone = soak.everstep("train", write_job(soak.folder / "undisturbed.toml", settings))
    assert alone.wait(1200) == 0
    lines = (soak.folder / "driver.log").read_text().splitlines()
    return dict(json.loads(next(line for line in reversed(lines) if line.startswith("{"))))
