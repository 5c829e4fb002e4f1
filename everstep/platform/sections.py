"""The sections of the job file as frozen models, each with what it refuses and why.

Every section and key is named as in the job file; no key but these, no value of another type. Three sections (`task`,
`optimizer`, `scheduler`) are open: what they do not know goes to `options`, for the thing they name to check. TOML has
no null, so the string "none" stands for it wherever a key may be empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

FaultKind = Literal[
    "kill_worker",
    "stop_worker",
    "raise_in_worker",
    "kill_checkpointer",
    "kill_workers",
    "kill_fault_handler",
    "kill_everything",
]
FaultPoint = Literal["before_exchange", "after_exchange", "before_commit", "after_commit", "after_send"]


OPERATION = r"(segment|base|compressor):(created|written|synced|linked|unlinked|folder_synced)|restore"


class Refused(ValueError):
    """A value that has the right type and still cannot be used; `key` is relative to the section that raises it."""

    def __init__(self, key: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.key, self.message, self.hint = key, message, hint


def _none(value: object) -> object:
    return None if value == "none" else value


def _auto(value: object) -> object:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise Refused("", f'expected "auto" or a whole number >= 1, got {value!r}', 'write "auto" unless you measured')


EMPTY = BeforeValidator(_none)
Count = Annotated[int, Field(ge=1)]
Amount = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Skip = Annotated[tuple[Amount, Count], Field(strict=False)]  # (step, batches left out after it); JSON has lists
AutoInt = Annotated[int | Literal["auto"], BeforeValidator(_auto)]


class Section(BaseModel):
    """One section: immutable, no key it does not know, no value of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class OpenSection(Section):
    """A section whose other keys belong to the thing it names."""

    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        known = {key: data[key] for key in data if key in cls.model_fields and key != "options"}
        given = data.get("options", {})
        inner = given if isinstance(given, Mapping) else {"options": given}
        rest = {key: data[key] for key in data if key not in cls.model_fields}
        return known | {"options": {key: _plain(value, key) for key, value in {**inner, **rest}.items()}}


def _plain(value: Any, key: str) -> Any:
    """Return a copy of `value` made of what JSON can hold exactly."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {name: _plain(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, key) for inner in value]
    raise Refused(
        key,
        f"expected a finite number, string, boolean, list or section, got {value!r}",
        "write it as a string or number",
    )


class RunSettings(Section):
    """`[run]`: what the run is called, where it is kept, how long it is."""

    name: Annotated[str | None, EMPTY] = None
    store: str = "file:./everstep-runs"
    steps: Count = 100
    seed: Amount = 0
    determinism: Literal["step", "bitwise"] = "step"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    digest_every: Amount = 50  # 0 = only at the end

    @field_validator("name")
    @classmethod
    def _name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
            raise Refused(
                "",
                f"expected letters, digits, '.', '_' and '-', got {name!r}",
                "it names a folder; take another",
            )
        return name

    @field_validator("store")
    @classmethod
    def _store(cls, store: str) -> str:
        if not store.startswith(("file:", "s3://", "memory:")):
            raise Refused(
                "", f'expected "file:FOLDER", "s3://bucket/prefix" or "memory:", got {store!r}', f'write "file:{store}"'
            )
        return store


class TaskSettings(OpenSection):
    """`[task]`: model, data and loss; `options` are the task's own settings, which it checks itself."""

    name: str
    init_from: Annotated[str | None, EMPTY] = None


class BatchSettings(Section):
    """`[batch]`: the global batch in samples, and the fixed slices that workers share out."""

    global_size: Count = 16
    micro_shards: Count = 4
    loader_workers: Amount = 0
    skips: tuple[Skip, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        size, slices = self.global_size, self.micro_shards
        if size % slices:
            works = sorted({size // slices * slices, (size // slices + 1) * slices} - {0})
            raise Refused(
                "global_size",
                f"expected a multiple of batch.micro_shards = {slices}, got {size}",
                f"set batch.global_size to {' or '.join(map(str, works))}, or change batch.micro_shards",
            )
        return self


class WorkerSettings(Section):
    """`[workers]`: how many train, how many wait warm, what each needs."""

    min: Count = 2  # below it the run waits
    max: Count = 2  # up to it the run asks Ray for more
    start: Annotated[int | None, EMPTY] = None  # how many it begins with; None = min
    spares: Amount = 1
    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0
    hang_timeout_s: Positive = 10.0
    wait_timeout_s: Positive = 900.0  # for workers below min; a node of a cloud takes minutes

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise Refused(
                "min",
                f"expected at most workers.max = {self.max}, got {self.min}",
                f"set workers.max = {self.min} or more, or lower workers.min",
            )
        if self.start is not None and not self.min <= self.start <= self.max:
            raise Refused(
                "start",
                f"expected workers.min = {self.min} to workers.max = {self.max}, got {self.start}",
                "leave workers.start out to begin with workers.min",
            )
        if self.spares and self.gpus:
            raise Refused(
                "spares",
                f"expected 0 with workers.gpus = {self.gpus:g}, got {self.spares}: a warm spare holds no GPU",
                "set workers.spares = 0; a replacement is then started when it is needed",
            )
        return self


class OptimizerSettings(OpenSection):
    """`[optimizer]`: a torch optimizer by name; `options` (lr, ...) are its own arguments."""

    name: str = "adamw"
    clip_norm: Annotated[Positive | None, EMPTY] = 1.0  # None = gradients are not clipped
    autocast: Annotated[Literal["bf16"] | None, EMPTY] = None  # None = everything in float32


class SchedulerSettings(OpenSection):
    """`[scheduler]`: a torch learning-rate scheduler by name; `options` are its own arguments."""

    name: str


class EvalSettings(Section):
    """`[eval]`: evaluate after every so many steps; 0 = never."""

    every: Amount = 0
    split: str = "validation"


class PreconditionerSettings(Section):
    """`[preconditioner]`: only "none" in this version."""

    name: Literal["none"] = "none"


COMPRESSION = ("none", "auto", "topk", "topk+int8", "randk", "int8", "int4", "powersgd")


class CompressionSettings(Section):
    """`[compression]`: what is exchanged and logged of the gradient; `density` is what sparse ones keep."""

    method: str = "none"
    density: Annotated[float, Field(gt=0, le=1)] = 0.01
    rank: Count = 2  # of powersgd's matrices
    residual: Literal["replicated", "survivor", "none"] = "replicated"
    overlap: bool = True  # reduce a dense gradient while backward still runs

    @field_validator("method")
    @classmethod
    def _method(cls, method: str) -> str:
        if method not in COMPRESSION and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", method):
            known = ", ".join(repr(name) for name in COMPRESSION)
            raise Refused("", f"expected {known} or 'package.module:Thing', got {method!r}", "take one of these")
        return method


class CheckpointSettings(Section):
    """`[checkpoint]`: the log; 0 actors = no log at all."""

    actors: Amount = 1
    shards: Count = 2
    segment_steps: AutoInt = "auto"
    base_interval: AutoInt = "auto"
    compressor_interval: AutoInt = "auto"
    max_lag_s: Positive = 5.0
    queue_bytes: Count = 256 * 2**20
    window: Count = 4  # steps a worker may be ahead of the complete lsn
    storage_timeout_s: Positive = 60.0
    on_storage_loss: Literal["stop", "continue"] = "stop"
    on_total_loss: Literal["exact", "resume"] = "exact"
    keep_rounds: Count = 3  # the newest rounds stay,
    keep_every: Amount = 0  # of the older ones each so-manieth for ever (0 = none),
    keep_hours: NotNegative = 1.0  # and all segments younger than this
    gc_age_s: NotNegative = 3600.0  # nothing younger is deleted
    tuner: Literal["waste", "lowdiff", "off"] = "waste"
    overhead_budget: Annotated[float, Field(gt=0, lt=1)] = 0.01  # of training time
    recovery_s: Positive = 60.0  # the longest that replaying segments may take

    @model_validator(mode="after")
    def _owners(self) -> Self:
        if self.actors > self.shards:
            raise Refused(
                "actors",
                f"expected at most checkpoint.shards = {self.shards}, got {self.actors}: each actor owns whole shards",
                "lower checkpoint.actors, or raise checkpoint.shards (in a new run)",
            )
        return self


class StoreSettings(Section):
    """`[store]`: where an S3 store answers and whether objects are encrypted; secrets come from the environment."""

    endpoint: Annotated[str | None, EMPTY] = None
    region: Annotated[str | None, EMPTY] = None
    encryption: Literal["none", "aes-gcm"] = "none"  # the key comes from the environment, too


class FaultSettings(Section):
    """`[[faults]]`: one fault, fired once per run.

    It fires at `at`, a point of a worker's step, or where `op` is given at a checkpoint actor's store operation that
    reaches `step`. `rank` is the world rank it strikes; for `kill_checkpointer` the number of the checkpoint actor; for
    `kill_workers` None, which is all of them.
    """

    kind: FaultKind
    step: Count
    at: FaultPoint = "before_exchange"
    rank: Annotated[Amount | None, EMPTY] = 0
    op: Annotated[str | None, EMPTY] = None

    @model_validator(mode="before")
    @classmethod
    def _all(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("kind") == "kill_workers":
            return {"rank": None, **data}
        return data

    @field_validator("op")
    @classmethod
    def _operation(cls, op: str | None) -> str | None:
        if op is not None and not re.fullmatch(OPERATION, op):
            raise Refused(
                "",
                f'expected "restore" or KIND:STEP, got {op!r}',
                "KIND: segment, base, compressor; STEP: created, written, synced, linked, unlinked, folder_synced",
            )
        return op

    @model_validator(mode="after")
    def _whom(self) -> Self:
        if self.op is not None and self.kind not in ("kill_checkpointer", "kill_everything"):
            raise Refused(
                "op", f"expected none for {self.kind}, got {self.op!r}", "only checkpoint actors use the store"
            )
        if (self.rank is None) != (self.kind == "kill_workers"):
            expected = "none (kill_workers strikes all)" if self.rank is not None else f"a world rank for {self.kind}"
            raise Refused("rank", f"expected {expected}, got {self.rank}", "kill_worker strikes one, kill_workers all")
        return self


class JobSettings(Section):
    """A whole job file, checked."""

    run: RunSettings = RunSettings()
    task: TaskSettings
    batch: BatchSettings = BatchSettings()
    workers: WorkerSettings = WorkerSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    scheduler: Annotated[SchedulerSettings | None, EMPTY] = None
    eval: EvalSettings = EvalSettings()
    preconditioner: PreconditionerSettings = PreconditionerSettings()
    compression: CompressionSettings = CompressionSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    store: StoreSettings = StoreSettings()
    faults: tuple[FaultSettings, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _together(self) -> Self:
        size, slices, actors = self.workers.max, self.batch.micro_shards, self.checkpoint.actors
        if slices < size:
            raise Refused(
                "batch.micro_shards",
                f"expected at least workers.max = {size}, got {slices}: each worker needs one",
                f"set batch.micro_shards = {size} or more, or fewer workers",
            )
        compression = self.compression
        if self.run.determinism == "bitwise" and compression.method != "none" and compression.residual != "replicated":
            raise Refused(
                "compression.residual",
                f'expected "replicated" with run.determinism = "bitwise", got {compression.residual!r}: what each '
                "worker chooses before the exchange depends on how many there are",
                'set compression.residual = "replicated", or run.determinism = "step"',
            )
        if compression.method in ("powersgd", "auto") and compression.residual == "replicated":
            raise Refused(
                "compression.residual",
                f'expected "survivor" or "none" with compression.method = "{compression.method}", got "replicated": it '
                "is there to shrink what travels between workers, and with that everything travels",
                'set compression.residual = "survivor"',
            )
        for number, fault in enumerate(self.faults):
            limit, what = (actors, "checkpoint.actors") if fault.kind == "kill_checkpointer" else (size, "workers.max")
            if fault.rank is not None and fault.rank >= limit:
                raise Refused(
                    f"faults[{number}].rank",
                    f"expected less than {what} = {limit}, got {fault.rank} ({fault.kind} at step {fault.step})",
                    f"ranks count from 0 to {limit - 1}" if limit else "there is no checkpoint actor; drop the fault",
                )
        return self
