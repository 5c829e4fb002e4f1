"""Submitting, as far as it needs no cluster: what is shipped, what is refused, what an ended job means."""

from __future__ import annotations

import json
import os
import socket
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from everstep import cli, cli_cluster
from everstep.actors import jobs, packing, session
from everstep.actors.jobs import Jobs, Outcome, Output, url_of
from everstep.core import clock
from everstep.core.errors import ClusterGone, RunFailed, UserError

JOB = '[run]\nname = "mine"\nstore = "file:/shared/runs"\n[task]\nname = "char_lm"\n'


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a job file, as the current one."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "mine"


def everstep_command(*words: str) -> Result:
    return CliRunner().invoke(cli.main, list(words), prog_name="everstep")


# ---- what is shipped ----


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_what_is_shipped(here: Path) -> None:
    put(here, "mine.py", "pkg/__init__.py", "pkg/data.bin", "pkg/keep.bin", "build/x", "notes/build/x")
    put(here, ".git/HEAD", ".venv/lib/x.py", "sandbox/pyvenv.cfg", "sandbox/lib/x.py", "pkg/__pycache__/x.pyc")
    put(here, ".mypy_cache/x", "everstep-runs/a/x", f"results/one/manifest/{1:020d}.json", "results/one/g000001/x")
    (here / ".gitignore").write_text("/build/\n")
    (here / "pkg" / ".rayignore").write_text("*.bin\n!keep.bin\n")
    found = {path.relative_to(here).as_posix() for path in packing.files_in(here)}
    assert found == {
        "job.toml", "mine.py", "pkg/__init__.py", "pkg/keep.bin", "notes/build/x", ".gitignore", "pkg/.rayignore"
    }  # fmt: skip


def test_the_archive_depends_on_contents_only(here: Path, tmp_path: Path) -> None:
    put(here, "run.sh", "pkg/__init__.py")
    (here / "run.sh").chmod(0o755)
    first, second = tmp_path / "a.zip", tmp_path / "b.zip"
    assert packing.pack(here, first, "job.toml") == 3
    os.utime(here / "run.sh", (1, 1))
    packing.pack(here, second, "job.toml")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert archive.read("pkg/__init__.py") == b"pkg/__init__.py"
        assert archive.getinfo("run.sh").external_attr >> 16 & 0o777 == 0o755


def test_a_folder_that_is_too_large(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(here, "data/a", "data/b")
    monkeypatch.setattr(packing, "LIMIT", 20)
    with pytest.raises(UserError, match=r"Largest: job.toml .*, data") as caught:
        packing.pack(here, tmp_path / "a.zip", "job.toml")
    assert ".gitignore" in caught.value.hint and not (tmp_path / "a.zip").exists()


def test_a_job_file_that_would_stay_behind(here: Path, tmp_path: Path) -> None:
    (here / ".gitignore").write_text("*.toml\n")
    with pytest.raises(UserError, match=r"job.toml would not be shipped"):
        packing.pack(here, tmp_path / "a.zip", "job.toml")


# ---- what is refused before anything is sent ----


@pytest.mark.parametrize("store", ["file:./runs", "file:runs", "memory:"])
def test_a_store_that_the_cluster_would_lose(here: Path, store: str) -> None:
    said = everstep_command("submit", "job.toml", "--address", "http://127.0.0.1:1", "--set", f"run.store={store}")
    assert said.exit_code == 2 and store in said.stderr and "s3://bucket/prefix" in said.stderr


def test_a_job_file_elsewhere(here: Path) -> None:
    (here / "below").mkdir()
    os.chdir(here / "below")
    said = everstep_command("submit", "../job.toml", "--address", "http://127.0.0.1:1")
    assert said.exit_code == 2 and "outside of" in said.stderr and f"cd {here}" in said.stderr


def test_a_wrong_job_file(here: Path) -> None:
    said = everstep_command("submit", "job.toml", "--address", "http://127.0.0.1:1", "--set", "run.stesp=1")
    assert said.exit_code == 2 and "did you mean 'steps'" in said.stderr


def test_nobody_at_the_address(here: Path, closed_port: int) -> None:
    began = clock.monotonic()
    for words in (("submit", "job.toml"), ("follow", "mine"), ("stop", "mine")):
        said = everstep_command(*words, "--address", f"http://127.0.0.1:{closed_port}")
        assert said.exit_code == 1 and "no Ray cluster answers at" in said.stderr and "refused" in said.stderr
    assert clock.monotonic() - began < 10


@pytest.mark.parametrize("address", ["ray://10.0.0.4:10001", "ftp://x", "http://", "http://a:99999", "auto:x"])
def test_what_is_no_dashboard(address: str) -> None:
    with pytest.raises(UserError, match="dashboard"):
        url_of(address)


def test_addresses() -> None:
    assert url_of("10.0.0.4:8265") == "http://10.0.0.4:8265"
    assert url_of("https://ray.example.org/") == "https://ray.example.org"


# ---- joining a cluster ----


def test_nobody_at_ray_address(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    began = clock.monotonic()
    with pytest.raises(ClusterGone, match="no Ray cluster answers at"):
        session.reach(f"127.0.0.1:{closed_port}")
    assert clock.monotonic() - began < 10
    with pytest.raises(UserError, match="expected host:port"):
        session.reach("http://127.0.0.1:8265")


def test_another_ray_on_the_cluster() -> None:
    text = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.70.0\n    Python: 3.12.1\n"
        "This process on node 10.0.0.5 was started with:\n    Ray: 2.60.0\n    Python: 3.11.9\n"
    )
    error = session.explained(RuntimeError(text), "10.0.0.4:6379")
    assert isinstance(error, UserError)
    assert "runs Ray 2.70.0 on Python 3.12.1, this process Ray 2.60.0 on 3.11.9" in error.message
    assert isinstance(session.explained(RuntimeError("version mismatch, oddly told"), "x"), UserError)
    other = RuntimeError("something else")
    assert session.explained(other, "x") is other


def test_what_a_ray_job_sets_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def variables() -> dict[str, str]:
        found: dict[str, str] = session._options({"RAY_ADDRESS": "auto"})["runtime_env"]["env_vars"]
        return found

    monkeypatch.delenv(session.JOB, raising=False)
    assert variables()["PYTHONPATH"].startswith(os.getcwd())
    for environment in ({"working_dir": "gcs://x.zip"}, {"env_vars": {"PYTHONPATH": "/mine"}}):
        monkeypatch.setenv(session.JOB, json.dumps({"runtime_env": environment}))
        assert variables() == {"RAY_ADDRESS": "auto"}


# ---- what a job wrote, and how it ended ----


def test_the_answer_is_told_from_the_lines() -> None:
    output = Output()
    shown = output.feed("Running entrypoint for job x: exec python\nrunning  st") + output.feed('ep 1/2\n{"run": 1}\n')
    assert shown == ["running  step 1/2"] and output.answer == {"run": 1}
    assert output.feed('{odd\n{"run": ') == ["{odd"]
    assert output.feed("2}\nlater\n") == ['{"run": 1}', "later"]
    assert output.feed("no newline") == [] and output.close() == ["no newline"] and output.answer == {"run": 2}


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("SUCCEEDED", 0, Outcome(0)),
        ("STOPPED", None, Outcome(130)),
        ("FAILED", 1, Outcome(1)),
        ("FAILED", 2, Outcome(2)),
        ("FAILED", 130, Outcome(130)),
        ("FAILED", -9, Outcome(1, "the job's driver was killed (SIGKILL)")),
        ("FAILED", 137, Outcome(1, "the job's driver was killed (SIGKILL)")),
        ("FAILED", 127, Outcome(1, "the cluster has no `python` on its PATH")),
        ("FAILED", None, Outcome(1, "the job could not be run: no such package")),
    ],
)
def test_how_a_job_ended(status: str, code: int | None, expected: Outcome) -> None:
    info = types.SimpleNamespace(status=status, driver_exit_code=code, message="no such package")
    assert jobs._outcome(info) == expected


class Server:
    """Stands for Ray's client: a job that stays PENDING."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def get_job_info(self, job: str) -> Any:
        return types.SimpleNamespace(status=jobs.JobStatus.PENDING, message="Job has not started yet.")

    def stop_job(self, job: str) -> None:
        self.stopped.append(job)


def test_a_job_that_does_not_start() -> None:
    server = Jobs.__new__(Jobs)
    server.address, server._client = "http://x", Server()
    with pytest.raises(RunFailed, match="still PENDING after 0.3 s.*has not started yet") as caught:
        list(server.watch("job", 0.3))
    assert "ray status" in caught.value.hint and server._client.stopped == ["job"]


# ---- trying again ----


class Cluster:
    """Stands for `Jobs`: every submission goes as the script says."""

    address = "http://x"

    def __init__(self, script: list[list[str | Outcome | Exception]], known: bool = True) -> None:
        self.script, self.known, self.submitted = script, known, 0

    def submit(self, *_: object) -> str:
        self.submitted += 1
        return f"job{self.submitted}"

    def watch(self, job: str, start_s: float, seen: int) -> Iterator[str | Outcome]:
        for part in self.script.pop(0):
            if isinstance(part, Exception):
                raise part
            yield part

    def answers(self) -> bool:
        return True

    def knows(self, job: str) -> bool:
        return self.known

    def stop(self, job: str) -> None:
        raise AssertionError


def errand(cluster: Cluster) -> cli_cluster._Errand:
    found = cli_cluster._Errand(cluster, ["train", "job.toml"], "mine", 1.0)  # type: ignore[arg-type]
    found.again = "everstep submit job.toml"
    found.submit()
    return found


def error(kind: str) -> str:
    return json.dumps({"error": {"class": kind, "message": "what broke", "hint": ""}, "exit_code": 1}) + "\n"


def test_what_broke_is_tried_again() -> None:
    cluster = Cluster([[error("StoreError"), Outcome(1)], [Outcome(1, "killed")], ['{"state": "done"}\n', Outcome(0)]])
    assert errand(cluster).see_through(True, 2) == {"state": "done", "exit_code": 0}
    assert cluster.submitted == 3


def test_a_run_that_ended_before_its_head_was_lost_is_done() -> None:
    lost: list[str | Outcome | Exception] = [ClusterGone("nobody answers")]
    cluster = Cluster([lost, [error("RunDone"), Outcome(2)]], known=False)
    assert errand(cluster).see_through(True, 1) == {"state": "done", "exit_code": 0}
    first = Cluster([[error("RunDone"), Outcome(2)]])
    assert errand(first).see_through(True, 1)["exit_code"] == 2


@pytest.mark.parametrize(("kind", "code"), [("UserCodeFailed", 1), ("Fenced", 1), ("SettingsError", 2)])
def test_what_would_only_come_again_is_not(kind: str, code: int) -> None:
    cluster = Cluster([[error(kind), Outcome(code)]])
    assert errand(cluster).see_through(True, 5)["exit_code"] == code
    assert cluster.submitted == 1


def test_a_silent_head_that_still_knows_the_job_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster([["one\ntw", ClusterGone("nobody answers")], ["o\n", Outcome(0)]])
    errand(cluster).see_through(True, 0)
    assert cluster.submitted == 1
    assert capsys.readouterr().err.splitlines() == ["one", "nobody answers; waiting up to 30 s for it", "two"]


def test_a_new_head_gets_the_job_again() -> None:
    lost: list[str | Outcome | Exception] = [ClusterGone("nobody answers")]
    cluster = Cluster([list(lost), [Outcome(0)]], known=False)
    errand(cluster).see_through(True, 1)
    assert cluster.submitted == 2
    with pytest.raises(ClusterGone, match="knows no job") as caught:
        errand(Cluster([list(lost)], known=False)).see_through(True, 0)
    assert "everstep submit job.toml" in caught.value.hint
