"""The job file: what it gives, every message it can cause, and what may change on resume."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from everstep.compressors import COMPRESSORS
from everstep.core.errors import SettingsError
from everstep.platform.sections import COMPRESSION
from everstep.platform.settings import (
    RESUMABLE,
    JobSettings,
    changed_for_fork,
    changed_for_resume,
    differences,
    from_dict,
    gone_back,
    load,
    named,
    to_dict,
)

ROOT = Path(__file__).parents[3]
JOB = """
[run]
steps = 20
[task]
name = "char_lm"
size = "tiny"
[optimizer]
lr = 1e-3
betas = [0.9, 0.95]
"""


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str = JOB) -> Path:
        path = tmp_path / "job.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refused(path: Path, *overrides: str, faults: tuple[str, ...] = ()) -> SettingsError:
    with pytest.raises(SettingsError) as caught:
        load(path, overrides, faults)
    return caught.value


@pytest.mark.parametrize("name", ["quickstart", "digits", "demo"])
def test_the_job_files_of_the_repository_load(name: str) -> None:
    settings = load(ROOT / "runs" / f"{name}.toml")
    assert settings.run.steps == 200
    assert settings.workers.max == 2


def test_the_defaults(job: Callable[..., Path]) -> None:
    settings = load(job())
    assert settings.run.steps == 20
    assert settings.task.options == {"size": "tiny"}
    assert settings.optimizer.options == {"lr": 0.001, "betas": [0.9, 0.95]}
    assert settings.optimizer.clip_norm == 1.0
    assert settings.scheduler is None
    assert settings.checkpoint.queue_bytes == 256 * 2**20
    assert settings.checkpoint.on_total_loss == "exact"
    assert settings.faults == ()


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("compression.method=topk", "compression.method", "topk"),
        ('compression.method = "topk"', "compression.method", "topk"),
        ("compression.density=1", "compression.density", 1.0),
        ("run.seed=0x10", "run.seed", 16),
        ("run.name=a-b.c", "run.name", "a-b.c"),
        ("run.store=file:/data/a=b", "run.store", "file:/data/a=b"),
        ("optimizer.clip_norm=none", "optimizer.clip_norm", None),
        ("optimizer.lr=0.1", "optimizer.lr", 0.1),
        ("optimizer.betas=[0.8, 0.9]", "optimizer.betas", [0.8, 0.9]),
        ("task.model.layers=3", "task.model.layers", 3),
        ("task.flag=true", "task.flag", True),
        ("scheduler.name=StepLR", "scheduler.name", "StepLR"),
        ("checkpoint.segment_steps=7", "checkpoint.segment_steps", 7),
        ("checkpoint.segment_steps=auto", "checkpoint.segment_steps", "auto"),
    ],
)
def test_overrides(job: Callable[..., Path], override: str, key: str, value: object) -> None:
    found: object = to_dict(load(job(), [override]))
    for part in key.split("."):
        assert isinstance(found, dict)
        found = found[part]
    assert found == value
    assert type(found) is type(value)


def test_none_switches_a_section_off(job: Callable[..., Path]) -> None:
    path = job(JOB + '[scheduler]\nname = "StepLR"\n')
    assert load(path).scheduler is not None
    assert load(path, ["scheduler=none"]).scheduler is None


def test_faults_of_file_and_command_line_add_up(job: Callable[..., Path]) -> None:
    path = job(JOB + '[[faults]]\nkind = "stop_worker"\nstep = 3\nrank = 1\n')
    faults = load(path, (), ["kill_worker@40:rank=1,at=after_send", "kill_workers@5"]).faults
    assert [(f.kind, f.step, f.rank, f.at) for f in faults] == [
        ("stop_worker", 3, 1, "before_exchange"),
        ("kill_worker", 40, 1, "after_send"),
        ("kill_workers", 5, None, "before_exchange"),
    ]
    assert load(path, ["faults=[]"]).faults == ()


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("run.stpes=3", "run.stpes: unknown key, expected one of name, store, steps", "did you mean 'steps'?"),
        ("chekpoint.actors=3", "chekpoint: unknown section", "did you mean 'checkpoint'?"),
        ("run.steps=many", "run.steps: expected a whole number, got 'many'", ""),
        ("run.steps=true", "run.steps: expected a whole number, got True", ""),
        ("run.steps=0", "run.steps: expected greater than or equal to 1, got 0", ""),
        ("run.seed=-1", "run.seed: expected greater than or equal to 0, got -1", ""),
        ("run.name=5", "run.name: expected string, got 5", "strings need quotes: run.name = '5'"),
        ("run.name=../x", "run.name: expected letters, digits", "it names a folder"),
        ("run.store=runs", 'run.store: expected "file:FOLDER"', 'write "file:runs"'),
        ("run.determinism=no", "run.determinism: expected 'step' or 'bitwise', got 'no'", ""),
        ("run=3", "run: expected a section, got 3", "write it as [run]"),
        (
            "batch.global_size=17",
            "batch.global_size: expected a multiple of batch.micro_shards = 4, got 17",
            "16 or 20",
        ),
        ("batch.global_size=3", "batch.global_size: expected a multiple", "set batch.global_size to 4,"),
        ("batch.micro_shards=1", "batch.micro_shards: expected at least workers.max = 2, got 1", "micro_shards = 2"),
        ("workers.min=3", "workers.min: expected at most workers.max = 2, got 3", "workers.max = 3"),
        (
            "workers.start=1",
            "workers.start: expected workers.min = 2 to workers.max = 2, got 1",
            "leave workers.start out",
        ),
        ("workers.gpus=1", "workers.spares: expected 0 with workers.gpus = 1, got 1", "workers.spares = 0"),
        ("workers.hang_timeout_s=0", "workers.hang_timeout_s: expected greater than 0, got 0", ""),
        ("optimizer.clip_norm=0", "optimizer.clip_norm: expected greater than 0", '"none" to switch it off'),
        ("optimizer.autocast=fp16", "optimizer.autocast: expected 'bf16', got 'fp16'", ""),
        ("optimizer.lr=nan", "optimizer.lr: expected a finite number", "write it as"),
        ("task.day=2020-01-01", "task.day: expected a finite number, string", "write it as"),
        ("scheduler.gamma=0.1", "scheduler.name: missing", "add scheduler.name"),
        ("preconditioner.name=eva", "preconditioner.name: expected 'none', got 'eva'", "leave the section out"),
        ("compression.method=topkk", "compression.method: expected 'none', 'auto', 'topk', ", "take one of these"),
        ("compression.rank=0", "compression.rank: expected greater than or equal to 1, got 0", ""),
        ("compression.density=0", "compression.density: expected greater than 0, got 0", ""),
        ("compression.density=2", "compression.density: expected less than or equal to 1, got 2", ""),
        ("compression.residual=some", "compression.residual: expected 'replicated', 'survivor' or 'none'", ""),
        (
            "checkpoint.segment_steps=0",
            'checkpoint.segment_steps: expected "auto" or a whole number >= 1, got 0',
            "auto",
        ),
        ("checkpoint.base_interval=soon", 'checkpoint.base_interval: expected "auto" or a whole number', "auto"),
        (
            "checkpoint.actors=3",
            "checkpoint.actors: expected at most checkpoint.shards = 2, got 3",
            "checkpoint.shards",
        ),
        ("faults=3", "faults: expected a list of tables, got 3", "[[faults]]"),
        ("run.steps.x=1", "'steps' is not a section", "--set run.steps=50"),
        ("run.steps", "--set: expected section.key=value, got 'run.steps'", "--set run.steps=50"),
        (".steps=3", "--set: expected section.key=value, got '.steps=3'", "--set run.steps=50"),
    ],
)
def test_refused_values_say_what_and_what_next(
    job: Callable[..., Path], override: str, message: str, hint: str
) -> None:
    path = job()
    error = refused(path, override)
    assert message in error.message
    assert hint in error.hint
    assert "--set" in error.message or error.message.startswith(f"{path}: ")


@pytest.mark.parametrize("method", ["powersgd", "auto"])
def test_what_shrinks_the_network_goes_with_no_replicated_residual(job: Callable[..., Path], method: str) -> None:
    error = refused(job(), f"compression.method={method}")
    assert 'compression.residual: expected "survivor" or "none" with compression.method' in error.message
    assert 'compression.residual = "survivor"' in error.hint
    load(job(), [f"compression.method={method}", "compression.residual=survivor"])


def test_compressors_of_the_job_file_are_those_of_the_registry() -> None:
    assert set(COMPRESSION) - {"none", "auto"} == set(COMPRESSORS)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill_worker", "--fault: expected kind@step:key=value,..., got 'kill_worker'"),
        ("kill_worker@x", "--fault: expected kind@step"),
        ("kill_worker@3:rank", "--fault: expected kind@step"),
        ("kill_wrker@3", "faults[0].kind: expected 'kill_worker'"),
        ("kill_worker@0", "faults[0].step: expected greater than or equal to 1"),
        ("kill_worker@3:at=never", "faults[0].at: expected 'before_exchange'"),
        ("kill_worker@3:rnk=1", "faults[0].rnk: unknown key"),
        ("kill_worker@3:rank=2", "faults[0].rank: expected less than workers.max = 2, got 2 (kill_worker at step 3)"),
        ("kill_worker@3:rank=none", "faults[0].rank: expected a world rank for kill_worker, got None"),
        ("kill_workers@3:rank=1", "faults[0].rank: expected none (kill_workers strikes all), got 1"),
        ("kill_checkpointer@3:rank=1", "faults[0].rank: expected less than checkpoint.actors = 1, got 1"),
    ],
)
def test_refused_faults(job: Callable[..., Path], fault: str, message: str) -> None:
    assert message in refused(job(), faults=(fault,)).message


def test_a_fault_of_no_checkpoint_actor(job: Callable[..., Path]) -> None:
    error = refused(job(), "checkpoint.actors=0", faults=("kill_checkpointer@3",))
    assert "there is no checkpoint actor" in error.hint


def test_all_findings_are_named_at_once(job: Callable[..., Path]) -> None:
    error = refused(job(), "run.stpes=3", "eval.evry=3")
    assert "run.stpes" in error.message
    assert "eval.evry" in error.message


def test_files_that_cannot_be_read(job: Callable[..., Path], tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "none.toml").message
    assert "cannot be read" in refused(tmp_path).message
    assert "at line 2, column" in refused(job("[run]\nsteps = \n")).message
    (tmp_path / "latin.toml").write_bytes(b"# \xe9\n")
    assert "expected UTF-8 text" in refused(tmp_path / "latin.toml").message
    error = refused(job("[run]\nsteps = 3\n"))
    assert "task: missing" in error.message
    assert 'name = "char_lm"' in error.hint
    assert "task.name: missing" in refused(job("[task]\nsize = 3\n")).message


def test_settings_are_frozen_and_travel(job: Callable[..., Path]) -> None:
    settings = load(job(), (), ["kill_workers@5"])
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(ValidationError, match="frozen"):
        settings.run.steps = 3  # type: ignore[misc]


@given(
    lr=st.floats(allow_nan=False, allow_infinity=False),
    density=st.floats(min_value=0, max_value=1, exclude_min=True),
    options=st.dictionaries(
        st.text(min_size=1).filter(lambda key: key not in ("name", "init_from", "options")),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)),
        max_size=4,
    ),
)
def test_settings_round_trip_through_json_exactly(lr: float, density: float, options: dict[str, object]) -> None:
    raw = {
        "task": {"name": "t", **options},
        "optimizer": {"lr": lr},
        "compression": {"density": density},
        "faults": [{"kind": "kill_workers", "step": 3}],
    }
    settings = from_dict(raw)
    assert from_dict(json.loads(json.dumps(to_dict(settings)))) == settings
    assert settings.optimizer.options["lr"] == lr
    assert settings.task.options == options


def test_names(job: Callable[..., Path]) -> None:
    settings = load(job())
    name = named(settings, "some/my job.toml").run.name
    assert name is not None
    assert name.startswith("my-job-")
    assert name != named(settings, "some/my job.toml").run.name
    assert from_dict(to_dict(named(settings, "....toml"))).run.name is not None
    given_name = load(job(), ["run.name=mine"])
    assert named(given_name, "x.toml") is given_name


@pytest.fixture
def stored(job: Callable[..., Path]) -> JobSettings:
    return load(job(), ["run.name=mine"])


def test_differences_are_dotted_keys(stored: JobSettings, job: Callable[..., Path]) -> None:
    assert differences(stored, stored) == []
    other = load(job(), ["run.name=mine", "scheduler.name=StepLR", "task.size=big", "run.steps=9"], ["kill_workers@5"])
    assert set(differences(stored, other)) >= {"run.steps", "task.size", "scheduler.name", "faults"}


@pytest.mark.parametrize(
    "override",
    ["run.steps=50", "checkpoint.max_lag_s=1", "workers.spares=0", "eval.every=5", "store.region=here", "faults=[]"],
)
def test_what_may_change_on_resume(stored: JobSettings, override: str) -> None:
    changed = changed_for_resume(stored, [override])
    assert all({key, f"{key.partition('.')[0]}.*"} & RESUMABLE for key in differences(stored, changed))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.lr=1", "optimizer.lr"),
        ("task.size=big", "task.size"),
        ("task.new=1", "task.new"),
        ("run.seed=5", "run.seed"),
        ("run.name=other", "run.name"),
        ("batch.micro_shards=2", "batch.micro_shards"),
        ("checkpoint.shards=3", "checkpoint.shards"),
        ("scheduler.name=StepLR", "scheduler"),
    ],
)
def test_what_needs_a_fork(stored: JobSettings, override: str, key: str) -> None:
    with pytest.raises(SettingsError, match="needs a fork") as caught:
        changed_for_resume(stored, ["run.steps=50", override])
    assert f"run mine: {key}" in caught.value.message
    assert "run.steps" in caught.value.hint


def test_a_wrong_override_on_resume(stored: JobSettings) -> None:
    with pytest.raises(SettingsError, match=r"run mine: run\.stpes: unknown key"):
        changed_for_resume(stored, ["run.stpes=50"])


def test_batches_left_out_survive_json_and_stay_strict() -> None:
    settings = gone_back(from_dict({"task": {"name": "char_lm"}}), 20, 3)
    again = from_dict(json.loads(json.dumps(to_dict(settings))))
    assert again == settings and again.batch.skips == ((20, 3),)
    assert gone_back(gone_back(again, 30, 1), 20, 0).batch.skips == ()
    for wrong in ([["2", 3]], [[1.0, 3]], [[1, 0]], [[1]], [3]):
        with pytest.raises(SettingsError, match="batch.skips"):
            from_dict({"task": {"name": "char_lm"}, "batch": {"skips": wrong}})


def test_a_fork_keeps_the_settings_but_for_its_name_and_the_faults() -> None:
    old = from_dict(
        {"run": {"name": "old"}, "task": {"name": "char_lm"}, "faults": [{"kind": "kill_worker", "step": 3}]}
    )
    new = changed_for_fork(old, "new", ["optimizer.lr=0.5"])
    assert (new.run.name, new.optimizer.options["lr"], new.faults) == ("new", 0.5, ())
    assert differences(old, new) == ["run.name", "optimizer.lr", "faults"]


@pytest.mark.parametrize(
    "change", ["optimizer.name=sgd", "batch.global_size=32", "checkpoint.shards=3", "task.name=digits"]
)
def test_a_fork_cannot_change_what_the_log_is_read_under(change: str) -> None:
    old = from_dict({"run": {"name": "old"}, "task": {"name": "char_lm"}})
    with pytest.raises(SettingsError, match=f"{change.partition('=')[0]} cannot change in a fork"):
        changed_for_fork(old, "new", [change])


def test_going_back_leaves_batches_out_and_forgets_later_skips() -> None:
    old = from_dict({"run": {"name": "old"}, "task": {"name": "char_lm"}, "batch": {"skips": [[10, 2], [30, 1]]}})
    assert gone_back(old, 20, 5).batch.skips == ((10, 2), (20, 5))
    assert gone_back(old, 20, 0).batch.skips == ((10, 2),)
    assert from_dict(to_dict(gone_back(old, 20, 5))) == gone_back(old, 20, 5)
