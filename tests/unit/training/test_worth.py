"""The measured choice between a dense and a compressed exchange."""

from __future__ import annotations

import torch

from everstep.compressors import Compressor, Spec, build_compressor
from everstep.core import clock
from everstep.training.worth import Worth, measure
from tests.unit.training.worlds import ThreadGroup, together


class Link(ThreadGroup):
    """A group whose link takes so many seconds an element."""

    per_element = 0.0

    def all_reduce(self, tensor: torch.Tensor) -> None:
        clock.sleep(2 * tensor.numel() * tensor.element_size() * self.per_element)
        super().all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        clock.sleep(tensor.numel() * tensor.element_size() * self.per_element)
        return super().all_gather(tensor)


def measured(seconds_a_byte: float) -> list[Worth]:
    compressor = build_compressor("topk", Spec(0.01))
    assert isinstance(compressor, Compressor)

    def job(group: ThreadGroup) -> Worth:
        group.__class__, Link.per_element = Link, seconds_a_byte
        return measure(compressor, 100_000, group, torch.device("cpu"))

    return together(2, job)


def test_a_slow_link_is_worth_compressing_for() -> None:
    one, other = measured(1e-6)
    assert one == other and one.pays and "compression is on" in str(one)
    assert one.dense_s > 0.5 > one.compressed_s


def test_what_is_no_quicker_is_left_out() -> None:
    assert not Worth(1.0, 0.95).pays and Worth(1.0, 0.5).pays
    assert str(Worth(0.5, 1.0)) == "compression is off: an exchange takes 1.0000 s with it, 0.5000 s without"
