"""A task with the shapes of GPT-2 (Radford et al. 2019), in plain torch: 124 million parameters as it stands.

Named in a recipe as `gpt2_shapes:Gpt2`. Deviations: no dropout, and tokens drawn at random, since only the shapes and
the arithmetic matter here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp_proj(F.gelu(self.mlp_fc(self.ln_2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        return F.linear(self.ln_f(self.blocks(x)), self.wte.weight)


class Gpt2:
    """GPT-2 small, or another of its shapes. A batch is a (samples, tokens + 1) tensor of token numbers."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257, context: int = 1024
    ) -> None:
        self.sizes = (layers, width, heads, vocabulary, context)
        self.vocabulary = vocabulary

    def model(self) -> nn.Module:
        return Model(*self.sizes)

    def dataset(self, split: str) -> Any:
        raise NotImplementedError("this task is for measuring; draw batches with `batch`")

    def batch(self, samples: int, tokens: int) -> Tensor:
        return torch.randint(self.vocabulary, (samples, tokens + 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
