"""A model and an optimizer that belong to somebody else's loop: describing them, and seeing what each step did.

The gradient is taken as the optimizer consumes it, by a hook that runs right before its step, together with the
hyper-parameters of that moment. What the loop does to parameters outside the optimizer cannot be seen; digests, taken
every few steps, tell.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from everstep.core.errors import SettingsError, TaskError
from everstep.core.registry import import_path
from everstep.tasks.model_checks import check_model
from everstep.training.delta import Delta
from everstep.training.layout import layout_of
from everstep.training.optimizer import IMPLEMENTATION, UNSUITED, exactness, hyper_parameters
from everstep.training.state import NOTE, TrainState, combine_digests, named_fixed, tensor_bytes, tensor_digest

NOTES = ("cursor", "loop", "rng")
WRAPPERS = ("module", "_orig_mod")  # where DistributedDataParallel and torch.compile keep the model itself


@dataclass(frozen=True)
class Captured:
    """What one optimizer step consumed: the delta of the owned shards, and each group's hyper-parameters as used."""

    delta: Delta
    hyper: list[dict[str, Any]]


class LiveModel:
    """A user's model and optimizer as the log sees them.

    Args:
        model: the model, also inside DistributedDataParallel or torch.compile.
        optimizer: over its trainable parameters.
        shards: parameter shards of the log.
        window: finished steps whose delta may still be read when the next is captured.

    Raises:
        SettingsError: they cannot be logged; names what and why.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, shards: int, window: int) -> None:
        self.module, self.optimizer = unwrapped(model), optimizer
        _check_model(self.module)
        self.groups = _group_names(self.module, optimizer)
        self.layout = layout_of(self.module, self.groups, shards)
        params = dict(self.module.named_parameters())
        self.params = [params[slot.name] for slot in self.layout.slots]
        mine = {slot.name: params[slot.name] for slot in self.layout.slots}
        notes = {f"{NOTE}{key}": torch.empty(0, dtype=torch.uint8) for key in NOTES}
        self.state = TrainState(mine, named_fixed(self.module, set(mine)) | notes, optimizer)
        self.owned: tuple[int, ...] = tuple(self.layout.shards)
        self._places = {name: _place(self.module, name) for name in self.state.fixed if not name.startswith(NOTE)}
        self._seen: dict[str, Any] = {}  # of each fixed tensor: a copy of a buffer, (identity, version) of a parameter
        self._flats: list[Tensor | None] = [None] * (window + 2)  # a delta is read until the sender has packed it
        self._look()

    def description(self) -> dict[str, Any]:
        """Return what a process needs to replay this model's steps, see `tasks.described.Described`."""
        group_of = {name: number for number, names in enumerate(self.groups) for name in names}
        named = self.module.named_parameters()
        fixed = self.state.fixed.items()
        return {
            "parameters": [[n, _dtype(p), list(p.shape), group_of.get(n)] for n, p in named],
            "buffers": [[n.removeprefix("buffer/"), _dtype(b), list(b.shape)] for n, b in fixed if n[:7] == "buffer/"],
            "groups": self.hyper(),
            "notes": list(NOTES),
            "replay": self.replay()[0],
        }

    def optimizer_options(self) -> tuple[str, dict[str, Any]]:
        """Return the optimizer's class by name and the arguments that it was made with.

        Raises:
            SettingsError: another process cannot make one.
        """
        kind, name = type(self.optimizer), _class_name(type(self.optimizer))
        known = inspect.signature(kind).parameters
        wanted = {k: v for k, v in self.optimizer.defaults.items() if k in known}
        plain = {k: v for k, v in _plain(wanted).items() if k not in IMPLEMENTATION or k == "fused"}
        groups = self.optimizer.param_groups
        if any(group.get("foreach") for group in groups) and any(p.dtype != torch.float32 for p in self.params):
            plain["foreach"] = True  # in bfloat16 it rounds otherwise than the for-loop form; in float32 it does not
        return name, {k: v for k, v in plain.items() if v is not None}

    def replay(self) -> tuple[str, str]:
        """Return what a replay of this optimizer on a processor promises, and why if that is not "bitwise"."""
        name, options = self.optimizer_options()
        groups = self.optimizer.param_groups
        devices = sorted({p.device.type for p in self.params} - {"cpu"})
        reasons = [
            (any(group.get("fused") for group in groups), "a fused optimizer rounds otherwise than its replay"),
            (exactness(name, options) == "close", f"nothing is known of how {name} rounds"),
            (bool(devices), f"the model is on {', '.join(devices)}, its replay on a processor"),
            (any(p.dtype == torch.float64 for p in self.params), "float64 gradients are logged in float32"),
            (any(isinstance(group.get("lr"), Tensor) for group in groups), "a learning rate is a tensor"),
        ]
        found = [reason for true, reason in reasons if true]
        return ("close", "; ".join(found)) if found else ("bitwise", "")

    def hyper(self) -> list[dict[str, Any]]:
        """Return each group's hyper-parameters as they are now. Raises SettingsError if they are not plain values."""
        return [_plain(group) for group in hyper_parameters(self.optimizer)]

    @torch.no_grad()
    def capture(self, lsn: int) -> Captured:
        """Copy what the optimizer is about to consume in step `lsn`.

        The delta holds the owned shards only; it may be read until `window` more steps were captured.

        Raises:
            TaskError: a gradient is sparse.
        """
        grads = [param.grad for param in self.params]
        for slot, grad in zip(self.layout.slots, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise TaskError(f"step {lsn}: the gradient of {slot.name} is sparse", hint="use sparse=False")
        place = lsn % len(self._flats)
        flat = self._flats[place]
        if flat is None:  # not before it is needed: a worker that owns no parameter shard touches none of it
            flat = self._flats[place] = torch.empty(self.layout.size)
        for shard in self.owned:
            if shard:
                part = self.layout.range_of(shard)
                _copy(flat, self.layout.slots[part.first : part.last], grads[part.first : part.last])
        unused = frozenset(at for at, grad in enumerate(grads) if grad is None)
        return Captured(Delta(flat.numpy(), None, unused), self.hyper())

    def note(self, key: str, value: Any) -> Tensor | None:
        """Keep a JSON value with the state; return its bytes if they are not those of before.

        Raises:
            SettingsError: it is not plain JSON.
        """
        if value is None and not self.state.fixed[NOTE + key].numel():
            return None  # nothing was noted yet
        try:
            fresh = _note(value)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"{key}: expected a JSON value, got {value!r:.80}: {error}") from error
        same = torch.equal(fresh, self.state.fixed[NOTE + key])
        self.state.fixed[NOTE + key] = fresh
        return None if same else fresh

    def noted(self, key: str) -> Any:
        """Return the value of a note; None if there is none."""
        return json.loads(bytes(tensor_bytes(self.state.fixed[NOTE + key])) or b"null")

    def changed(self) -> dict[str, Tensor]:
        """Return copies of the buffers and frozen parameters that are not as they were at the last call."""
        before, self._seen = self._seen, {}
        self._look()
        out = {}
        for name, now in self._seen.items():
            if isinstance(now, Tensor):
                if not _same(now, before[name]):
                    out[name] = now
            elif now != before[name]:
                out[name] = self.state.fixed[name].detach().cpu().clone()
        return out

    def digest(self, shard: int | None = None) -> str:
        """Return the digest of one shard's state as it is now; None: of all of it."""
        if shard is None:
            return self.state.digest()
        if shard == 0:
            return combine_digests({name: tensor_digest(t) for name, t in self.state.fixed.items()})
        own = {slot.name: self.state.params[slot.name] for slot in self.layout.slots_of(shard)}
        return TrainState(own, {}, self.optimizer).digest()

    def load(self, tensors: Mapping[str, Tensor], lsn: int) -> None:
        """Give model and optimizer a state, notes included. Raises StateMismatch if it is another model's."""
        self._look()
        self.state.load(tensors, lsn)
        for group in self.optimizer.param_groups:
            if group.get("fused") or group.get("capturable"):  # these keep their step counter beside the parameter
                for param in group["params"]:
                    step = self.optimizer.state.get(param, {}).get("step")
                    if isinstance(step, Tensor):
                        self.optimizer.state[param]["step"] = step.to(param.device, torch.float32)
        self._look()

    def _look(self) -> None:
        """See the fixed tensors as they are now: a module may have put others in their places."""
        for name, (module, key) in self._places.items():
            frozen = module._parameters.get(key)
            tensor = frozen.detach() if frozen is not None else module._buffers[key]
            assert tensor is not None
            self.state.fixed[name] = tensor
            if frozen is not None:  # perhaps large, and hardly ever changed
                self._seen[name] = (id(frozen), frozen._version)
            else:  # batch norm changes its statistics without counting a version
                self._seen[name] = tensor.detach().cpu().clone()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"):
        model = next(getattr(model, name) for name in WRAPPERS if hasattr(model, name))
    return model


def _check_model(module: nn.Module) -> None:
    try:
        check_model(module, "attach")
    except TaskError as error:
        hint = "hand over the whole model, plain or inside DistributedDataParallel" if "FSDP" in error.message else ""
        raise SettingsError(error.message, hint=hint or error.hint) from error


def _group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each optimizer group."""
    name_of = {id(p): name for name, p in module.named_parameters()}
    strangers = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in name_of]
    if strangers:
        raise SettingsError(
            f"the optimizer has parameters that are not the model's, of shape {', '.join(map(str, strangers[:3]))}",
            hint="hand over the model that the optimizer was made for, after it was moved to its device",
        )
    groups = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    there = {name for names in groups for name in names}
    missing = [name for name, p in module.named_parameters() if p.requires_grad and name not in there]
    if missing:
        raise SettingsError(
            f"trainable parameters of the model are missing from the optimizer: {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""),
            hint="give them to the optimizer, or set requires_grad=False on them",
        )
    return groups


def _class_name(kind: type[Optimizer]) -> str:
    if kind.__name__ in UNSUITED:
        raise SettingsError(
            f"{kind.__name__} cannot be logged: {UNSUITED[kind.__name__]}", hint="use another optimizer"
        )
    if getattr(torch.optim, kind.__name__, None) is kind:
        return f"torch.optim:{kind.__name__}"
    name = f"{kind.__module__}:{kind.__qualname__}"
    importable = kind.__module__ != "__main__" and "." not in kind.__qualname__
    if not importable or import_path(name, "optimizer") is not kind:
        raise SettingsError(
            f"optimizer {name} cannot be imported by other processes, which have to replay it",
            hint="put the class at the top of a module that can be imported on every node",
        )
    return name


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as JSON values."""
    out = {}
    for key, value in values.items():
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        out[key] = list(value) if isinstance(value, tuple) else value
        try:
            json.dumps(out[key])
        except TypeError as error:
            raise SettingsError(
                f"the optimizer's {key!r} is a {type(value).__name__}, which a log cannot hold",
                hint="keep in the parameter groups only numbers, strings and lists of them",
            ) from error
    return out


def _copy(flat: Tensor, slots: Sequence[Any], grads: Sequence[Tensor | None]) -> None:
    """Write gradients to their places in a flat fp32 tensor; zero where there is none."""
    devices = {grad.device for grad in grads if grad is not None}
    if devices and devices != {flat.device}:  # one copy from an accelerator takes as long as one of a single parameter
        device = devices.pop()
        parts = [
            torch.zeros(slot.stop - slot.start, device=device) if grad is None else grad.reshape(-1).float()
            for slot, grad in zip(slots, grads, strict=True)
        ]
        flat[slots[0].start : slots[-1].stop].copy_(torch.cat(parts))
        return
    for slot, grad in zip(slots, grads, strict=True):
        if grad is None:
            flat[slot.start : slot.stop].zero_()
        else:
            flat[slot.start : slot.stop].view(slot.shape).copy_(grad)


def _place(module: nn.Module, full: str) -> tuple[nn.Module, str]:
    path, _, key = full.partition("/")[2].rpartition(".")
    return module.get_submodule(path), key


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits, NaNs included."""
    return one.shape == other.shape and (torch.equal(one, other) or tensor_digest(one) == tensor_digest(other))


def _note(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
