"""Buffers in a step: the same on every worker, and untouched until the step commits.

Each micro-shard starts from the value that the step started from; a float buffer's new value is the mean over all
micro-shards, any other buffer's that of micro-shard 0 (carried as bytes). So neither the number of workers nor who
computes what decides them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from everstep.training.group import Group
from everstep.training.state import tensor_bytes
from everstep.training.tree import Sums, tree_reduce


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
            elif micro_shard == 0:
                raw = torch.frombuffer(bytearray(tensor_bytes(found)), dtype=torch.uint8).float()
                self._add(name, raw.to(found.device))
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
        self._names = self._named(flags)
        return torch.cat([self._part(name) for name in self._names]) if self._names else None

    def reduce(self, flags: torch.Tensor, group: Group) -> tuple[torch.Tensor | None, int]:
        """Sum the wires of all workers.

        Args:
            flags: for each buffer, on how many workers it changed.
            group: the process group.

        Returns:
            The summed wire, None if nothing changed, and the bytes that all workers together sent.

        Raises:
            Interruption: the group broke; nothing has changed.
        """
        wire = self.wire(flags)
        if wire is None:
            return None, 0
        group.all_reduce(wire)
        return wire, 2 * (group.world_size - 1) * wire.numel() * 4

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

    def _named(self, flags: torch.Tensor) -> list[str]:
        return [name for name, flag in zip(self.tensors, flags.cpu(), strict=True) if flag > 0]

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


class TreeBuffers(Buffers):
    """The same, added along the tree over micro-shards: the same bits at any world size.

    A buffer's sums begin with the first micro-shard that changes it; those before it, and workers on which none does,
    bring the value the step started from.
    """

    def begin(self) -> None:
        """Note the values that this step starts from."""
        super().begin()
        self._trees: dict[str, Sums] = {}  # of what changed on this worker
        self._done: list[int] = []  # micro-shards collected

    @torch.no_grad()
    def collect(self, micro_shard: int) -> None:
        """Add what this micro-shard made of the buffers, and put the step's first values back."""
        for name, start in self._start.items():
            module, key = self._places[name]
            found = module._buffers[key]
            theirs = micro_shard and not start.is_floating_point()  # such a buffer's value is that of micro-shard 0
            if found is None or theirs or torch.equal(found, start):
                found = start
            elif name not in self._trees:
                self._trees[name] = self._unchanged(name)
            if name in self._trees:
                self._trees[name].add((micro_shard, micro_shard + 1), _leaf(found, micro_shard))
        self._done.append(micro_shard)
        self.put_back()

    def flags(self) -> list[float]:
        """Return 1 for each buffer that a micro-shard of this worker changed, else 0."""
        return [float(name in self._trees) for name in self.tensors]

    def reduce(self, flags: torch.Tensor, group: Group) -> tuple[torch.Tensor | None, int]:
        """Sum the buffers that any worker changed along the tree, and divide those that are means; see `Buffers`."""
        self._names = self._named(flags)
        if not self._names:
            return None, 0
        trees = [self._trees.get(name) or self._unchanged(name) for name in self._names]
        vectors = [torch.cat(parts) for parts in zip(*(tree.vectors for tree in trees), strict=True)]
        wire = torch.empty_like(vectors[0])
        sent = tree_reduce(vectors, self._micro_shards, group, wire)
        lengths = [self._length(name) for name in self._names]
        for name, part in zip(self._names, torch.split(wire, lengths), strict=True):
            if self.tensors[name].is_floating_point():
                part /= self._micro_shards
        return wire, sent

    def _unchanged(self, name: str) -> Sums:
        """Return the sums of a buffer that no micro-shard has changed so far."""
        sums = Sums(self._micro_shards)
        for micro_shard in self._done:
            sums.add((micro_shard, micro_shard + 1), _leaf(self._start[name], micro_shard))
        return sums


def _leaf(value: torch.Tensor, micro_shard: int) -> torch.Tensor:
    """Return one micro-shard's part of a buffer, fp32: float values (n,), else bytes, those of micro-shard 0 alone."""
    if value.is_floating_point():
        return value.to(torch.float32, copy=True).reshape(-1)
    if micro_shard:
        return torch.zeros(value.numel() * value.element_size(), device=value.device)
    return torch.frombuffer(bytearray(tensor_bytes(value)), dtype=torch.uint8).float().to(value.device)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
