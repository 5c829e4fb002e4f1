"""What a task is, and how one is made from the job file's `[task]` section and checked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from everstep.core.errors import SettingsError, TaskError
from everstep.core.registry import Registry, nearest
from everstep.core.rng import fold
from everstep.tasks.model_checks import check_model
from everstep.tasks.seeding import seed_all
from everstep.tasks.weights import load_weights


class Task(Protocol):
    """What a user writes. The constructor takes the `[task]` section's own settings as keyword arguments.

    Three more methods are optional:

    - `metrics(self, model, batch) -> dict[str, float | Tensor]`: further numbers for evaluation, means over the batch;
    - `parameter_groups(self, model) -> list[dict]`: torch optimizer groups, each with `params`;
    - `collate(self, samples) -> batch`: in place of torch's `default_collate`.
    """

    def model(self) -> nn.Module:
        """Return a fresh model on the CPU; the global generators are seeded before the call."""
        ...

    def dataset(self, split: str) -> Dataset[Any]:
        """Return the map-style data set of `split`: "train", and whatever `[eval] split` names."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return a scalar: the mean loss over the samples of `batch`."""
        ...


TASKS: Registry[Callable[..., Task]] = Registry("task")

REQUIRED = {
    "model": "model(self) -> nn.Module",
    "dataset": "dataset(self, split) -> Dataset",
    "loss": "loss(self, model, batch) -> scalar Tensor",
}
"""Each method a task has to have, with its signature as error messages print it."""

_PLAIN: dict[object, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_PLAIN |= {int: (int,), float: (int, float), str: (str,), bool: (bool,)}


def build_task(name: str, options: Mapping[str, Any]) -> Task:
    """Return the task called `name` (a registered name or `package.module:Name`), made with `options`.

    The global generators are set to a fixed state first, so that a constructor that draws (a random split) draws alike
    everywhere.

    Args:
        name: `[task] name`.
        options: the other keys of `[task]`, without those that are everstep's own (`init_from`).

    Raises:
        UnknownName: no such task.
        SettingsError: an option the task does not know or lacks, or one of the wrong type.
        TaskError: what the name leads to is not a task.
    """
    maker = TASKS.get(name)
    if not callable(maker):
        raise TaskError(f"task {name!r} is a {type(maker).__name__}, not a class", hint=f"name {_shape_of_a_task()}")
    _check_options(name, maker, options)
    seed_all(fold(0, "task"))
    task = maker(**options)
    missing = [method for method in REQUIRED if not callable(getattr(task, method, None))]
    if missing:
        raise TaskError(
            f"task {name!r} ({type(task).__name__}) has no method {' and no method '.join(map(repr, missing))}",
            hint=f"a task is {_shape_of_a_task()}",
        )
    return task


def build_model(task: Task, seed: int, init_from: str | None = None) -> nn.Module:
    """Return the task's model with the same starting weights for the same `seed`, checked to be trainable here.

    All global generators are seeded, and left wherever building the model took them.

    Args:
        task: whose model to build.
        seed: `[run] seed`.
        init_from: a `.safetensors` file, or a torch file holding a state_dict or `{"model": state_dict}`.

    Raises:
        TaskError: the model is of a kind that everstep cannot train, or the file does not fit it.
    """
    start = fold(seed, "model")
    torch.manual_seed(start)  # also queues the seed for an accelerator that only `model()` initialises
    seed_all(start)
    model = task.model()
    check_model(model, type(task).__name__)
    if init_from is not None:
        load_weights(model, init_from)
    return model


def build_dataset(task: Task, split: str, seed: int = 0) -> Dataset[Any]:
    """Return the task's data set of `split`, checked to be map-style and not empty.

    The global generators are set from `seed` alone first, so that a split drawn at random is the same on every worker,
    and two splits drawn by the same code do not overlap.

    Raises:
        TaskError: the data set cannot be used; names the task and the split.
    """
    where = f"task {type(task).__name__}, split {split!r}"
    seed_all(fold(seed, "dataset"))
    dataset = task.dataset(split)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TaskError(
            f"{where}: iterable data sets are not supported ({type(dataset).__name__} has no random access)",
            hint="give it __len__ and __getitem__: any step must be able to ask for any sample again",
        )
    try:
        size = len(cast(Any, dataset))
    except (TypeError, NotImplementedError) as error:
        raise TaskError(
            f"{where}: {type(dataset).__name__} has no length ({error})", hint="give it __len__, the number of samples"
        ) from error
    if size <= 0:
        raise TaskError(f"{where}: the data set is empty", hint="check the path or the limits it is made with")
    return dataset


def _shape_of_a_task() -> str:
    return f"a class with the methods {'; '.join(REQUIRED.values())}"


def _check_options(name: str, maker: Callable[..., Task], options: Mapping[str, Any]) -> None:
    """Compare `options` with the constructor's parameters, so that a typing error is not a TypeError from inside."""
    parameters = inspect.signature(maker).parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = f"options of task {name!r}: {', '.join(named) or 'none'}"
    for option, value in options.items():
        if option not in named and not takes_any:
            close = nearest(option, list(named))
            guess = f"did you mean {close!r}? " if close else ""
            raise SettingsError(f"task {name!r} has no option {option!r}", hint=f"{guess}{known}")
        wanted = _PLAIN.get(named[option].annotation) if option in named else None
        if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
            expected, got = wanted[-1].__name__, f"{value!r} ({type(value).__name__})"
            raise SettingsError(
                f"task {name!r}, option {option!r}: expected {expected}, got {got}",
                hint=f"write task.{option} as {expected}",
            )
    lacking = [p.name for p in named.values() if p.default is p.empty and p.name not in options]
    if lacking:
        raise SettingsError(f"task {name!r} needs the option {', '.join(map(repr, lacking))}", hint=f"{known}")
