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

import numpy as np
import pytest
from click.testing import CliRunner, Result

import everstep
from everstep import cli, console
from everstep.actors.spec import recipe_of
from everstep.cli_shared import located, located_step
from everstep.core.errors import ChainError, EverstepError, RunFailed, UnknownName, UserCodeFailed
from everstep.platform.settings import JobSettings, load, named, to_dict
from everstep.storage.chain import Chain
from everstep.storage.store import open_store
from everstep.training.blueprint import Blueprint
from everstep.training.delta import Delta
from everstep.training.history import evaluation_name
from everstep.training.optimizer import hyper_parameters
from everstep.training.record import StepResult, pack, unpack
from everstep.training.shard_state import to_batches
from everstep.training.state import combine_digests

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
        self.at: int | None = None
        module = types.ModuleType("everstep.actors.run")
        module.launch = self.launch  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "everstep.actors.run", module)
        monkeypatch.setattr(console, "POLL_S", 0.001)

    def launch(self, settings: JobSettings, *, resume: str | None, at: int | None = None) -> Handle:
        self.settings, self.resume, self.at = settings, resume, at
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
    before = signal.getsignal(signal.SIGINT)
    result = everstep_command("train", job, "--json")
    assert result.exit_code == 130
    assert last_json(result)["exit_code"] == 130
    assert launched.handle.closed
    assert signal.getsignal(signal.SIGINT) is before


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


def test_chain_export_passes_on_what_it_is_asked_for(
    store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from everstep.training import inspect

    monkeypatch.setattr(inspect, "export", lambda chain, recipe, step, out: {"step": step, "out": str(out)})
    for step, wanted in (("77", 77), ("best", "best"), (None, None)):
        words = ["chain", "export", "mine", "--store", store, "--out", str(tmp_path), "--json"]
        answer = last_json(everstep_command(*words, *(["--step", step] if step else [])))
        assert answer == {"step": wanted, "out": str(tmp_path)}


def step_of(blueprint: Blueprint, lsn: int) -> StepResult:
    """A step whose delta is 0.1 everywhere."""
    optimizer = blueprint.live_state().optimizer
    assert optimizer is not None
    scalars: dict[str, float | int] = dict.fromkeys(("loss", "grad_norm", "clip", "lr", "seconds"), 1.0)
    scalars |= dict.fromkeys(("samples", "data_epoch", "world_size"), 1)
    delta = Delta(np.full(blueprint.layout.size, 0.1, np.float32), None, frozenset())
    return StepResult(lsn, 1, delta, scalars, hyper_parameters(optimizer), {}, {})


@pytest.fixture
def trained(tmp_path: Path, job: str) -> str:
    """A folder store that holds `mine`, a finished run of the digits task with two steps in its log."""
    url = f"file:{tmp_path / 'runs'}"
    settings = load(job, ["task.name=digits", "task.width=4", "run.steps=2", "eval.every=1"])
    blueprint, store = Blueprint(recipe_of(settings)), open_store(url)
    shards = blueprint.layout.shards
    log = Chain.create(store, "mine", settings=to_dict(settings), shards=len(shards), exactness="bitwise")
    states = {shard: blueprint.shard_state(shard) for shard in shards}
    for lsn in (0, 1, 2):
        for shard, state in states.items():
            if lsn:
                record = unpack(shard, pack(step_of(blueprint, lsn), blueprint.layout, shard))
                state.merge(record)
                log.put_segment(shard, lsn, lsn, [record])
            log.name_bases([log.proved(log.put_base(shard, lsn, to_batches(state.state.tensors())))])
        if lsn:
            log.add_event(evaluation_name(lsn, 1), {"lsn": lsn, "generation": 1, "loss": 1.0 / lsn})
    tails = {str(shard): crc for shard, (_, crc) in log.tails().items()}
    digest = combine_digests({n: d for state in states.values() for n, d in state.state.tensor_digests().items()})
    log.update(state="closed", closing={"last_lsn": 2, "digest": digest, "tails": tails})
    return url


def test_chain_ls_shows_tables(trained: str) -> None:
    shown = everstep_command("chain", "ls", "mine", "--store", trained)
    assert shown.exit_code == 0, shown.output
    assert all(text in shown.stdout for text in ("log of mine", "closed", "kept steps", "rounds", "0 2, 1 2, 2 2"))
    answer = last_json(everstep_command("chain", "ls", "mine", "--store", trained, "--json"))
    assert [row["lsns"] for row in answer["rounds"]] == [{str(s): lsn for s in range(3)} for lsn in (0, 1, 2)]
    assert answer["kept"] == [{"first": 1, "last": None}] and answer["best"]["lsn"] == 2
    assert [body["lsn"] for body in answer["evaluations"]] == [1, 2]


def test_chain_verify_has_exit_code_one_and_names_all_that_is_wrong(trained: str) -> None:
    words = ("chain", "verify", "mine", "--store", trained)
    whole = everstep_command(*words, "--drill")
    assert whole.exit_code == 0, whole.output
    assert "run mine is whole" in whole.stderr and "drill" in whole.stdout
    folder = Path(trained.removeprefix("file:")) / "mine"
    paths = sorted(folder.glob("g000001/log/s000[12]/000000000001-*.arrow"))
    for path in paths:
        path.write_bytes(path.read_bytes()[:-9])
    broken = everstep_command(*words, "--json")
    answer = last_json(broken)
    assert broken.exit_code == answer["exit_code"] == 1
    assert [Path(row["object"]).name for row in answer["problems"]] == [path.name for path in paths]
    assert answer["error"]["class"] == "ChainError" and "2 problems" in answer["error"]["message"]
    assert answer["equal"] is True  # later bases are whole
    assert all(str(path.relative_to(folder)) in broken.stderr for path in paths)
    with pytest.raises(ChainError, match="2 problems"):
        cli.ask(*words)


def test_chain_gc_says_what_goes_and_why(trained: str) -> None:
    name = f"{trained.removeprefix('file:')}/mine"
    spared = last_json(everstep_command("chain", "gc", name, "--dry-run", "--json"))
    assert (spared["would_delete"], spared["goes"]) == (0, [])
    log = Chain.open(open_store(trained), "mine")
    check = log.manifest.settings["checkpoint"] | {"keep_rounds": 1, "keep_hours": 0.0, "gc_age_s": 0.0}
    log.update(settings=log.manifest.settings | {"checkpoint": check})
    planned = last_json(everstep_command("chain", "gc", name, "--dry-run", "--json"))
    assert planned["would_delete"] == 12 and len(log.listing().segments()) == 6
    assert {row["reason"]: row["objects"] for row in planned["goes"]}["its round is not kept any more"] == 6
    shown = everstep_command("chain", "gc", name)
    assert all(text in shown.stdout for text in ("its round is not kept any more", "every step from 2 on is kept"))
    assert len(log.listing().segments()) == 0
    assert everstep_command("chain", "verify", name).exit_code == 0


def test_chain_diff_needs_two_steps(trained: str) -> None:
    words = ("chain", "diff", "mine", "--store", trained, "--step", "1")
    assert "expected two steps, got 1" in everstep_command(*words).stderr
    shown = everstep_command(*words, "--step", "2")
    assert all(text in shown.stdout for text in ("step 2 against step 1", "parameters", "layers.0.weight", "exp_avg"))
    answer = last_json(everstep_command(*words, "--step", "2", "--json"))
    assert (answer["step_a"], answer["step_b"]) == (1, 2) and answer["parameters_relative"] > 0


def test_fork_prints_the_next_command(trained: str) -> None:
    words = ("fork", "mine@1", "new", "--store", trained)
    shown = everstep_command(*words, "--set", "optimizer.lr=0.5")
    assert shown.exit_code == 0, shown.output
    assert f"next: everstep resume new --store {trained}" in shown.stderr
    log = Chain.open(open_store(trained), "new")
    assert log.manifest.settings["run"]["name"] == "new" and log.manifest.settings["optimizer"]["lr"] == 0.5
    assert log.manifest.settings["run"]["store"] == trained
    again = last_json(everstep_command(*words, "--json"))
    assert again["error"]["class"] == "RunExists"
    for other, kind in ((("task.width=8",), "SettingsError"), (("batch.global_size=32",), "SettingsError")):
        answer = last_json(everstep_command("fork", "mine@1", "x", "--store", trained, "--set", *other, "--json"))
        assert answer["error"]["class"] == kind and answer["exit_code"] == 2
    assert "which step" in everstep_command("fork", "mine", "x", "--store", trained).stderr
    assert "got the step 'end'" in everstep_command("fork", "mine@end", "x", "--store", trained).stderr
    assert last_json(everstep_command("fork", "mine@3", "x", "--store", trained, "--json"))["exit_code"] == 1
    assert Chain.runs(open_store(trained)) == ["mine", "new"]


def test_a_fork_with_a_residual_says_where_that_starts(trained: str) -> None:
    words = ("fork", "mine@1", "new", "--store", trained, "--set", "compression.method=topk")
    shown = everstep_command(*words)
    assert "error feedback starts at zero" in shown.stderr and "(it has: none)" in shown.stderr
    assert shown.stderr.rstrip().endswith("--exact")


def test_resume_at_a_step(trained: str, launched: Launched) -> None:
    words = ("resume", "mine@1", "--store", trained)
    assert everstep_command(*words, "--skip-batches", "3").exit_code == 0
    assert launched.settings is not None
    assert (launched.at, launched.resume, launched.settings.batch.skips) == (1, "resume", ((1, 3),))
    assert everstep_command(*words, "--exact").exit_code == 0
    assert (launched.at, launched.resume, launched.settings.batch.skips) == (1, "exact", ())
    assert everstep_command("resume", f"{trained.removeprefix('file:')}/mine").exit_code == 0
    assert launched.at is None


def test_resume_at_a_step_that_is_not_there_or_not_given(trained: str, launched: Launched) -> None:
    late = everstep_command("resume", "mine@3", "--store", trained)
    assert late.exit_code == 1 and "step 3 cannot be restored" in late.stderr
    missing = everstep_command("resume", "mine", "--store", trained, "--skip-batches", "2")
    assert missing.exit_code == 2 and "everstep resume mine@STEP --skip-batches 2" in missing.stderr
    assert launched.settings is None


def test_runs_ls_and_rm(trained: str) -> None:
    assert everstep_command("fork", "mine@1", "new", "--store", trained).exit_code == 0
    folder = trained.removeprefix("file:")
    (Path(folder) / "broken" / "manifest").mkdir(parents=True)
    (Path(folder) / "broken" / "manifest" / f"{1:020d}.json").write_text("{")
    for where in ([folder], [trained], ["--store", trained]):
        found = last_json(everstep_command("runs", "ls", *where, "--json"))["runs"]
        assert [(row["run"], row["state"], row["last_restorable"]) for row in found] == [
            ("broken", "damaged", None), ("mine", "closed", 2), ("new", "open", 1)]  # fmt: skip
    shown = everstep_command("runs", "ls", folder)
    assert "mine@1" in shown.stdout and "broken: broken/manifest" in shown.stderr

    Chain.create(open_store(trained), "live", settings={}, shards=1, exactness="bitwise")
    refused = everstep_command("runs", "rm", "live", "--store", trained)
    assert refused.exit_code == 2 and "neither ended nor been stopped" in refused.stderr and "--force" in refused.stderr
    forced = everstep_command("runs", "rm", "live", "--store", trained, "--force", "--json")
    assert last_json(forced)["gone"] is False  # what says so stays for a while, for its writer to find
    with pytest.raises(UnknownName, match="deleted"):
        Chain.open(open_store(trained), "live")
    removed = everstep_command("runs", "rm", f"{folder}/mine")
    assert removed.exit_code == 0, removed.output
    assert "what is used by new stays" in removed.stderr
    assert everstep_command("chain", "verify", "new", "--store", trained).exit_code == 0
    answer = last_json(everstep_command("runs", "rm", "new", "--store", trained, "--json"))
    assert answer["gone"] is True and answer["stays_for_forks"] == []


def test_a_store_without_runs(tmp_path: Path) -> None:
    assert "there are no runs" in everstep_command("runs", "ls", str(tmp_path / "none")).stderr
    assert last_json(everstep_command("runs", "ls", str(tmp_path / "none"), "--json"))["runs"] == []


@pytest.mark.parametrize(
    ("run", "store", "expected"),
    [
        ("mine", "file:./runs", ("file:./runs", "mine")),
        ("mine", "./runs", ("file:./runs", "mine")),
        ("mine", "s3://bucket/prefix", ("s3://bucket/prefix", "mine")),
        ("./runs/mine", "x", ("file:./runs", "mine")),
        ("/runs/mine/", "x", ("file:/runs", "mine")),
        ("/mine", "x", ("file:/", "mine")),
        ("file:runs/mine", "x", ("file:runs", "mine")),
        ("file:/runs/mine", "x", ("file:/runs", "mine")),
        ("file:mine", "x", ("file:x", "mine")),
        ("s3://bucket/prefix/mine", "x", ("s3://bucket/prefix", "mine")),
        ("s3://bucket/mine", "x", ("s3://bucket", "mine")),
        ("memory:here/mine", "x", ("memory:here", "mine")),
    ],
)
def test_where_a_run_is(run: str, store: str, expected: tuple[str, str]) -> None:
    assert located(run, store) == expected
    assert located_step(f"{run.rstrip('/')}@12", store) == (*expected, 12)
    assert located_step(run, store) == (*expected, None)


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
