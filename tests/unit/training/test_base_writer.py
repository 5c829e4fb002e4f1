"""Bases as a steady trickle: the pacer keeps to a rate, and lets go when it is told to hurry."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from everstep.core import clock
from everstep.training import base_writer
from everstep.training.base_writer import BURST_S, Pacer


class FakeTime:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return False


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTime]:
    fake = FakeTime()
    monkeypatch.setattr(clock, "monotonic", lambda: fake.now)
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: fake.wait(timeout))
    yield fake


def test_bytes_are_spread_over_time(time: FakeTime) -> None:
    pacer = Pacer(lambda: 1000.0)
    ends = []
    for _ in range(50):
        pacer(100)
        ends.append(time.now)
    assert ends[-1] - 100.0 == pytest.approx(49 * 0.1 - BURST_S)
    windows = [sum(start <= end < start + 1 for end in ends) * 100 for start in (101.0, 102.0, 103.0)]
    assert windows == [1000, 1000, 1000]


def test_what_was_not_used_is_not_saved_up(time: FakeTime) -> None:
    pacer = Pacer(lambda: 1000.0)
    pacer(100)
    time.now += 60.0
    began = time.now
    for _ in range(10):
        pacer(100)
    assert time.now - began == pytest.approx(9 * 0.1 - BURST_S)


def test_without_a_rate_nothing_waits(time: FakeTime) -> None:
    pacer = Pacer(lambda: None)
    for _ in range(10):
        pacer(1 << 30)
    assert time.now == 100.0


def test_hurry_ends_the_waiting_at_once() -> None:
    pacer = Pacer(lambda: 1.0)
    pacer(1000)
    waiter = threading.Thread(target=pacer, args=(1,), daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    pacer.hurry()
    waiter.join(5)
    assert not waiter.is_alive()


def test_the_headroom_lets_a_round_fit_into_its_interval() -> None:
    assert 1.0 < base_writer.HEADROOM < 2.0
