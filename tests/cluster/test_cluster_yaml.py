"""The life of `cluster.local.yaml`: `ray up`, a run that needs more nodes, nodes that come, idle nodes that leave."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from everstep.core import clock
from tests.cluster import own_tasks
from tests.cluster.head import BIN, CLIENTS, ENVIRONMENT, free_ports
from tests.cluster.helpers import MARK, ROOT, job, left, marked, world_sizes, write_job
from tests.cluster.test_elastic import GLOBAL, LEDGER, assert_every_sample_once, counts, done_of

WAIT_S = 150.0
OWN = LEDGER["task"]["name"]


@dataclass(frozen=True)
class Local:
    """A cluster made from the file, at a place of its own."""

    folder: Path
    file: Path
    url: str
    env: dict[str, str]

    def machines(self) -> dict[str, str]:
        """Return the type of every machine that there is, by name."""
        found = json.loads((self.folder / "machines.json").read_text())["machines"]
        return {name: str(machine["tags"]["ray-user-node-type"]) for name, machine in found.items()}


@pytest.fixture
def local() -> Iterator[Local]:
    folder = Path(tempfile.mkdtemp(prefix="esl"))  # short: sockets lie below it
    mark = uuid.uuid4().hex
    gcs, dashboard, agent, grpc, runtime, metrics, client = free_ports(7)
    first = 20 + os.getpid() % 200
    text = (ROOT / "cluster.local.yaml").read_text()
    for old, new in {"/tmp/everstep-loopback": str(folder), "6379": str(gcs), "8265": str(dashboard)}.items():
        text = text.replace(old, new)
    text = text.replace("--head ", f"--head --dashboard-agent-listen-port={agent} --dashboard-agent-grpc-port={grpc} "
                        f"--runtime-env-agent-port={runtime} --metrics-export-port={metrics} "
                        f"--ray-client-server-port={client} ")  # fmt: skip
    config = yaml.safe_load(text)
    config["provider"]["first"], config["idle_timeout_minutes"] = first, 0.1
    (folder / "cluster.yaml").write_text(yaml.safe_dump(config))
    variables = {name: value for name, value in ENVIRONMENT.items() if name != "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}
    env = {name: value for name, value in os.environ.items() if name not in CLIENTS} | variables
    env = {name: value for name, value in env.items() if name != "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}
    env |= {MARK: f"{os.environ.get(MARK, '')}+{mark}", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    try:
        yield Local(folder, folder / "cluster.yaml", f"http://127.0.0.{first}:{dashboard}", env)
    finally:
        while found := marked(mark):  # by pid: `ray down` stops every Ray on this computer
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=10)
        shutil.rmtree(folder, ignore_errors=True)
        assert not left(mark, 10)


def until(true: Callable[[], bool], what: str) -> None:
    deadline = clock.monotonic() + WAIT_S
    while not true():
        assert clock.monotonic() < deadline, what
        clock.sleep(0.2)


def raylet(local: Local, address: str) -> list[psutil.Process]:
    """Return the raylet of a machine and the processes that it started."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if words and words[0].endswith("/raylet") and f"--node_ip_address={address}" in words:
                return [process, *process.children(recursive=True)]
    raise AssertionError(f"no raylet at {address}")


@pytest.mark.timeout(400)
def test_a_run_grows_with_the_nodes_that_come_and_outlives_one_that_dies(local: Local, tmp_path: Path) -> None:
    """1 worker on the head; two nodes come: 3; one dies: 2; another comes: 3; the end; idle nodes leave."""
    up = subprocess.run(
        [str(BIN / "ray"), "up", "-y", "--no-config-cache", str(local.file)],
        cwd=ROOT, env=local.env, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert up.returncode == 0, up.stdout + up.stderr
    assert list(local.machines().values()) == ["head"]

    (tmp_path / "my_tasks.py").write_text(Path(own_tasks.__file__ or "").read_text())
    task = LEDGER["task"] | {"name": "my_tasks:Ledger", "seconds": 0.05}
    workers = {"min": 1, "max": 3, "spares": 0, "cpus": 2.0}
    settings = job(tmp_path / "runs", "wide", LEDGER | {"task": task}, run={"steps": 1_000_000}, workers=workers)
    write_job(tmp_path / "job.toml", settings)
    sent = subprocess.Popen(
        [sys.executable, "-m", "everstep", "submit", "job.toml", "--address", local.url, "--follow", "--json"],
        cwd=tmp_path, env=local.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until(lambda: world_sizes(settings)[-1:] == [3], "the run did not grow to 3 workers")
        for process in raylet(local, trainer(local)):
            process.kill()
        until(lambda: world_sizes(settings)[-1] == 2, "the run did not go on with 2 workers")
        until(lambda: world_sizes(settings)[-1] == 3, "the run did not come back to 3 workers")
        sent.send_signal(signal.SIGINT)
        out, err = sent.communicate(timeout=WAIT_S)
    finally:
        sent.kill()
        sent.communicate()
    assert sent.returncode == 130, err
    done = json.loads(out.splitlines()[-1])
    assert (done["state"], done["world_sizes"][0]) == ("stopped", 1)
    (fault,) = done["faults"]
    assert fault["steps_lost"] <= 1
    ledger = done_of(settings.model_copy(update={"task": settings.task.model_copy(update={"name": OWN})}), done)
    assert_every_sample_once(ledger)
    seen, consumed = counts(ledger), done["steps"] * GLOBAL
    least, most = consumed // len(seen), -(-consumed // len(seen))
    missing, twice = int((seen < least).sum()), int((seen > most).sum())
    print(f"world sizes {done['world_sizes']}, steps lost {fault['steps_lost']}")
    print(f"ids seen {int(seen.sum())}, expected {consumed}; of {len(seen)}: {missing} missing, {twice} too often")
    until(lambda: list(local.machines().values()) == ["head"], "idle machines did not leave")


def trainer(local: Local) -> str:
    """Return the address of a machine that came for the run."""
    found = json.loads((local.folder / "machines.json").read_text())["machines"]
    return next(str(m["ip"]) for m in found.values() if m["tags"]["ray-user-node-type"] == "trainer")
