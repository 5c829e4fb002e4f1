"""An optimizer step taken block by block: the bits of the step over whole tensors, with far less memory traffic.

A torch optimizer in its for-loop form passes over whole tensors some ten times a step and makes temporaries of their
size. An elementwise one may as well take one block after the other: all passes over a block then find it in the cache,
and temporaries are small enough to be reused. Vector loops meet the same elements as over the whole tensor, because
every block but the last is a multiple of any vector's length; so even their scalar ends fall on the same elements.

Measured for AdamW over the shapes of GPT-2 small, one thread: 0.22 s a step instead of 0.4 to 0.56 s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from everstep.training.optimizer import set_hyper_parameters

BLOCK = 1 << 17  # elements; with their gradient, two moments and a temporary some MiB


def worth_it(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> bool:
    """Whether a step on these parameters can be taken in blocks and any of them is longer than one."""
    states = [optimizer.state.get(param, {}) for param in params]
    known = all(state and all(isinstance(value, torch.Tensor) for value in state.values()) for state in states)
    return known and any(param.numel() > BLOCK for param in params)


class BlockedStep:
    """Steps an optimizer through a twin of it whose parameters are blocks: views of the memory of the real ones.

    Args:
        optimizer: an elementwise one in its for-loop form, whose state is made up of tensors.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._parts: dict[nn.Parameter, tuple[nn.Parameter, ...]] = {}
        self._counters: list[tuple[torch.Tensor, list[torch.Tensor]]] = []  # a real one, and its copy in each block
        self._block = BLOCK
        groups = [
            {**group, "params": [part for param in group["params"] for part in self._split(param)]}
            for group in optimizer.param_groups
        ]
        self.twin: Optimizer = type(optimizer)(groups)  # type: ignore[call-arg]
        for param, parts in self._parts.items():
            for part, state in zip(parts, self._split_state(param, len(parts)), strict=True):
                self.twin.state[part] = state

    def fits(self, params: Sequence[nn.Parameter]) -> bool:
        """Whether all of these parameters had their state when the twin was made."""
        return all(param in self._parts for param in params)

    @torch.no_grad()
    def step(self, hyper: Sequence[Mapping[str, Any]]) -> None:
        """Take the step that the optimizer would, on the gradients that its parameters hold."""
        set_hyper_parameters(self.twin, hyper)
        for param, parts in self._parts.items():
            if parts[0] is not param:
                grads = (None,) * len(parts) if param.grad is None else torch.split(param.grad.view(-1), self._block)
                for part, grad in zip(parts, grads, strict=True):
                    part.grad = grad
        for real, copies in self._counters:
            for copy in copies:
                copy.copy_(real)
        self.twin.step()
        for real, copies in self._counters:
            real.copy_(copies[0])
        for parts in self._parts.values():
            for part in parts:
                part.grad = None

    def _split(self, param: nn.Parameter) -> tuple[nn.Parameter, ...]:
        """Return a parameter's blocks: itself if it is small, none if it has no state yet."""
        state = self.optimizer.state.get(param)
        if not state:
            return ()
        parts: tuple[nn.Parameter, ...] = (param,)
        large = [t for t in state.values() if t.dim()]
        if param.numel() > self._block and all(t.shape == param.shape and t.is_contiguous() for t in (param, *large)):
            parts = tuple(nn.Parameter(part) for part in torch.split(param.detach().view(-1), self._block))
        self._parts[param] = parts
        return parts

    def _split_state(self, param: nn.Parameter, count: int) -> list[dict[str, torch.Tensor]]:
        state = self.optimizer.state[param]
        if self._parts[param][0] is param:
            return [state]
        blocks: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        for key, value in state.items():
            pieces = torch.split(value.view(-1), self._block) if value.dim() else tuple(value.clone() for _ in blocks)
            if not value.dim():
                self._counters.append((value, list(pieces)))
            for block, piece in zip(blocks, pieces, strict=True):
                block[key] = piece
        return blocks
