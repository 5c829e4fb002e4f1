"""The command: exit codes, the JSON line, errors on stderr, following a run; the rooms below are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import everstep
from everstep import cli, console
from everstep.core.errors import EverstepError, RunFailed, UserCodeFailed
from everstep.platform.settings import JobSettings, load, named, to_dict
from everstep.storage.chain import Chain
from everstep.storage.store import open_store

JOB = '[run]\nname = "mine"\nsteps = 3\n[task]\nname = "char_lm"\n'
SUMMARY = {
    "run": "mine",
    "steps": 3,
    "world_sizes": [2],
    "loss_first": 4.5,
    "loss_last": float("nan"),
    "bytes_logged": 12345,
    "stall_fraction": 0.0123,
    "digest": "ab" * 32,
    "faults": [
        {"kind": "kill_worker", "step": 2, "tier": "survivor", "steps_lost": 1, "seconds_to_next_step": 0.2,
         "exactness": "bitwise"}
    ],
}  # fmt: skip


def at(state: str, lsn: int, events: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "state": state, "lsn": lsn, "steps": 3, "loss": None if lsn == 0 else 4.5 / lsn, "steps_per_s": 2.0,
        "world_size": 2, "durable_lsn": max(lsn - 1, 0), "complete_lsn": lsn,
        "message": events[-1] if events else "", "events": list(events),
    }  # fmt: skip


class Handle:
    """A run that goes through the states it is given, and repeats the last one."""

    def __init__(self, states: list[dict[str, Any]], error: EverstepError | None = None, interrupt: int = 0) -> None:
        self.states, self.error, self.interrupt = states, error, interrupt
        self.stopped = self.closed = False

    def progress(self) -> dict[str, Any]:
        if self.interrupt:
            self.interrupt -= 1
            os.kill(os.getpid(), signal.SIGINT)
        if self.stopped:
            return at("stopped", 2)
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def stop(self) -> None:
        self.stopped = True

    def summary(self) -> dict[str, Any]:
        if self.error:
            raise self.error
        return dict(SUMMARY)

    def close(self) -> None:
        self.closed = True


class Launched:
    """Stands for `everstep.actors.run`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handle = Handle([at("starting", 0), at("running", 1, ["worker 1 died"]), at("done", 3, ["worker 1 died"])])
        self.settings: JobSettings | None = None
        self.resume: str | None = "never"
        module = types.ModuleType("everstep.actors.run")
        module.launch = self.launch  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "everstep.actors.run", module)
        monkeypatch.setattr(console, "POLL_S", 0.001)

    def launch(self, settings: JobSettings, *, resume: str | None) -> Handle:
        self.settings, self.resume = settings, resume
        return self.handle


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    return Launched(monkeypatch)


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "job.toml").write_text(JOB)
    return str(tmp_path / "job.toml")


@pytest.fixture
def store(tmp_path: Path, job: str) -> str:
    """A folder store that holds a run called `mine`."""
    url = f"file:{tmp_path / 'runs'}"
    Chain.create(open_store(url), "mine", settings=to_dict(load(job)), shards=2, exactness="bitwise")
    return url


def everstep_command(*words: str) -> Result:
    return CliRunner().invoke(cli.main, list(words), prog_name="everstep")


def last_json(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_version_and_help() -> None:
    assert everstep.__version__ in everstep_command("--version").stdout
    shown = everstep_command("--help")
    assert shown.exit_code == 0
    assert all(word in shown.stdout for word in ("train", "resume", "chain", "tasks", "--debug"))


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "everstep", "train", "none.toml", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: none.toml: no such file"
    assert json.loads(done.stdout)["exit_code"] == 2


def test_a_bad_key_is_the_users_mistake(job: str) -> None:
    result = everstep_command("train", job, "--set", "run.stpes=3")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"error: {job}: run.stpes: unknown key, expected one of name, store, steps, seed, determinism, on_nonfinite, "
        "digest_every",
        "next: did you mean 'steps'?",
    ]


@pytest.mark.parametrize(
    ("words", "kind", "code"),
    [
        (["train", "{job}", "--set", "run.stpes=3"], "SettingsError", 2),
        (["train"], "MissingParameter", 2),
        (["train", "{job}", "--frobnicate"], "NoSuchOption", 2),
        (["chain", "export", "mine", "--step", "-3"], "UserError", 2),
        (["chain", "export", "mine", "--step", "soon"], "UserError", 2),
        (["resume", "nine", "--store", "{store}"], "UnknownName", 2),
        (["resume", "mine", "--store", "{store}", "--set", "optimizer.lr=1"], "SettingsError", 2),
        (["resume", "mine", "--store", "ftp:x"], "StoreRefused", 2),
    ],
)
def test_json_holds_errors_too(job: str, store: str, words: list[str], kind: str, code: int) -> None:
    result = everstep_command(*(word.format(job=job, store=store) for word in words), "--json")
    answer = last_json(result)
    assert (answer["error"]["class"], answer["exit_code"], result.exit_code) == (kind, code, code)
    assert answer["error"]["message"]
    assert answer["error"]["hint"]
    assert len(result.stdout.splitlines()) == 1
    assert "Traceback" not in result.output


def test_a_run_that_is_missing_names_the_nearest(store: str) -> None:
    assert "did you mean 'mine'?" in everstep_command("resume", "mime", "--store", store).stderr


def test_train_follows_the_run_and_shows_its_summary(job: str, launched: Launched) -> None:
    result = everstep_command("train", job, "--set", "run.seed=7", "--fault", "kill_worker@2:rank=1")
    assert result.exit_code == 0, result.output
    assert launched.settings is not None
    assert (launched.settings.run.seed, launched.settings.faults[0].rank) == (7, 1)
    assert launched.resume is None
    assert launched.handle.closed
    assert result.stderr.count("worker 1 died") == 1
    assert "running  step 1/3  loss 4.5000  2.0 steps/s  2 workers  durable 1 behind" in result.stderr
    for text in ("ab" * 32, "12,345", "1.23 %", "rebuilt from", "survivor", "kill_worker"):
        assert text in result.stdout


def test_train_json_is_the_last_line_and_strict(job: str, launched: Launched) -> None:
    result = everstep_command("train", job, "--json")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 1
    assert last_json(result) == SUMMARY | {"loss_last": None}


def test_a_run_without_a_name_gets_one(tmp_path: Path, launched: Launched) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[task]\nname = "digits"\n')
    assert everstep_command("train", str(path)).exit_code == 0
    assert launched.settings is not None
    assert str(launched.settings.run.name).startswith("my-")


def test_a_failure_has_exit_code_one(job: str, launched: Launched) -> None:
    launched.handle = Handle([at("failed", 1)], RunFailed("the store is full", hint="free some space"))
    result = everstep_command("train", job, "--json")
    assert result.exit_code == 1
    assert last_json(result)["error"] == {
        "class": "RunFailed",
        "message": "the store is full",
        "hint": "free some space",
    }
    assert launched.handle.closed
    assert "error: the store is full\nnext: free some space" in result.stderr


def test_the_users_traceback_comes_first(job: str, launched: Launched) -> None:
    launched.handle = Handle([at("failed", 1)], UserCodeFailed("Traceback ...\nValueError: mine", hint="mend it"))
    result = everstep_command("train", job)
    assert result.exit_code == 1
    assert "\nTraceback ...\nValueError: mine\nnext: mend it\n" in result.stderr
    assert "error:" not in result.stderr


def test_a_defect_shows_no_traceback_unless_asked(job: str, launched: Launched) -> None:
    launched.handle.progress = lambda: {}["gone"]  # type: ignore[method-assign]
    quiet, loud = everstep_command("train", job), everstep_command("train", job, "--debug")
    assert quiet.exit_code == loud.exit_code == 1
    assert "Traceback" not in quiet.stderr
    assert "error: KeyError: 'gone'" in quiet.stderr
    assert "Traceback" in loud.stderr


def test_ctrl_c_once_stops_after_the_step(job: str, launched: Launched) -> None:
    launched.handle = Handle([at("running", 1)], interrupt=1)
    result = everstep_command("train", job, "--json")
    assert result.exit_code == 130
    assert launched.handle.stopped
    assert launched.handle.closed
    assert "stopping after this step ..." in result.stderr
    assert "everstep resume mine --store file:./everstep-runs" in result.stderr
    assert last_json(result)["run"] == "mine"


def test_ctrl_c_twice_gives_up(job: str, launched: Launched) -> None:
    launched.handle = Handle([at("running", 1)], interrupt=2)
    launched.handle.stop = lambda: None  # type: ignore[method-assign]
    result = everstep_command("train", job, "--json")
    assert result.exit_code == 130
    assert last_json(result)["exit_code"] == 130
    assert launched.handle.closed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("flags", "how"), [([], "resume"), (["--exact"], "exact")])
def test_resume_takes_the_stored_settings(store: str, launched: Launched, flags: list[str], how: str) -> None:
    path = f"{store.removeprefix('file:')}/mine"
    for words in (["mine", "--store", store], [path], [f"file:{path}/"]):
        result = everstep_command("resume", *words, *flags, "--set", "run.steps=9", "--json")
        assert result.exit_code == 0, result.output
        assert launched.settings is not None
        assert (launched.settings.run.name, launched.settings.run.steps) == ("mine", 9)
        assert launched.settings.run.store == store
        assert launched.resume == how


def test_the_store_comes_from_the_environment(store: str, launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli.STORE_VARIABLE, store)
    assert everstep_command("resume", "mine").exit_code == 0
    monkeypatch.setenv(cli.STORE_VARIABLE, "")
    assert everstep_command("resume", "mine").exit_code == 2


def test_chain_commands_print_what_they_are_told(store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = types.ModuleType("everstep.training.inspect")
    module.describe = lambda chain: {"run": chain.run, "rounds": [{"lsn": 5, "bytes_all": 1000}]}  # type: ignore[attr-defined]
    module.verify = lambda chain, recipe: {"digest": "ab" * 32}  # type: ignore[attr-defined]
    module.export = lambda chain, recipe, step, out: {"step": step, "out": str(out)}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "everstep.training.inspect", module)
    monkeypatch.setattr("everstep.training.inspect", module, raising=False)
    assert last_json(everstep_command("chain", "verify", "mine", "--store", store, "--json"))["digest"] == "ab" * 32
    shown = everstep_command("chain", "ls", "mine", "--store", store)
    assert all(text in shown.stdout for text in ("rounds", "lsn", "1,000"))
    for step, wanted in (("77", 77), ("best", "best"), (None, None)):
        words = ["chain", "export", "mine", "--store", store, "--out", str(tmp_path), "--json"]
        answer = last_json(everstep_command(*words, *(["--step", step] if step else [])))
        assert answer == {"step": wanted, "out": str(tmp_path)}


def test_tasks_lists_the_built_in_ones() -> None:
    found = last_json(everstep_command("tasks", "--json"))
    assert set(found["tasks"]) >= {"char_lm", "digits"}
    assert "char_lm" in everstep_command("tasks").stdout


def test_ask_returns_the_answer_or_raises(job: str, launched: Launched) -> None:
    assert cli.ask("train", job)["run"] == "mine"
    with pytest.raises(EverstepError, match="unknown key"):
        cli.ask("train", job, "--set", "run.stpes=3")


def test_the_bar_shows_events_above_itself(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    with console._Bar("mine", 3) as bar:
        bar.line("worker [1] died")
        bar.show(at("running", 2))
    shown = capsys.readouterr().out
    assert "worker [1] died" in shown
    assert "loss 2.2500" in shown


def test_named_settings_are_what_is_launched(job: str) -> None:
    assert named(load(job), job).run.name == "mine"
