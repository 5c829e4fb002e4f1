"""The second part of `recovery.py`: a whole node is lost, its raylet and every process on it, in a cluster of raylets.

The head is a node without processors, so that the two workers sit on two further raylets, each at a loopback address of
its own. Every process carries a mark in its environment; it is ended by its process id, found by that mark.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

import psutil
from recovery_ours import LOOK_S, SURVIVOR, Struck, until

from everstep.actors import session
from everstep.actors.environment import ray
from everstep.core import clock
from everstep.core.ids import new_id

MARK = "EVERSTEP_BENCHMARK"  # in the environment of every process that the benchmark causes
HEAD = "127.0.0.2"
RAY = str(Path(sys.executable).parent / "ray")
COMMON = ("--block", "--object-store-memory=200000000", "--min-worker-port=0", "--max-worker-port=0",
          "--disable-usage-stats")  # fmt: skip
ALONE, WITH_LOG = "node of a worker", "node of a worker and a checkpoint actor"


class Quiet:
    """A stream without what Ray prints of raylets that were killed on purpose, pages of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._left_out = stream, False

    def write(self, text: str) -> int:
        self._left_out = "(raylet)" in text or (self._left_out and text == "\n")
        return len(text) if self._left_out else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def marked(mark: str) -> list[psutil.Process]:
    """Return every living process, but this one, with `mark` in its environment, in the order they are to be killed.

    First the agents of a node and whoever started it, which would tell of a raylet's end; then the raylet, which would
    tell of its workers' end: of a machine that is gone nobody tells.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone, a zombie, or somebody else's
            if process.pid != os.getpid() and mark in process.environ().get(MARK, ""):
                line = " ".join(process.cmdline()[:1])
                order = 1 if line.endswith("/raylet") else 2 if line.startswith("ray::") and "Agent" not in line else 0
                found.append((order, process.pid, process))
    return [process for *_, process in sorted(found, key=lambda item: item[:2])]


def end_all(mark: str, patience_s: float = 0.0) -> None:
    """SIGKILL what is left with this mark after so long, until nothing is."""
    deadline = clock.monotonic() + patience_s
    while found := marked(mark):
        if clock.monotonic() < deadline:
            clock.sleep(LOOK_S)
            continue
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=10)


def free_port() -> int:
    """Return a port that is free now, below those that Ray gives to its workers."""
    start = 4000 + os.getpid() * 37 % 5000
    for port in range(start, start + 900):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HEAD, port))
            return port
    raise SystemExit(f"no free port from {start} to {start + 900}")


class Raylet:
    """One `ray start --block` at a loopback address, and all that it starts."""

    def __init__(self, folder: Path, address: str, *words: str) -> None:
        self.address, self.mark = address, new_id()
        env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        env |= {MARK: f"{env[MARK]}+{self.mark}", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}  # "0": it joins nobody
        self.log = folder / f"{address}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [RAY, "start", f"--node-ip-address={address}", *COMMON, *words],
                env=env, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def up(self) -> bool:
        said = self.log.read_text(errors="replace")
        if self.process.poll() is not None:
            raise SystemExit(f"ray start at {self.address} failed:\n{said[-2000:]}")
        return "Ray runtime started" in said

    def kill(self) -> float:
        """SIGKILL the raylet and every process of its node; return when."""
        found = marked(self.mark)
        killed = clock.wall()
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.close()
        return killed

    def close(self) -> None:
        end_all(self.mark)
        self.process.wait()


class Machines:
    """A head without processors and two nodes with one each; a node that is lost is replaced by another one.

    Ray takes 127.0.0.1 for the machine's outside address; the other loopback addresses it leaves alone.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="esb"))  # short: a path of a socket has 107 bytes
        self.gcs = f"{HEAD}:{free_port()}"
        self.raylets: list[Raylet] = []
        self.made = 0

    def __enter__(self) -> Machines:
        try:
            subprocess.run([RAY, "get-auth-token", "--generate"], capture_output=True, check=True)  # as `ray.init` does
            port, temporary = self.gcs.partition(":")[2], self.folder / "ray"
            head = Raylet(self.folder, HEAD, "--head", "--num-cpus=0", f"--port={port}",
                          "--include-dashboard=false", f"--temp-dir={temporary}")  # fmt: skip
            self.raylets.append(head)
            until("a head of Ray", head.up)
            os.environ["RAY_ADDRESS"] = self.gcs
            session.join()
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        ray.shutdown()
        os.environ.pop("RAY_ADDRESS", None)
        for raylet in reversed(self.raylets):
            raylet.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ready(self) -> None:
        """Have two nodes beside the head, whatever was lost before."""
        while len(self.raylets) < 3:
            self.made += 1
            node = Raylet(self.folder, f"127.0.0.{self.made + 2}", f"--address={self.gcs}", "--num-cpus=1")
            self.raylets.append(node)
            until(f"Ray to know the node {node.address}", lambda node=node: node.up() and self.alive(node.address))  # type: ignore[misc]

    def alive(self, address: str) -> bool:
        return any(node["Alive"] and node["NodeManagerAddress"] == address for node in ray.nodes())

    def kill(self, node_id: str) -> tuple[str, float]:
        """Kill the node of this id; return its address, and when."""
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
        raylet = next(raylet for raylet in self.raylets if raylet.address == address)
        self.raylets.remove(raylet)
        return address, raylet.kill()


def lose(machines: Machines, store: str, size: str, repeat: int) -> dict[str, Any]:
    """Kill one node of a fresh run: by turns one that holds only a worker, and one with a checkpoint actor besides.

    Where checkpoint actors are is Ray's choice; of two, mostly one is beside a worker.
    """
    machines.ready()
    run = Struck(replace(SURVIVOR, log_actors=1 + repeat % 2), store, size)
    workers = [worker["node"] for worker in run.group()]
    logs = {one["node"] for one in run.statuses("checkpointer")}
    wanted = [node for node in workers if (node in logs) == bool(repeat % 2)]
    victim = wanted[0] if wanted else workers[repeat % 2]
    address, killed = machines.kill(victim)
    dead = _noticed(machines, run, address)
    row = run.end(killed)
    return {**row, "case": WITH_LOG if victim in logs else ALONE, "gcs_dead_s": round(dead - killed, 3)}


def _noticed(machines: Machines, run: Struck, address: str) -> float:
    """Wait until the run has gone on and the GCS has the node for dead; return when the latter was."""
    until(f"the GCS to say that {address} is dead", lambda: not machines.alive(address))
    dead = clock.wall()
    run.healed()
    return dead


def measure(store: str, size: str, repeats: int, show: Any) -> list[dict[str, Any]]:
    out, err = (cast(TextIO, Quiet(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), Machines() as machines:
        return [show("node", repeat, lose(machines, store, size, repeat)) for repeat in range(repeats)]
