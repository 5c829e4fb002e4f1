"""The job file: load, check, change, name and compare it.

The sections themselves, with what each refuses, are in `everstep.platform.sections`; import all of it from here.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from everstep.core import clock, ids
from everstep.core.errors import SettingsError
from everstep.core.registry import nearest
from everstep.platform.sections import BatchSettings as BatchSettings
from everstep.platform.sections import CheckpointSettings as CheckpointSettings
from everstep.platform.sections import CompressionSettings as CompressionSettings
from everstep.platform.sections import EvalSettings as EvalSettings
from everstep.platform.sections import FaultKind as FaultKind
from everstep.platform.sections import FaultPoint as FaultPoint
from everstep.platform.sections import FaultSettings as FaultSettings
from everstep.platform.sections import JobSettings as JobSettings
from everstep.platform.sections import OptimizerSettings as OptimizerSettings
from everstep.platform.sections import PreconditionerSettings as PreconditionerSettings
from everstep.platform.sections import Refused, Section
from everstep.platform.sections import RunSettings as RunSettings
from everstep.platform.sections import SchedulerSettings as SchedulerSettings
from everstep.platform.sections import StoreSettings as StoreSettings
from everstep.platform.sections import TaskSettings as TaskSettings
from everstep.platform.sections import WorkerSettings as WorkerSettings

RESUMABLE = frozenset({"run.steps", "run.store", "workers.*", "checkpoint.*", "store.*", "eval.*", "faults"})
"""Keys that may change on resume; `section.*` is every key of a section, less `FIXED`."""
FIXED = frozenset({"checkpoint.shards", "store.encryption"})
"""Keys that stay for the life of a run although their section is in `RESUMABLE`: the log is written by shard."""

FORK_FIXED = frozenset(
    {"task.name", "optimizer.name", "batch.global_size", "batch.skips", "checkpoint.shards", "run.store"}
    | {"store.encryption"}
)
"""Keys that stay in a fork: the parent's log, or the cursor in its data, is read under them."""


def load(path: str | Path, overrides: Sequence[str] = (), faults: Sequence[str] = ()) -> JobSettings:
    """Return the settings that the job file and the command line give together.

    Args:
        path: a TOML file.
        overrides: `section.key=value`, the value as TOML writes it; what is no TOML value is taken as a string.
        faults: `kind@step:key=value,...`, added to the `[[faults]]` of the file.

    Raises:
        SettingsError: the file cannot be read, or a key, a value or a combination is wrong; the message
            names file, key, what was expected and what was found.
    """
    where = str(path)
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(f"{where}: no such file", hint="give the path of a job file; runs/ holds some") from error
    except OSError as error:
        raise SettingsError(
            f"{where}: cannot be read ({error.strerror})", hint="give the path of a job file"
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{where}: expected UTF-8 text, got {error.reason} at byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{where}: not TOML: {error}", hint="strings need quotes; sections are [name]") from error
    return _build(_changed(raw, overrides, faults), where)


def to_dict(settings: JobSettings) -> dict[str, Any]:
    """Return the settings in the shape of the job file, in JSON values; `from_dict` gives them back."""
    result: dict[str, Any] = json.loads(json.dumps(settings.model_dump(), allow_nan=False))
    for section in ("task", "optimizer", "scheduler"):
        if result[section] is not None:
            result[section].update(result[section].pop("options"))
    return result


def from_dict(data: Mapping[str, Any], where: str = "settings") -> JobSettings:
    """Return the settings that `to_dict` wrote; `where` names their origin in errors.

    Raises:
        SettingsError: they are not valid here, for instance written by another version.
    """
    return _build(data, where)


def named(settings: JobSettings, path: str | Path) -> JobSettings:
    """Return settings whose run has a name: its own, or `<file stem>-<stamp>-<4 hexadecimal digits>`."""
    if settings.run.name is not None:
        return settings
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).stem).lstrip("._-")[:80] or "run"
    run = settings.run.model_copy(update={"name": f"{stem}-{clock.stamp()}-{ids.new_id()[:4]}"})
    return settings.model_copy(update={"run": run})


def differences(old: JobSettings, new: JobSettings) -> list[str]:
    """Return the dotted keys whose values differ, in the order of the job file; `faults` is one key."""
    before, after = dict(_leaves(to_dict(old))), dict(_leaves(to_dict(new)))
    missing = object()
    keys = list(after) + [key for key in before if key not in after]
    return [key for key in keys if before.get(key, missing) != after.get(key, missing)]


def changed_for_resume(old: JobSettings, overrides: Sequence[str], faults: Sequence[str] = ()) -> JobSettings:
    """Return `old` with the overrides (and faults) applied, if a run may go on under the result.

    Raises:
        SettingsError: an override is wrong, or changes a key that stays for the life of a run ("needs a fork").
    """
    where = f"run {old.run.name}"
    new = _build(_changed(to_dict(old), overrides, faults), where)
    for key in differences(old, new):
        if key in FIXED or not {key, f"{key.partition('.')[0]}.*"} & RESUMABLE:
            raise SettingsError(
                f"{where}: {key} cannot change on resume; that needs a fork",
                hint=f"leave {key} as it was; on resume these may change: {', '.join(sorted(RESUMABLE))}, "
                f"without {', '.join(sorted(FIXED))}",
            )
    return new


def changed_for_fork(old: JobSettings, name: str, overrides: Sequence[str]) -> JobSettings:
    """Return `old` under another name with the overrides applied, if its log can be gone on with under the result.

    Faults are not taken over: they were for the parent.

    Raises:
        SettingsError: an override is wrong, or changes what the state or its place in the data depends on.
    """
    where = f"fork {name} of run {old.run.name}"
    new = _build(_changed(to_dict(old) | {"faults": []}, [*overrides, f"run.name={name}"], ()), where)
    for key in differences(old, new):
        if key in FORK_FIXED:
            raise SettingsError(
                f"{where}: {key} cannot change in a fork",
                hint=f"leave it as it was, or start a new run; a fork keeps {', '.join(sorted(FORK_FIXED))}",
            )
    return new


def gone_back(settings: JobSettings, step: int, batches: int) -> JobSettings:
    """Return the settings of a run that goes back to `step` and leaves out the next `batches` there."""
    kept = tuple(skip for skip in settings.batch.skips if skip[0] < step)
    skips = (*kept, (step, batches)) if batches else kept
    return settings.model_copy(update={"batch": settings.batch.model_copy(update={"skips": skips})})


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _changed(raw: Mapping[str, Any], overrides: Sequence[str], faults: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a job file's content with the command line's changes in it."""
    result: dict[str, Any] = copy.deepcopy(dict(raw))
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise SettingsError(f"--set: expected section.key=value, got {text!r}", hint="as in --set run.steps=50")
        table = result
        for part in parts[:-1]:
            if table.get(part, "none") in (None, "none"):
                table[part] = {}
            table = table[part]
            if not isinstance(table, dict):
                raise SettingsError(f"--set {text}: {part!r} is not a section", hint="as in --set run.steps=50")
        table[parts[-1]] = _value(value.strip())
    if faults:
        given = result.get("faults", [])
        result["faults"] = [*given, *map(_fault, faults)] if isinstance(given, list) else given
    return result


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _fault(text: str) -> dict[str, Any]:
    head, _, tail = text.partition(":")
    kind, _, step = head.partition("@")
    pairs = [part.partition("=") for part in tail.split(",")] if tail else []
    if not kind or not step.isdecimal() or not all(key and equals and value for key, equals, value in pairs):
        raise SettingsError(
            f"--fault: expected kind@step:key=value,..., got {text!r}", hint="as in --fault kill_worker@40:rank=1"
        )
    return {"kind": kind, "step": int(step)} | {key.strip(): _value(value.strip()) for key, _, value in pairs}


def _build(raw: Mapping[str, Any], where: str) -> JobSettings:
    try:
        return JobSettings.model_validate(dict(raw))
    except ValidationError as error:
        found = [_explained(item) for item in error.errors(include_url=False)]
    message = "\n".join(f"{where}: {text}" for text, _ in found)
    raise SettingsError(message, hint="; ".join(dict.fromkeys(hint for _, hint in found if hint)))


def _explained(item: Any) -> tuple[str, str]:
    """Return what one finding of pydantic means for the writer of the job file, and what to do."""
    kind, given = item["type"], item["input"]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).lstrip(".")
    refused = item.get("ctx", {}).get("error")
    if isinstance(refused, Refused):
        return f"{'.'.join(filter(None, (place, refused.key)))}: {refused.message}", refused.hint
    if kind == "extra_forbidden":
        return _unknown(str(item["loc"][-1]), [part for part in item["loc"][:-1] if isinstance(part, str)], place)
    if kind == "missing":
        return f"{place}: missing", 'add [task] name = "char_lm"' if place.startswith("task") else f"add {place}"
    if kind in ("model_type", "dict_type"):
        return f"{place}: expected a section, got {given!r}", f"write it as [{place}]"
    if kind == "tuple_type":
        return f"{place}: expected a list of tables, got {given!r}", f"write each one as [[{place}]]"
    expected = item["msg"].removeprefix("Input should be ").replace("a valid integer", "a whole number")
    hint = f"strings need quotes: {place} = '{given}'" if kind == "string_type" else ""
    hint = "this version has no preconditioner; leave the section out" if place == "preconditioner.name" else hint
    hint = f'write {place} = "none" to switch it off' if place == "optimizer.clip_norm" else hint
    hint = hint or f"correct {place}; README.md lists every key with its default"
    return f"{place}: expected {expected.removeprefix('a valid ')}, got {given!r}", hint


def _unknown(key: str, section: list[str], place: str) -> tuple[str, str]:
    sections: dict[str, type[Section]] = {
        "run": RunSettings,
        "batch": BatchSettings,
        "workers": WorkerSettings,
        "eval": EvalSettings,
        "preconditioner": PreconditionerSettings,
        "compression": CompressionSettings,
        "checkpoint": CheckpointSettings,
        "store": StoreSettings,
        "faults": FaultSettings,
    }
    known = list((sections[section[0]] if section else JobSettings).model_fields)
    close = nearest(key, known)
    what = "key" if section else "section"
    return f"{place}: unknown {what}, expected one of {', '.join(known)}", f"did you mean {close!r}?" if close else ""
