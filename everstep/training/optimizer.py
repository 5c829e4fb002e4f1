"""Optimizers and schedules by name, and how exactly each of them can be replayed.

Exactness (measured, torch 2.13 on CPU): the for-loop and foreach forms give the same bits whatever the sharding and
the number of threads; the fused form does not when a tensor is cut differently. A replica replays whole tensors, so
per-tensor optimizers are exact too.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.core.errors import SettingsError
from everstep.core.registry import Registry, import_path, nearest

OPTIMIZERS: Registry[type[Optimizer]] = Registry("optimizer")
OPTIMIZERS.register("sgd")(torch.optim.SGD)
OPTIMIZERS.register("adam")(torch.optim.Adam)
OPTIMIZERS.register("adamw")(torch.optim.AdamW)

EXACT = frozenset(  # elementwise or per tensor, without a matrix product: replayed bit for bit
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"}
)
UNSUITED = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "it takes sparse gradients only",
}
IMPLEMENTATION = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable", "initial_lr"})


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the optimizer class called `name`, or `package.module:Class`.

    Raises:
        SettingsError: the class cannot be driven by a logged delta.
        UnknownName: there is no such optimizer.
    """
    kind = OPTIMIZERS.get(name)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise SettingsError(f"optimizer.name {name!r} is {kind!r}, expected a torch.optim.Optimizer class")
    if kind.__name__ in UNSUITED:
        raise SettingsError(
            f"optimizer.name {name!r} cannot be used: {UNSUITED[kind.__name__]}", hint="use sgd, adam or adamw"
        )
    return kind


def build_optimizer(name: str, options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Build an optimizer over parameter groups, in the for-loop form unless the options name another.

    The default form is for-loop on CPU (the bits of foreach, faster from some ten million parameters on) and foreach
    on CUDA.

    Raises:
        SettingsError: an option that the optimizer does not know or refuses.
    """
    kind = optimizer_class(name)
    known = inspect.signature(kind).parameters
    for option in options:
        if option not in known:
            allowed = [p for p in known if p != "params"]
            close = nearest(option, allowed)
            raise SettingsError(
                f"optimizer.{option} is not an option of {name} (known: {', '.join(allowed)})",
                hint=f"did you mean {close!r}?" if close else "remove it",
            )
    chosen = dict(options)
    if "foreach" in known and not chosen.get("fused"):
        devices = {p.device.type for group in groups for p in group["params"]}
        chosen.setdefault("foreach", "cuda" in devices)
    try:
        return kind([dict(group) for group in groups], **chosen)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"optimizer {name} refuses its options {dict(options)}: {error}") from error


def exactness(name: str, options: Mapping[str, Any]) -> str:
    """Return "bitwise" if a replay of this optimizer gives the same bits, else "close"."""
    kind = optimizer_class(name)
    exact = kind.__name__ in EXACT and kind.__module__.startswith("torch.optim") and not options.get("fused")
    return "bitwise" if exact else "close"


def spares_gradients(optimizer: Optimizer) -> bool:
    """Whether an optimizer only reads gradients. Foreach forms may use them as scratch memory (SGD with Nesterov)."""
    kind = type(optimizer)
    known = kind.__name__ in EXACT and kind.__module__.startswith("torch.optim")
    return known and not any(group.get("foreach") or group.get("fused") for group in optimizer.param_groups)


def hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return each group's hyper-parameters as used now, as plain JSON values."""
    return [
        {key: _plain(value) for key, value in group.items() if key not in IMPLEMENTATION}
        for group in optimizer.param_groups
    ]


def set_hyper_parameters(optimizer: Optimizer, hyper: Sequence[Mapping[str, Any]]) -> None:
    """Give each group the hyper-parameters of a logged step."""
    for group, values in zip(optimizer.param_groups, hyper, strict=True):
        for key, value in values.items():
            group[key] = tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def build_scheduler(name: str | None, options: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler | None:
    """Build a torch LR scheduler by class name or `package.module:Thing`, positioned before step 1.

    Raises:
        SettingsError: unknown name or option, or a scheduler that depends on more than the number of steps.
    """
    if name is None:
        return None
    kind: Any = getattr(torch.optim.lr_scheduler, name, None)
    if kind is None and ":" in name:
        kind = import_path(name, "scheduler")
    if kind is None or name.startswith("_"):
        known = [
            n for n, c in vars(torch.optim.lr_scheduler).items() if inspect.isclass(c) and issubclass(c, LRScheduler)
        ]
        close = nearest(name, known)
        raise SettingsError(
            f"unknown scheduler {name!r}",
            hint=f"did you mean {close!r}?"
            if close
            else "use a class of torch.optim.lr_scheduler, or package.module:Thing",
        )
    if kind is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise SettingsError(
            "scheduler ReduceLROnPlateau depends on measured losses, so a resumed run could not follow it",
            hint="use a schedule that is a function of the step, for example CosineAnnealingLR",
        )
    try:
        scheduler = kind(optimizer, **options)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"scheduler {name} refuses its options {dict(options)}: {error}") from error
    if not isinstance(scheduler, LRScheduler):
        raise SettingsError(f"scheduler {name!r} made {scheduler!r}, expected a torch LRScheduler")
    return scheduler


def advance_scheduler(scheduler: LRScheduler | None) -> None:
    """Move a schedule one step on, whether or not the optimizer took its step."""
    if scheduler is not None:
        with warnings.catch_warnings():  # torch warns when no optimizer step came between; here that is intended
            warnings.simplefilter("ignore")
            try:
                scheduler.step()
            except ValueError as error:
                raise SettingsError(
                    f"scheduler {type(scheduler).__name__} ends after {scheduler.last_epoch} steps: {error}",
                    hint="make the schedule as long as run.steps",
                ) from error
