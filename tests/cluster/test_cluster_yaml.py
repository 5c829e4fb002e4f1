"""The life of `cluster.local.yaml`: `ray up`, a run that needs more nodes, nodes that come, idle nodes that leave."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
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
from tests.cluster.head import BIN, CLIENTS, ENVIRONMENT, free_ports
from tests.cluster.helpers import MARK, ROOT, job, left, marked, write_job

WAIT_S = 120.0


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


@pytest.mark.timeout(300)
def test_nodes_come_for_a_run_and_leave_after_it(local: Local, tmp_path: Path) -> None:
    up = subprocess.run(
        [str(BIN / "ray"), "up", "-y", "--no-config-cache", str(local.file)],
        cwd=ROOT, env=local.env, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert up.returncode == 0, up.stdout + up.stderr
    assert list(local.machines().values()) == ["head"]

    settings = job(tmp_path / "runs", "wide", "char_lm", run={"steps": 40}, workers={"cpus": 2.0})
    write_job(tmp_path / "job.toml", settings)
    sent = subprocess.Popen(
        [sys.executable, "-m", "everstep", "submit", "job.toml", "--address", local.url, "--follow", "--json"],
        cwd=tmp_path, env=local.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until(lambda: "trainer" in local.machines().values(), "no machine came for the run")
        out, err = sent.communicate(timeout=WAIT_S)
    finally:
        sent.kill()
        sent.wait()
    assert sent.returncode == 0, err
    done = json.loads(out.splitlines()[-1])
    assert (done["steps"], done["state"], done["world_sizes"]) == (40, "done", [2])
    until(lambda: list(local.machines().values()) == ["head"], "idle machines did not leave")
