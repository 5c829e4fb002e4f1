"""Submitting to a cluster: the driver is a Ray job, and neither its death nor the head's costs a finished step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from everstep.core import clock
from everstep.platform.settings import JobSettings
from everstep.storage.chain import Chain
from everstep.storage.store import open_store
from everstep.training.history import sizes
from tests.cluster import own_tasks
from tests.cluster.head import BIN, Head
from tests.cluster.helpers import MARK, Answer, job, marked, write_job

pytestmark = pytest.mark.timeout(300)
STEPS = 40
WAIT_S = 120.0


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with Head() as head:
        yield head


class Desk:
    """A user's folder with a job file and a task of their own, and the command run from it."""

    def __init__(self, folder: Path, head: Head) -> None:
        self.folder, self.head = folder / "mine", head
        self.store = f"file:{folder / 'runs'}"
        self.folder.mkdir()
        source = Path(own_tasks.__file__ or "").read_text()
        (self.folder / "my_tasks.py").write_text(source)

    def job(self, name: str, steps: int = STEPS, **task: object) -> str:
        """Write a job file; return its name."""
        line = {
            "task": {"name": "my_tasks:Line", "seconds": 0.01, **task},
            "batch": {"global_size": 8, "micro_shards": 4},
            "optimizer": {"name": "adamw", "lr": 1e-2},
            "run": {"steps": steps},
        }
        settings: JobSettings = job(self.folder, name, line)
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"store": self.store})})
        write_job(self.folder / f"{name}.toml", settings)
        return f"{name}.toml"

    def start(self, *words: str, module: str = "everstep") -> subprocess.Popen[str]:
        """Start a command in this folder."""
        return subprocess.Popen(
            [sys.executable, "-m", module, *words], cwd=self.folder, env=self.head.env | {MARK: os.environ[MARK]},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *words: str) -> Answer:
        """Run an everstep command on the cluster to its end."""
        return self.answer(self.start(*words, "--address", self.head.url, "--json"))

    def answer(self, process: subprocess.Popen[str]) -> Answer:
        """Wait for a command's end."""
        try:
            out, err = process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        lines = out.splitlines()
        found = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        return Answer(process.returncode, out, err, found)

    def durable(self, name: str) -> bool:
        """Return whether a run has begun and something of it is in the store."""
        store = open_store(self.store)
        return Chain.exists(store, name) and bool(Chain.open(store, name).listing().segments())

    def until(self, true: Callable[[], bool]) -> None:
        deadline = clock.monotonic() + WAIT_S
        while not true():
            assert clock.monotonic() < deadline
            clock.sleep(0.2)

    def digest(self, name: str) -> str:
        closing = Chain.open(open_store(self.store), name).manifest.closing
        assert closing is not None
        return str(closing["digest"])


@pytest.fixture
def desk(tmp_path: Path, head: Head) -> Desk:
    return Desk(tmp_path, head)


@pytest.fixture(scope="module")
def plain(head: Head, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the undisturbed run, by plain `ray job submit`."""
    desk = Desk(tmp_path_factory.mktemp("plain"), head)
    command = [str(BIN / "ray"), "job", "submit", "--address", head.url, "--working-dir", ".", "--"]
    said = subprocess.run(
        [*command, "python", "-m", "everstep", "train", desk.job("plain")],
        cwd=desk.folder, env=head.env | {MARK: os.environ[MARK]}, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    return desk.digest("plain")


def processes(head: Head, *parts: str) -> list[psutil.Process]:
    """Return the head's processes whose command line holds all of `parts`."""
    found = []
    for process in marked(head.mark):
        try:
            if all(part in " ".join(process.cmdline()) for part in parts):
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_follow_to_the_end(desk: Desk, plain: str) -> None:
    done = desk.run("submit", desk.job("whole"), "--follow", "--fault", "kill_worker@20:rank=1")
    assert done.code == 0, done.err
    assert (done.json["steps"], done.json["state"], done.json["digest"]) == (STEPS, "done", plain)
    assert done.json["run"] == "whole" and done.json["submission_id"].startswith("everstep-train-whole-")
    assert done.json["faults"][0]["kind"] == "worker_lost" or done.json["faults"][0]["kind"] == "kill_worker"
    assert "running  step" in done.err and "healed from" in done.err
    assert "Traceback" not in done.err and "(raylet)" not in done.err
    nobody = desk.run("follow", "whole")
    assert nobody.code == 2 and "nobody runs 'whole'" in nobody.err and "everstep resume whole" in nobody.err


def test_a_killed_driver_costs_nothing(desk: Desk, plain: str) -> None:
    name, head = desk.job("orphan", seconds=0.1), desk.head
    sent = desk.start("submit", name, "--address", head.url, "--follow", "--fault", "kill_worker@25:rank=0", "--json")
    desk.until(lambda: desk.durable("orphan"))
    (driver,) = processes(head, "-m everstep train", "orphan")
    driver.kill()
    answer = desk.answer(sent)
    assert answer.code == 1 and "driver was killed (SIGKILL)" in answer.err
    assert f"everstep follow orphan --address {head.url}" in answer.err
    joined = desk.run("follow", "orphan")
    assert joined.code == 0, joined.err
    assert joined.json["digest"] == plain  # `seconds` only makes it slower
    desk.until(lambda: not processes(head, "ray::FaultHandler"))


def test_leave_then_stop(desk: Desk) -> None:
    head = desk.head
    sent = desk.run("submit", desk.job("long", 100_000))
    assert sent.code == 0, sent.err
    assert f"follow: everstep follow long --address {head.url}" in sent.err
    assert f"stop: everstep stop long --address {head.url}" in sent.err
    desk.until(lambda: desk.durable("long"))

    for wrong in ("2:1", "99"):
        refused = desk.run("scale", "long", wrong)
        assert refused.code == 2 and "expected 1 <= MIN <= MAX <=" in refused.err
    scaled = desk.run("scale", "long", "1")
    assert scaled.code == 0, scaled.err
    desk.until(lambda: sizes(Chain.open(open_store(desk.store), "long").events("size-"))[-1][1] == 1)

    here = head.env | {MARK: os.environ[MARK], "RAY_ADDRESS": head.address}
    following = subprocess.Popen(
        [sys.executable, "-m", "everstep", "follow", "long"], cwd=desk.folder, env=here,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert following.stderr is not None
    for line in following.stderr:
        if line.startswith("running"):
            break
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=WAIT_S)
    assert following.returncode == 130 and "run long goes on" in said

    stopped = desk.run("stop", "long")
    assert stopped.code == 0, stopped.err
    assert stopped.json["state"] == "stopped" and stopped.json["durable_lsn"] == stopped.json["steps"] > 0
    assert f"everstep resume long --store {desk.store}" in stopped.err
    assert not processes(head, "ray::FaultHandler") and not processes(head, "ray::TrainWorker")
    assert Chain.open(open_store(desk.store), "long").manifest.state == "stopped"


def test_ctrl_c_stops_the_run(desk: Desk) -> None:
    sent = desk.start("submit", desk.job("brief", 100_000), "--address", desk.head.url, "--follow", "--json")
    desk.until(lambda: desk.durable("brief"))
    sent.send_signal(signal.SIGINT)
    answer = desk.answer(sent)
    assert answer.code == 130, answer.err
    assert answer.json["state"] == "stopped" and "everstep resume brief" in answer.err
    assert "--set run.name=brief" in answer.err
    assert Chain.open(open_store(desk.store), "brief").manifest.state == "stopped"


def test_a_new_head_goes_on(desk: Desk, plain: str) -> None:
    name, head = desk.job("again", seconds=0.1), desk.head
    sent = desk.start("submit", name, "--address", head.url, "--retries", "1", "--json")
    try:
        desk.until(lambda: desk.durable("again"))
        head.kill()
    finally:
        head.kill()
        head.start()
    answer = desk.answer(sent)
    assert answer.code == 0, answer.err
    assert "submitting again" in answer.err and "cluster_lost" in json.dumps(answer.json["faults"])
    assert (answer.json["digest"], answer.json["generation"]) == (plain, 2)


def test_mistakes_of_the_user(desk: Desk) -> None:
    wrong = desk.run("submit", desk.job("wrong"), "--set", "run.stesp=3", "--follow")
    assert wrong.code == 2 and "did you mean 'steps'" in wrong.err
    flag = desk.folder / "flag"
    flag.write_text("")
    words = ("submit", desk.job("raises", poison=16, raise_while=str(flag)), "--retries", "3")
    failing = desk.run(*words)
    assert failing.code == 1, failing.err
    assert "a mistake in my own loss" in failing.err and "submitting again" not in failing.err
    assert failing.json["error"]["class"] == "UserCodeFailed"
    (desk.folder / "my_tasks.py").write_text("import nothing_of_that_name\n")
    unknown = desk.run("submit", desk.job("unknown"), "--retries", "3")
    assert unknown.code == 2, unknown.err
    assert "nothing_of_that_name" in unknown.err and "submitting again" not in unknown.err
