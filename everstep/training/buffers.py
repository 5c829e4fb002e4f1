"""Buffers in a step: the same on every worker, and untouched until the step commits.

Each micro-shard starts from the value that the step started from; a float buffer's new value is the mean over all
micro-shards, any other buffer's that of micro-shard 0 (carried as bytes). So neither the number of workers nor who
computes what decides them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from everstep.training.state import tensor_bytes


class Buffers:
    """The persistent buffers of a live model.

    Args:
        model: the model.
        fixed: the state's fixed tensors by canonical name; those named `buffer/...` are the model's own.
        micro_shards: over how many a step's mean is taken.
    """

    def __init__(self, model: nn.Module, fixed: Mapping[str, torch.Tensor], micro_shards: int) -> None:
        self.tensors = {name: tensor for name, tensor in fixed.items() if name.startswith("buffer/")}
        self._micro_shards = micro_shards
        self._places = {name: _place(model, name.removeprefix("buffer/")) for name in self.tensors}
        self._start: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}  # of what changed on this worker
        self._kept: dict[str, int] = {}  # float buffers: micro-shards that left them as they were
        self._names: list[str] = []

    def begin(self) -> None:
        """Note the values that this step starts from."""
        self._start = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self._sums, self._kept = {}, dict.fromkeys(self.tensors, 0)

    @torch.no_grad()
    def collect(self, micro_shard: int) -> None:
        """Add what this micro-shard made of the buffers, and put the step's first values back."""
        for name in self.tensors:
            module, key = self._places[name]
            found = module._buffers[key]  # perhaps another tensor by now: `self.calls = self.calls + 1`
            if found is None or torch.equal(found, self._start[name]):
                self._kept[name] += 1
            elif found.is_floating_point():
                self._add(name, found.float().reshape(-1) / self._micro_shards)
            else:
                raw = torch.frombuffer(bytearray(tensor_bytes(found)), dtype=torch.uint8).float()
                self._add(name, raw.to(found.device) * (micro_shard == 0))
        self.put_back()

    @torch.no_grad()
    def put_back(self) -> None:
        """Give every buffer the value that this step started from."""
        for name, tensor in self.tensors.items():
            module, key = self._places[name]
            module._buffers[key] = tensor
            tensor.copy_(self._start[name])

    def flags(self) -> list[float]:
        """Return 1 for each buffer that a micro-shard of this worker changed, else 0."""
        return [float(name in self._sums) for name in self.tensors]

    def wire(self, flags: torch.Tensor) -> torch.Tensor | None:
        """Return this worker's part of the buffers that any worker changed (fp32, to be summed); None if none did."""
        self._names = [name for name, flag in zip(self.tensors, flags.cpu(), strict=True) if flag > 0]
        return torch.cat([self._part(name) for name in self._names]) if self._names else None

    def values(self, wire: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the new values in a summed wire, by canonical name."""
        out, at = {}, 0
        for name in self._names:
            old, length = self.tensors[name], self._length(name)
            part, at = wire[at : at + length], at + length
            if old.is_floating_point():
                out[name] = part.view(old.shape).to(old.dtype)
            else:
                raw = part.to(torch.uint8).cpu().numpy().tobytes()
                out[name] = torch.frombuffer(bytearray(raw), dtype=old.dtype).view(old.shape).to(old.device)
        return out

    def _add(self, name: str, change: torch.Tensor) -> None:
        self._sums[name] = change if name not in self._sums else self._sums[name] + change

    def _part(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        if not tensor.is_floating_point():
            return self._sums.get(name, torch.zeros(self._length(name), device=tensor.device))
        part = self._sums.get(name)
        if self._kept[name]:
            kept = self._start[name].float().reshape(-1) * (self._kept[name] / self._micro_shards)
            part = kept if part is None else part + kept
        return torch.zeros(self._length(name), device=tensor.device) if part is None else part

    def _length(self, name: str) -> int:
        tensor = self.tensors[name]
        return tensor.numel() * (1 if tensor.is_floating_point() else tensor.element_size())


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
