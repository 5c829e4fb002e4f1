"""The state that a step changes: parameters, optimizer state and buffers; a worker's own, or one shard's in a replica.

Canonical names, which no sharding changes: `param/NAME`, `buffer/NAME`, `optimizer/NAME/KEY`; and `note/KEY`, which is
what a loop of one's own leaves with a step: JSON of any length, as bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.core.errors import StateMismatch
from everstep.training import blocks
from everstep.training.optimizer import set_hyper_parameters, spares_gradients

NOTE = "note/"


class TrainState:
    """Parameters, fixed tensors and optimizer, at one lsn.

    Args:
        params: trainable parameters by qualified name, in layout order.
        fixed: buffers and frozen parameters by canonical name; changed only by `set_fixed`.
        optimizer: the optimizer over `params`; None when there are none.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], fixed: Mapping[str, torch.Tensor], optimizer: Optimizer | None
    ) -> None:
        self.params = dict(params)
        self.fixed = dict(fixed)
        self.optimizer = optimizer
        self.lsn = 0
        self._blocks: blocks.BlockedStep | None = None

    def apply(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Take one optimizer step with these gradients (None: the parameter got none).

        The hyper-parameters are those the optimizer holds now.
        """
        self._set_gradients(gradients)
        if self.optimizer is not None:
            self.optimizer.step()
        self._drop_gradients()

    def replay(self, lsn: int, gradients: Mapping[str, torch.Tensor | None], hyper: list[dict[str, Any]]) -> None:
        """Take a logged step: the same arithmetic as the worker's, with the hyper-parameters it used."""
        self.expect_next(lsn)
        if self.optimizer is not None:
            set_hyper_parameters(self.optimizer, hyper)
            self._set_gradients(gradients)
            if blocked := self._blocked():
                blocked.step(hyper)
            else:
                self.optimizer.step()
            self._drop_gradients()
        self.lsn = lsn

    def _set_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        for name, param in self.params.items():
            gradient = gradients[name]
            param.grad = None if gradient is None else gradient.to(param.dtype)

    def _drop_gradients(self) -> None:
        for param in self.params.values():
            param.grad = None

    def _blocked(self) -> blocks.BlockedStep | None:
        """Return what takes the step of the gradients that are set block by block; None if it has to be taken whole."""
        used = [param for param in self.params.values() if param.grad is not None]
        if self._blocks is None or not self._blocks.fits(used):
            self._blocks = None
            assert self.optimizer is not None
            if spares_gradients(self.optimizer) and blocks.worth_it(self.optimizer, used):
                self._blocks = blocks.BlockedStep(self.optimizer)
        return self._blocks

    def expect_next(self, lsn: int) -> None:
        """Refuse any step but the next.

        Raises:
            StateMismatch: `lsn` does not follow the state's own.
        """
        if lsn != self.lsn + 1:
            raise StateMismatch(f"step {lsn} cannot follow the state of step {self.lsn}; expected {self.lsn + 1}")

    @torch.no_grad()
    def set_fixed(self, changed: Mapping[str, torch.Tensor]) -> None:
        """Give buffers their value after a step."""
        for name, value in changed.items():
            if name.startswith(NOTE):
                self.fixed[name] = value
            else:
                self.fixed[name].copy_(value)

    def owns(self, full: str) -> bool:
        """Whether a tensor of this canonical name belongs to this state."""
        if full.startswith("optimizer/"):
            return full.removeprefix("optimizer/").rpartition("/")[0] in self.params
        return full in self.fixed or full.removeprefix("param/") in self.params

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the state by canonical name, sorted; the tensors themselves, not copies."""
        out = {f"param/{name}": param.detach() for name, param in self.params.items()}
        out.update(self.fixed)
        if self.optimizer is not None:
            for name, param in self.params.items():
                for key, value in self.optimizer.state.get(param, {}).items():
                    if isinstance(value, torch.Tensor):
                        out[f"optimizer/{name}/{key}"] = value
                    elif isinstance(value, bool | int | float):
                        kind = torch.float64 if isinstance(value, float) else torch.int64
                        out[f"optimizer/{name}/{key}#"] = torch.tensor(value, dtype=kind)
        return dict(sorted(out.items()))

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], lsn: int, *, adopt: bool = False) -> None:
        """Take over the tensors of another state, bit for bit.

        Args:
            tensors: by canonical name.
            lsn: the step they stand at.
            adopt: take the tensors themselves, which nobody else may use from then on, where they are on the right
                device; else copy them. Not for a state whose fixed tensors are a model's own.

        Raises:
            StateMismatch: names or shapes are not those of this model and optimizer.
        """
        own = {f"param/{name}": param for name, param in self.params.items()} | self.fixed
        given = {name for name in tensors if not name.startswith("optimizer/")}
        if set(own) != given:
            missing, extra = sorted(set(own) - given)[:3], sorted(given - set(own))[:3]
            raise StateMismatch(
                f"the stored state is of another model: missing {missing}, unexpected {extra}",
                hint="use the task and the task settings that the run was started with",
            )
        for name, tensor in own.items():
            if name.startswith(NOTE):
                self.fixed[name] = tensors[name] if adopt else tensors[name].clone()
                continue
            if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype:
                raise StateMismatch(
                    f"{name}: expected {tuple(tensor.shape)} {tensor.dtype}, the stored state has "
                    f"{tuple(tensors[name].shape)} {tensors[name].dtype}",
                    hint="use the task and the task settings that the run was started with",
                )
            if adopt and tensor.device == tensors[name].device:
                tensor.data = tensors[name]
            else:
                tensor.copy_(tensors[name])
        self._load_optimizer({n: t for n, t in tensors.items() if n.startswith("optimizer/")}, adopt)
        self.lsn = lsn

    def _load_optimizer(self, tensors: Mapping[str, torch.Tensor], adopt: bool) -> None:
        if self.optimizer is None:
            return
        self._blocks = None  # it steps the tensors that are dropped here
        shapes = state_shapes(self.optimizer)
        self.optimizer.state.clear()
        for full, tensor in tensors.items():
            name, _, key = full.removeprefix("optimizer/").rpartition("/")
            if name not in self.params or (shapes is not None and key not in shapes):
                raise StateMismatch(
                    f"{full}: {type(self.optimizer).__name__} keeps {sorted(shapes or ())} a parameter, not this",
                    hint="use the optimizer that the run was started with",
                )
            param = self.params[name]
            if shapes is not None and shapes[key] and tensor.shape != param.shape:
                raise StateMismatch(
                    f"{full}: expected {tuple(param.shape)}, the stored state has {tuple(tensor.shape)}",
                    hint="use the task and the task settings that the run was started with",
                )
            slot = self.optimizer.state.setdefault(param, {})
            if key.endswith("#"):
                slot[key[:-1]] = tensor.item()
            else:  # step counters stay on the CPU, as torch keeps them; moments live beside their parameter
                target = param.device if tensor.dim() else tensor.device
                slot[key] = tensor.to(target, copy=not adopt)

    def digest(self) -> str:
        """Return the SHA-256 over all tensors of this state, see `combine_digests`."""
        return combine_digests(self.tensor_digests())

    def tensor_digests(self) -> dict[str, str]:
        """Return each tensor's own digest by canonical name."""
        return {name: tensor_digest(tensor) for name, tensor in self.tensors().items()}


def state_shapes(optimizer: Optimizer) -> dict[str, bool] | None:
    """Return what an optimizer keeps for each parameter: by key, whether it has the parameter's shape.

    Seen by a step of the same optimizer on parameters of its own; None if it cannot be built or stepped that way.
    """
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    trials = [nn.Parameter(torch.zeros(2, 3)) for _ in groups]
    try:
        twin = type(optimizer)([{**group, "params": [trial]} for group, trial in zip(groups, trials, strict=True)])  # type: ignore[call-arg]
        for trial in trials:
            trial.grad = torch.zeros_like(trial)
        twin.step()
        twin.step()
    except Exception:  # best effort: a user's own optimizer may need more than its groups
        return None
    out: dict[str, bool] = {}
    for slot in twin.state.values():
        for key, value in slot.items():
            tensor = isinstance(value, torch.Tensor)
            out[key if tensor else f"{key}#"] = tensor and value.shape == (2, 3)
    return out


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements as bytes in row-major order, without a copy where its memory allows."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy() if flat.numel() else b"")  # type: ignore[arg-type]


def combine_digests(digests: Mapping[str, str]) -> str:
    """Return one SHA-256 for many tensors: independent of how they were spread over shards and processes."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()


def named_fixed(model: nn.Module, trainable: set[str]) -> dict[str, torch.Tensor]:
    """Return a model's persistent buffers and frozen parameters, and the notes it has, by canonical name."""
    persistent = set(model.state_dict(keep_vars=True))
    buffers = {f"buffer/{n}": b for n, b in model.named_buffers() if n in persistent}
    frozen = {f"param/{n}": p.detach() for n, p in model.named_parameters() if n not in trainable}
    notes = {f"{NOTE}{key}": torch.empty(0, dtype=torch.uint8) for key in getattr(model, "everstep_notes", ())}
    return buffers | frozen | notes
