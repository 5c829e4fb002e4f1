"""What goes wrong through no fault of a process: each gets one clear message, and nothing that was stored is lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from everstep import cli
from everstep.core import clock
from everstep.core.errors import RunFailed, StoreError
from everstep.platform.settings import JobSettings
from everstep.storage.objects import FORMAT_VERSION, decode, encode
from tests.cluster.helpers import Command, Done, References, job, launched, run, wait, write_job

LINE: dict[str, Any] = {
    "task": {"name": "tests.cluster.own_tasks:Line"},
    "batch": {"global_size": 8, "micro_shards": 4},
    "optimizer": {"name": "adamw", "lr": 1e-2},
    "run": {"steps": 40},
}
USER, BROKEN = 2, 1  # exit codes: the request must change; something broke


@dataclass(frozen=True)
class Said:
    """What a command line in this process came to."""

    code: int
    err: str
    json: dict[str, Any]


def say(*words: str) -> Said:
    """Run one command line with `--json` in this process, on the session's Ray if it needs one."""
    result = CliRunner().invoke(cli.main, [*words, "--json"], prog_name="everstep")
    return Said(result.exit_code, result.stderr, json.loads(result.stdout.splitlines()[-1]))


def refused(said: Said, code: int, *parts: str) -> None:
    """Check that it was one clear message without a traceback that names the thing, and says what to do."""
    assert said.code == said.json["exit_code"] == code, said.err
    assert "Traceback" not in said.err
    assert said.err.count("error: ") == 1
    assert "\nnext: " in said.err
    assert said.json["error"]["hint"]
    for part in parts:
        assert part in said.err


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def line_job(folder: Path, **task: Any) -> str:
    return write_job(folder / "job.toml", job(folder / "runs", "line", LINE, task=task))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("run.stesp=3", ("run.stesp", "unknown key", "did you mean 'steps'")),
        ("run.steps=many", ("run.steps", "expected a whole number", "got 'many'")),
        ("workers.cpus=true", ("workers.cpus", "expected number", "got True")),
        ("task.name=char_ln", ("char_ln", "did you mean 'char_lm'")),
        ("task.name=tests.cluster.nowhere:Line", ("tests.cluster.nowhere",)),
        ("task.name=tests.cluster.own_tasks:Lime", ("Lime", "tests.cluster.own_tasks")),
        ("task.paddin=3", ("paddin",)),
        ("optimizer.name=adamv", ("adamv", "did you mean 'adam")),
        ("optimizer.lrr=0.1", ("lrr",)),
        ("task.name=tests.cluster.own_tasks:Empty", ("Empty", "empty", "train")),
        ("batch.global_size=9", ("batch.global_size", "multiple of batch.micro_shards = 4", "got 9")),
        ("run.store=flie:./runs", ("run.store", "flie:./runs")),
    ],
)
def test_a_job_that_must_change(change: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    refused(say("train", line_job(tmp_path), "--set", change), USER, *parts)
    assert not everything_in(tmp_path / "runs")


def test_a_store_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("something else")
    store = f"file:{tmp_path / 'file' / 'runs'}"
    refused(say("train", line_job(tmp_path), "--set", f"run.store={store}"), USER, store, "cannot create")
    assert (tmp_path / "file").read_text() == "something else"


def test_a_store_without_permission() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        folder = Path(name)
        folder.chmod(0o755)
        store = folder / "locked"
        store.mkdir(mode=0o555)
        words = ("train", line_job(folder), "--set", f"run.store=file:{store}")
        with as_nobody():
            said = say(*words)
        refused(said, USER, "permission", str(store))
        assert not list(store.iterdir())


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Be somebody whom permissions bind: root may write anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_run_name_that_is_taken(references: References, tmp_path: Path) -> None:
    done = references.run("char_lm")
    before = everything_in(references.store)
    name = write_job(tmp_path / "job.toml", done.settings)
    said = say("train", name, "--set", "optimizer.lr=0.5", "--set", "run.seed=9")

    refused(said, USER, str(done.settings.run.name), "other settings", "optimizer.lr", "run.seed", "everstep resume")
    assert everything_in(references.store) == before


@pytest.fixture
def stored(references: References, tmp_path: Path) -> Done:
    """A finished run in a store of its own, to be damaged."""
    done = references.run("char_lm")
    name = str(done.settings.run.name)
    shutil.copytree(references.store / name, tmp_path / "runs" / name)
    return replace(done, settings=job(tmp_path / "runs", name, "char_lm"))


def files(done: Done, pattern: str) -> list[Path]:
    return sorted(Path(done.settings.run.store.removeprefix("file:"), str(done.settings.run.name)).glob(pattern))


def damaged(done: Done, path: Path, *parts: str) -> None:
    """Check that `chain verify` finds the damage and that looking changes nothing."""
    folder = Path(done.settings.run.store.removeprefix("file:"))
    before = everything_in(folder)
    said = say("chain", "verify", str(done.settings.run.name), "--store", done.settings.run.store)
    refused(said, BROKEN, *parts)
    assert everything_in(folder) == before


def restored(done: Done, step: int, out: Path) -> dict[str, Any]:
    words = ("chain", "export", str(done.settings.run.name), "--store", done.settings.run.store)
    return say(*words, "--step", str(step), "--out", str(out)).json


def test_a_bit_flipped_in_a_segment(stored: Done, tmp_path: Path) -> None:
    path = files(stored, "g000001/log/s0001/*.arrow")[1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    damaged(stored, path, path.name, "checksum")
    assert restored(stored, 60, tmp_path)["digest"] == stored.digest  # a later base bridges it


def test_a_base_cut_short(stored: Done, tmp_path: Path) -> None:
    path = files(stored, "g000001/base/s0001/*.arrow")[-1]  # the newest: files come sorted by lsn
    path.write_bytes(path.read_bytes()[:-100])

    damaged(stored, path, path.name)
    found = restored(stored, 60, tmp_path)  # from the round before
    assert found["digest"] == stored.digest
    assert [Path(name).name for name in found["damaged_objects_left_out"]] == [path.name]


def test_a_segment_missing_in_the_middle(stored: Done, tmp_path: Path) -> None:
    path = files(stored, "g000001/log/s0002/*.arrow")[1]
    first = int(path.name.split("-")[0])
    path.unlink()

    damaged(stored, path, "shard 2", str(first))
    assert restored(stored, 60, tmp_path)["digest"] == stored.digest
    assert restored(stored, first, tmp_path)["exit_code"] == BROKEN


def test_a_segment_missing_that_no_base_bridges(stored: Done, tmp_path: Path) -> None:
    path = files(stored, "g000001/log/s0002/*.arrow")[1]
    first = int(path.name.split("-")[0])
    path.unlink()
    for base in files(stored, "g000001/base/s0002/*.arrow"):
        if int(base.name.split("-")[0]) >= first:
            base.unlink()

    damaged(stored, path, "shard 2", str(first))
    assert restored(stored, 60, tmp_path)["exit_code"] == BROKEN
    assert restored(stored, first - 1, tmp_path)["step"] == first - 1


def test_a_record_of_a_newer_format(stored: Done) -> None:
    path = files(stored, "g000001/log/s0000/*.arrow")[-1]
    found = decode(path.read_bytes(), where=str(path))
    path.write_bytes(memoryview(encode(replace(found.header, format=FORMAT_VERSION + 1), found.batches)))

    damaged(stored, path, path.name, f"format {FORMAT_VERSION + 1}", "upgrade everstep")


PADDED = {"poison": 256, "padding": 20_000}  # 80 kB a record, 240 kB a base; one sample is not a number


@pytest.fixture(scope="module")
def mistake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the user's loss raises."""
    return tmp_path_factory.mktemp("mistake") / "still-there"


@pytest.fixture(scope="module")
def mended(cluster: None, mistake: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the job ends with when nothing raises and the store has room."""
    assert not mistake.exists()
    return run(padded(tmp_path_factory.mktemp("mended"), mistake)).digest


def padded(store: Path, mistake: Path, **check: Any) -> JobSettings:
    """Return the job whose loss raises while a file exists, and which writes a lot."""
    return job(store, "line", LINE, task={**PADDED, "raise_while": str(mistake)}, checkpoint=check)


def test_a_mistake_in_their_own_loss(mended: str, mistake: Path, tmp_path: Path) -> None:
    settings = padded(tmp_path / "runs", mistake)
    mistake.touch()
    try:
        said = say("train", write_job(tmp_path / "job.toml", settings))
    finally:
        mistake.unlink()

    assert said.code == BROKEN
    theirs, ours = said.err.rfind("ZeroDivisionError: a mistake in my own loss"), said.err.find("was raised in worker")
    assert 0 < said.err.find("Traceback") < said.err.find("own_tasks.py") < theirs < ours
    assert "2 times" in said.err[ours:]
    assert "everstep resume" in said.err[ours:]
    assert said.json["error"]["class"] == "UserCodeFailed"
    assert said.json["error"]["message"].startswith("Traceback")
    assert run(settings, "resume").digest == mended


def test_a_loss_that_is_not_finite_stops_the_run(cluster: None, tmp_path: Path) -> None:
    settings = job(tmp_path, "stop", LINE, task={"poison": 256})
    with pytest.raises(RunFailed, match=r"step \d+: the (loss|gradient) is not finite") as caught:
        run(settings)
    assert "on_nonfinite" in caught.value.hint
    held = cli.ask("chain", "ls", "stop", "--store", settings.run.store, "--json")
    bad = int(str(caught.value).partition(":")[0].rpartition(" ")[2])
    assert held["last_restorable"] == bad - 1
    assert held["damage"] is None


def test_a_loss_that_is_not_finite_can_be_skipped(cluster: None, tmp_path: Path) -> None:
    done = run(job(tmp_path, "skip", LINE, task={"poison": 256}, run={"steps": 40, "on_nonfinite": "skip"}))

    assert done.summary["steps"] == done.summary["durable_lsn"] == 40
    assert done.summary["loss_last"] < done.summary["loss_first"]
    assert done.verify()["equal"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def make_room(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)


def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(mended: str, mistake: Path, small_disk: Path) -> None:
    settings = padded(small_disk, mistake, storage_timeout_s=2.0)
    with pytest.raises(StoreError, match=str(small_disk)) as caught:
        run(settings)
    assert "No space left" in caught.value.message
    assert "resume" in caught.value.hint

    where = ("line", "--store", settings.run.store, "--json")
    replay = cli.ask("chain", "verify", *where)
    assert replay["equal"] is None  # the run has not ended
    assert 0 < replay["step"] < 40
    make_room(small_disk)
    assert run(settings, "resume").digest == mended


def steps_of(gaps: list[dict[str, Any]]) -> set[int]:
    return {step for gap in gaps for step in range(gap["first"], gap["last"] + 1)}


def test_a_full_disk_may_leave_a_gap(cluster: None, small_disk: Path) -> None:
    settings = job(
        small_disk, "line", LINE, task={"padding": 20_000, "seconds": 0.02}, run={"steps": 150},
        checkpoint={"storage_timeout_s": 1.0, "on_storage_loss": "continue"},
    )  # fmt: skip
    with launched(settings) as handle:
        wait(handle, until=90)
        make_room(small_disk)
        state = wait(handle)
        assert state["state"] == "done"
        done = Done(settings, handle.summary(), list(state["events"]))

    assert done.summary["steps"] == done.summary["durable_lsn"] == 150
    gaps = [body for name, body in done.chain.events().items() if name.startswith("gap-")]
    assert gaps
    assert all(0 < body["first"] <= body["last"] <= 150 for body in gaps)
    replay = done.verify()
    assert replay["step"] == 150
    assert replay["digest"] == done.digest
    held = cli.ask("chain", "ls", "line", "--store", settings.run.store, "--json")
    assert steps_of(held["gaps"]) == steps_of(gaps)  # told as ranges that do not touch, whoever declared which part


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(references: References, tmp_path: Path) -> None:
    settings = job(tmp_path / "runs", "stopped", "char_lm")
    name = write_job(tmp_path / "job.toml", settings)
    with Command("train", name, "--json", cwd=tmp_path) as train:
        deadline = clock.monotonic() + 100
        while not list(tmp_path.glob("runs/stopped/g000001/log/s0000/*.arrow")) and clock.monotonic() < deadline:
            clock.sleep(0.02)
        train.process.send_signal(signal.SIGINT)
        answer = train.answer()
        assert train.left() == []

    assert answer.code == 130, answer.err
    assert "everstep resume stopped --store" in answer.err
    assert 0 < answer.json["steps"] < 60
    assert answer.json["durable_lsn"] == answer.json["complete_lsn"] == answer.json["steps"]
    done = run(settings)  # the same job under the same name
    assert done.digest == references.digest("char_lm")
    assert done.summary["exactness"] == "bitwise"
