"""Machines that come, are taken away and die: a run on several raylets, followed by the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.core import clock
from everstep.storage.chain import Chain
from everstep.storage.store import open_store
from tests.cluster.head import BIN, Head, Node
from tests.cluster.helpers import MARK, ROOT, job, world_sizes, write_job
from tests.cluster.test_elastic import LEDGER, assert_every_sample_once, done_of

pytestmark = pytest.mark.timeout(300)
WAIT_S = 150.0
DRAIN = """
import sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == sys.argv[2] and node["Alive"]))
"""


@pytest.fixture
def head() -> Iterator[Head]:
    with Head(cpus=1, ip="127.0.0.10") as head:
        yield head


class Watched:
    """A run that the command follows, and what its log says."""

    def __init__(self, folder: Path, head: Head, settings: Any) -> None:
        self.settings, self.head = settings, head
        words = [sys.executable, "-m", "everstep", "train", write_job(folder / "job.toml", settings), "--json"]
        env = head.env | {MARK: os.environ[MARK], "RAY_ADDRESS": head.address, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def until(self, sizes: list[int]) -> None:
        """Wait until the run has had these world sizes."""
        deadline = clock.monotonic() + WAIT_S
        while world_sizes(self.settings) != sizes:
            assert self.process.poll() is None, self.process.communicate()
            assert clock.monotonic() < deadline, f"{world_sizes(self.settings)}, expected {sizes}"
            clock.sleep(0.2)

    def steps(self, count: int) -> None:
        """Wait until so many more steps are in the log."""
        chain = Chain.open(open_store(self.settings.run.store), self.settings.run.name)
        before, deadline = self.logged(chain), clock.monotonic() + WAIT_S
        while self.logged(chain) < before + count:
            assert self.process.poll() is None and clock.monotonic() < deadline, self.logged(chain)
            clock.sleep(0.2)

    @staticmethod
    def logged(chain: Chain) -> int:
        return max((key.last for key in chain.listing().segments(0)), default=0)

    def end(self) -> tuple[dict[str, Any], str]:
        """Stop the run; return (summary, what was told)."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 130, err
        return json.loads(out.splitlines()[-1]), err

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def watched(tmp_path: Path, head: Head) -> Iterator[Callable[..., Watched]]:
    started: list[Watched] = []

    def start(settings: Any) -> Watched:
        started.append(Watched(tmp_path, head, settings))
        return started[-1]

    yield start
    for one in started:
        one.close()


def drain(head: Head, address: str, seconds: int) -> None:
    """Have Ray mark the node at `address` as one that will be taken away."""
    asked = [sys.executable, "-c", DRAIN, head.address, address]
    found = subprocess.run(asked, env=head.env, capture_output=True, text=True, timeout=60, check=True)
    node = found.stdout.split()[-1]
    command = [str(BIN / "ray"), "drain-node", f"--address={head.address}", f"--node-id={node}",
               "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=the test takes it away",
               f"--deadline-remaining-seconds={seconds}"]  # fmt: skip
    done = subprocess.run(command, env=head.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_node_that_is_taken_away_is_left_and_one_that_dies_costs_no_finished_step(
    tmp_path: Path, head: Head, watched: Callable[..., Watched]
) -> None:
    """1 worker on the head; a node comes (2), is drained (1); another comes (2), dies (1)."""
    workers = {"min": 1, "max": 2, "spares": 0, "hang_timeout_s": 5.0}
    slow = {"task": LEDGER["task"] | {"seconds": 0.04}}
    settings = job(tmp_path / "runs", "nodes", LEDGER | slow, run={"steps": 1_000_000}, workers=workers)
    run = watched(settings)
    run.until([1])
    first = Node(head, "127.0.0.11", cpus=1)
    second = Node(head, "127.0.0.12", cpus=1)
    try:
        first.start()
        run.until([1, 2])
        drain(head, "127.0.0.11", 120)
        run.until([1, 2, 1])
        first.kill()
        second.start()
        run.until([1, 2, 1, 2])
        run.steps(10)
        second.kill()
        run.until([1, 2, 1, 2, 1])
        summary, told = run.end()
    finally:
        first.kill()
        second.kill()
    assert summary["world_sizes"] == [1, 2, 1, 2, 1]
    (fault,) = summary["faults"]  # leaving a node that drains is none
    assert fault["kind"] in ("worker_lost", "hang") and fault["steps_lost"] == 0
    assert "is being taken away" in told and "asking Ray for 1 worker" in told
    assert_every_sample_once(done_of(settings, summary))
