"""The tree over micro-shards: shares are covered exactly, and whoever adds, the additions are those of one worker."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from everstep.core.errors import GroupBroken
from everstep.training.tree import Sums, combine, is_node, nodes_of, share, tree_reduce
from tests.unit.training.worlds import ThreadGroup, same, solo, together

COUNTS = range(1, 18)
DEVICE = torch.device("cpu")


def leaf(micro_shard: int, length: int = 11) -> Tensor:
    """Magnitudes far apart, so that another order of additions shows."""
    draw = torch.Generator().manual_seed(micro_shard)
    return torch.randn(length, generator=draw) * 10.0 ** torch.randint(-3, 4, (length,), generator=draw)


def tree_sum(low: int, high: int, length: int = 11) -> Tensor:
    """The naive twin: the definition, by recursion."""
    if high - low == 1:
        return leaf(low, length)
    middle = (low + high) // 2
    return tree_sum(low, middle, length) + tree_sum(middle, high, length)


def held(span: range, count: int, length: int = 11) -> Sums:
    sums = Sums(count)
    for micro_shard in span:
        sums.add((micro_shard, micro_shard + 1), leaf(micro_shard, length))
    return sums


@pytest.mark.parametrize("count", COUNTS)
def test_nodes_cover_every_range_exactly_and_are_few(count: int) -> None:
    for start, stop in itertools.combinations(range(count + 1), 2):
        nodes = nodes_of(range(start, stop), count)
        assert [m for low, high in nodes for m in range(low, high)] == [*range(start, stop)]
        assert all(is_node(low, high, count) for low, high in nodes)
        assert len(nodes) <= max(1, 2 * (count - 1).bit_length())
        neighbours = itertools.pairwise(nodes)
        assert not any(is_node(low, high, count) for (low, _), (_, high) in neighbours)  # none could be folded
    assert nodes_of(range(0, 0), count) == []


@pytest.mark.parametrize("count", COUNTS)
def test_shares_lie_side_by_side_and_are_nearly_equal(count: int) -> None:
    for size in range(1, count + 1):
        shares = [share(count, size, rank) for rank in range(size)]
        assert [m for part in shares for m in part] == [*range(count)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("count", COUNTS)
def test_what_is_folded_while_it_arrives_are_the_nodes_of_the_range(count: int) -> None:
    for start, stop in itertools.combinations(range(count + 1), 2):
        sums = held(range(start, stop), count)
        assert sums.nodes == nodes_of(range(start, stop), count)
        assert same(sums.vectors, [tree_sum(*node) for node in sums.nodes])


@pytest.mark.parametrize("count", COUNTS)
def test_at_any_world_size_the_sum_is_that_of_one_worker(count: int) -> None:
    whole = tree_sum(0, count)
    for size in range(1, count + 1):
        parts = [held(share(count, size, rank), count) for rank in range(size)]
        nodes = [node for part in parts for node in part.nodes]
        rows = torch.stack([vector for part in parts for vector in part.vectors])
        assert same(combine(rows, nodes, count), whole)


def test_another_order_of_additions_gives_other_bits() -> None:
    total = leaf(0)
    for micro_shard in range(1, 17):
        total = total + leaf(micro_shard)
    assert not same(total, tree_sum(0, 17)) and torch.allclose(total, tree_sum(0, 17), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("length", [1, 2, 11, 12])  # fewer elements than workers, and slices of unequal widths
def test_over_a_group_everybody_gets_that_sum_and_the_bytes_are_counted(length: int, count: int) -> None:
    for size in range(1, 5):

        def job(group: ThreadGroup) -> tuple[Tensor, int, int]:
            sums, out = held(share(count, group.world_size, group.world_rank), count, length), torch.zeros(length)
            return out, tree_reduce(sums.vectors, count, group, out), group.sent

        results = together(size, job)
        assert all(same(out, tree_sum(0, count, length)) for out, _, _ in results)
        assert {told for _, told, _ in results} == {4 * sum(sent for _, _, sent in results)}


@pytest.mark.parametrize("collective", [1, 2])
def test_a_broken_group_leaves_the_result_as_it_was(collective: int) -> None:
    sums, out = held(range(4), 4), torch.zeros(11)
    with pytest.raises(GroupBroken):
        tree_reduce(sums.vectors, 4, solo(break_at=collective), out)
    assert not out.any()


def test_memory_is_used_again_and_never_more_than_the_nodes_and_a_leaf() -> None:
    sums, places = Sums(16), set()
    for _ in range(3):
        sums.clear()
        for micro_shard in range(16):
            vector = sums.spare(11, DEVICE)
            places.add(vector.data_ptr())
            sums.add((micro_shard, micro_shard + 1), vector.copy_(leaf(micro_shard)))
        assert same(sums.vectors, [tree_sum(0, 16)])
    assert len(places) == 5
