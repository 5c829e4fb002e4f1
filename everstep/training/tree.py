"""Sums over micro-shards in one order that no world size changes: that of a fixed binary tree.

A node (low, high) stands for micro-shards low up to high and splits at (low + high) // 2; the root is (0, M). A worker
computes a contiguous range of micro-shards and folds them, while they finish, into the largest nodes inside its range:
O(log M) vectors. Which these are is a function of (M, world size, world rank), so only the vectors travel. Each world
rank owns a slice of the vector and folds the nodes of all workers; floating-point sums are not associative, and every
addition here is one that the tree names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from everstep.training.group import Group

Node = tuple[int, int]  # micro-shards low (inclusive) to high (exclusive)


def share(micro_shards: int, world_size: int, world_rank: int) -> range:
    """Return the micro-shards that `world_rank` computes: contiguous, sizes at most one apart."""
    return range(micro_shards * world_rank // world_size, micro_shards * (world_rank + 1) // world_size)


def nodes_of(span: range, micro_shards: int) -> list[Node]:
    """Return the largest nodes that lie inside `span`, from left to right: together exactly its micro-shards."""

    def visit(low: int, high: int) -> list[Node]:
        if high <= span.start or span.stop <= low:
            return []
        if span.start <= low and high <= span.stop:
            return [(low, high)]
        middle = (low + high) // 2
        return visit(low, middle) + visit(middle, high)

    return visit(0, micro_shards)


def is_node(low: int, high: int, micro_shards: int) -> bool:
    """Whether (low, high) is a node of the tree over `micro_shards`."""
    left, right = 0, micro_shards
    while (left, right) != (low, high):
        middle = (left + right) // 2
        if high <= middle:
            right = middle
        elif low >= middle:
            left = middle
        else:
            return False
    return True


class Sums:
    """Adjoining nodes and their sums, folded as soon as both halves of a node are there.

    Args:
        micro_shards: leaves of the tree.

    Attributes:
        nodes: the nodes held, from left to right; after a whole range has been added, `nodes_of` that range.
        vectors: the sum of each, (n,).
    """

    def __init__(self, micro_shards: int) -> None:
        self.micro_shards = micro_shards
        self.nodes: list[Node] = []
        self.vectors: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []

    def clear(self) -> None:
        """Hold nothing; the memory is kept for `spare`."""
        self._free += self.vectors
        self.nodes, self.vectors = [], []

    def spare(self, size: int, device: torch.device) -> torch.Tensor:
        """Return an fp32 vector (size,) of any values, to be filled and added; one size and device for each object."""
        return self._free.pop() if self._free else torch.empty(size, device=device)

    def add(self, node: Node, vector: torch.Tensor) -> None:
        """Take over `vector` (n,), the sum of `node`, which begins where the last one ends."""
        assert not self.nodes or self.nodes[-1][1] == node[0], (self.nodes, node)
        self.nodes.append(node)
        self.vectors.append(vector)
        while len(self.nodes) > 1 and is_node(self.nodes[-2][0], self.nodes[-1][1], self.micro_shards):
            right, (_, high) = self.vectors.pop(), self.nodes.pop()
            self.vectors[-1] += right
            self.nodes[-1] = (self.nodes[-1][0], high)
            self._free.append(right)


def combine(rows: torch.Tensor, nodes: Sequence[Node], micro_shards: int) -> torch.Tensor:
    """Return the sum (n,) of the root.

    Args:
        rows: (len(nodes), n), overwritten.
        nodes: the node of each row, from left to right; together all micro-shards.
        micro_shards: leaves of the tree.
    """
    sums = Sums(micro_shards)
    for node, row in zip(nodes, rows, strict=True):
        sums.add(node, row)
    assert sums.nodes == [(0, micro_shards)], sums.nodes
    return sums.vectors[0]


def tree_reduce(vectors: Sequence[torch.Tensor], micro_shards: int, group: Group, out: torch.Tensor) -> int:
    """Sum over all micro-shards in tree order, with the same bits on every worker and at any world size.

    An all-to-all brings each world rank its slice of every node, an all-gather its sum to everybody. `out` is written
    when both are over, and no collective ever holds memory that is used again.

    Args:
        vectors: (n,) each: the sums of `nodes_of` this worker's share; at least one.
        micro_shards: leaves of the tree; at least one a worker.
        group: the process group.
        out: (n,), takes the sum.

    Returns:
        Bytes sent by all workers together.

    Raises:
        Interruption: the group broke; `out` is as it was.
    """
    size, length = group.world_size, out.numel()
    nodes = [nodes_of(share(micro_shards, size, rank), micro_shards) for rank in range(size)]
    assert len(vectors) == len(nodes[group.world_rank]) > 0, (len(vectors), nodes[group.world_rank])
    chunk = -(-length // size)  # the last slices may be shorter, or empty
    slices = [slice(min(rank * chunk, length), min((rank + 1) * chunk, length)) for rank in range(size)]
    widths = [part.stop - part.start for part in slices]
    own = widths[group.world_rank]
    outgoing = torch.cat([vector[part] for part in slices for vector in vectors])
    incoming = group.all_to_all(outgoing, [len(vectors) * n for n in widths], [len(held) * own for held in nodes])
    every = [node for held in nodes for node in held]
    summed = combine(incoming.view(len(every), own), every, micro_shards)
    padded = summed if own == chunk else torch.cat([summed, summed.new_zeros(chunk - own)])
    for part, width, gathered in zip(slices, widths, group.all_gather(padded), strict=True):
        out[part] = gathered[:width]
    scattered = sum(len(held) * (length - width) for held, width in zip(nodes, widths, strict=True))
    return (scattered + size * (size - 1) * chunk) * out.element_size()
