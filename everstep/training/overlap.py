"""Reducing a dense gradient stretch by stretch while backward still runs.

In a step's last micro-shard a parameter's gradient is final once it was accumulated. Stretches are begun in one order,
from the last parameter to the first, which is about the order in which backward finishes them; all workers begin them
in that order, so collectives match. (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from everstep.core.errors import TaskError
from everstep.training.group import Group, Pending
from everstep.training.layout import Slot

STRETCH_BYTES = 4 << 20  # below it a collective costs more than it hides


class Stretches:
    """Cuts a gradient into stretches of whole parameters and reduces each as soon as it is whole.

    Args:
        slots: the parameters' places, in order.
        params: the parameters by name.
    """

    def __init__(self, slots: Sequence[Slot], params: Mapping[str, torch.nn.Parameter]) -> None:
        self.slots, self._params = slots, [params[slot.name] for slot in slots]
        self.stretches = _cut(slots)
        self.on_reduced: Callable[[int, int, torch.Tensor], None] | None = None
        """Called with where a stretch begins and ends, and the wire: from there to the gradient's end it is reduced."""
        self._of = {at: number for number, stretch in enumerate(self.stretches) for at in stretch}
        self._wire: torch.Tensor | None = None
        self._group: Group | None = None
        for at, param in enumerate(self._params):
            param.register_post_accumulate_grad_hook(partial(self._accumulated, at))  # type: ignore[no-untyped-call]

    @property
    def worth_it(self) -> bool:
        """Whether there is more than one stretch: with one, nothing could overlap."""
        return len(self.stretches) > 1

    def begin(self, wire: torch.Tensor, group: Group) -> None:
        """Take what the next backward accumulates for final: it goes to `wire`, flagged behind it, and is reduced."""
        self._wire, self._group = wire, group
        self._missing = [set(stretch) for stretch in self.stretches]
        self._begun: list[Pending] = []
        self._reduced = 0

    def finish(self) -> None:
        """Begin what got no gradient at all, and wait for every stretch.

        Raises:
            Interruption: the group broke.
        """
        assert self._wire is not None
        for number in range(len(self._begun), len(self.stretches)):
            for at in list(self._missing[number]):
                self._place(at)
            self._reduce(number)
        while self._reduced < len(self._begun):
            self._begun[self._reduced].wait()
            self._told()
        self.end()

    def end(self) -> None:
        """Accumulated gradients are nobody's business any more."""
        self._wire = self._group = None
        self._begun = []

    def _accumulated(self, at: int, _: torch.Tensor) -> None:
        if self._wire is None:
            return
        number = self._of[at]
        if at not in self._missing[number]:
            raise TaskError(
                f"the gradient of {self.slots[at].name} was accumulated twice in one backward pass",
                hint="parts of the model are run again in backward (reentrant checkpointing?): "
                "set compression.overlap = false",
            )
        self._place(at)
        while (number := len(self._begun)) < len(self.stretches) and not self._missing[number]:
            self._reduce(number)
        while self._reduced < len(self._begun) and self._begun[self._reduced].done():
            self._begun[self._reduced].wait()  # it may have ended by failing
            self._told()

    @torch.no_grad()
    def _place(self, at: int) -> None:
        assert self._wire is not None
        slot, param = self.slots[at], self._params[at]
        if param.grad is None:
            self._wire[slot.start : slot.stop].zero_()
        else:
            self._wire[slot.start : slot.stop].copy_(param.grad.reshape(-1))
            self._wire[self.slots[-1].stop + at] = 1
            param.grad = None
        self._missing[self._of[at]].discard(at)

    def _reduce(self, number: int) -> None:
        assert self._wire is not None and self._group is not None
        places = self.stretches[number]
        stretch = self._wire[self.slots[places[0]].start : self.slots[places[-1]].stop]
        self._begun.append(self._group.begin_all_reduce(stretch))

    def _told(self) -> None:
        stretch = self.stretches[self._reduced]
        self._reduced += 1
        if self.on_reduced is not None and self._wire is not None:
            self.on_reduced(self.slots[stretch[0]].start, self.slots[stretch[-1]].stop, self._wire)


def _cut(slots: Sequence[Slot]) -> list[range]:
    """Return the positions of each stretch, from the last to the first."""
    out: list[range] = []
    stop, size = len(slots), 0
    for at in reversed(range(len(slots))):
        size += 4 * (slots[at].stop - slots[at].start)
        if size >= STRETCH_BYTES or at == 0:
            out.append(range(at, stop))
            stop, size = at, 0
    return out
