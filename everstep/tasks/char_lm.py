"""`char_lm`: a small GPT that learns the source text of the Python standard library, byte by byte, without a download.

Pre-norm blocks and GPT-2's initialisation (Radford et al. 2019), with biases, a tied embedding and learned positions.
No dropout inside the attention. Symbols: B sequences, T tokens, d width, h heads, V vocabulary.
"""

from __future__ import annotations

import math
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from everstep.core.errors import SettingsError, TaskError
from everstep.core.registry import nearest
from everstep.tasks.task import TASKS

TRAIN_PART = 0.9


class Shape(NamedTuple):
    """Sizes of one GPT; `block` is the default number of tokens a sample."""

    width: int
    layers: int
    heads: int
    block: int
    vocabulary: int


SIZES = {
    "tiny": Shape(width=64, layers=4, heads=2, block=64, vocabulary=128),
    "1m": Shape(width=128, layers=5, heads=4, block=64, vocabulary=128),
    "10m": Shape(width=320, layers=8, heads=10, block=64, vocabulary=128),
    "50m": Shape(width=640, layers=10, heads=10, block=64, vocabulary=128),
    # The text only ever uses 128 of these; the rest is there so that every tensor has the size it has in GPT-2.
    "gpt2-small": Shape(width=768, layers=12, heads=12, block=1024, vocabulary=50257),
}


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to its input. [B, T, d] -> [B, T, d]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for `x` [B, T, d]."""
        x = x + self.dropout(self._attention(self.norm_attention(x)))
        hidden = F.gelu(self.up(self.norm_mlp(x)), approximate="tanh")
        return x + self.dropout(self.down(hidden))  # type: ignore[no-any-return]  # nn.Module calls are untyped

    def _attention(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [B, h, T, d / h]
        return self.project(mixed.transpose(1, 2).reshape(batch, tokens, width))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Token ids [B, T] -> scores of the next token [B, T, V]."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.block, shape.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[Block(shape.width, shape.heads, dropout) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self._initialise(shape.layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's: normal with deviation 0.02, what is added to the residual stream smaller by sqrt(2 layers)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                scaled = name.endswith(("project.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if scaled else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores [B, T, V] for `ids` [B, T], T at most the block."""
        x = self.dropout(self.token(ids) + self.position.weight[: ids.shape[1]])
        return F.linear(self.norm(self.blocks(x)), self.token.weight)


class Windows(Dataset[Tensor]):
    """Consecutive windows of a text that overlap by one token: item i is the int64 ids of tokens i T .. (i + 1) T.

    Args:
        text: uint8 [number of tokens].
        block: T; an item has T + 1 tokens, so that T of them have a successor.
    """

    def __init__(self, text: Tensor, block: int) -> None:
        self.text, self.block = text, block

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.block)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.block
        return self.text[start : start + self.block + 1].long()


@lru_cache(maxsize=2)
def standard_library_text(files: int) -> Tensor:
    """Return the first `files` modules (by name) of this interpreter's standard library, uint8 ids below 128.

    The same Python version on every node gives the same text; a run over several nodes needs that anyway.

    Raises:
        TaskError: the interpreter came without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(folder.glob("*.py"), key=lambda path: path.name)[:files]
    raw = np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)
    if not len(raw):
        raise TaskError(f"char_lm: no Python sources in {folder}", hint="use an interpreter that has its sources")
    return torch.from_numpy(np.minimum(raw, 127))


@TASKS.register("char_lm")
class CharLM:
    """Predict the next byte of Python source text.

    Args:
        size: "tiny", "1m", "10m" (0.2, 1.0 and 9.9 million parameters) or "gpt2-small" (124 million).
        block: tokens a sample; None is the size's own.
        dropout: probability, after the embedding and after each half of a block.
        files: how many modules of the standard library make up the text; 90 % of it is "train".

    Raises:
        SettingsError: an unknown size or a value out of range.
    """

    def __init__(self, size: str = "tiny", block: int | None = None, dropout: float = 0.1, files: int = 60) -> None:
        if size not in SIZES:
            close = nearest(size, list(SIZES))
            guess = f"did you mean {close!r}? " if close else ""
            raise SettingsError(f"task.size: unknown size {size!r}", hint=f"{guess}sizes: {', '.join(SIZES)}")
        _in_range("block", block is None or block >= 1, block, "at least 1")
        _in_range("dropout", 0 <= dropout < 1, dropout, "from 0 up to, not including, 1")
        _in_range("files", files >= 1, files, "at least 1")
        self.shape = SIZES[size] if block is None else SIZES[size]._replace(block=block)
        self.dropout, self.files = float(dropout), files

    def model(self) -> nn.Module:
        """Return a freshly initialised GPT."""
        return GPT(self.shape, self.dropout)

    def dataset(self, split: str) -> Dataset[Tensor]:
        """Return the windows of the first 90 % ("train") or of the rest ("validation").

        Raises:
            TaskError: another split.
        """
        text = standard_library_text(self.files)
        border = int(len(text) * TRAIN_PART)
        parts = {"train": text[:border], "validation": text[border:]}
        if split not in parts:
            raise TaskError(f"char_lm has no split {split!r}", hint=f"splits: {', '.join(parts)}")
        return Windows(parts[split], self.shape.block)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross entropy in nats a byte; `batch` is int64 [B, T + 1]."""
        scores: Tensor = model(batch[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        """Return `bits_per_char`, the loss in bits."""
        return {"bits_per_char": self.loss(model, batch) / math.log(2)}


def _in_range(option: str, holds: bool, value: Any, allowed: str) -> None:
    if not holds:
        raise SettingsError(f"task.{option} = {value!r} is out of range", hint=f"give a value {allowed}")
