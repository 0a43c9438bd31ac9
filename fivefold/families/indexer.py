"""The sizes of the indexers of sparse attention, which choose the tokens that each token attends to.

DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1. An indexer scores all tokens before one, and the `top_k`
with the largest scores are attended to: all of them, where a sequence is not longer. Attention is then dense, and
nothing depends on an indexer's weights. They are neither loaded nor trained, and folders that are written have them
unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

_SCALE_BYTES = 4
"""Bytes of the scale that servers keep with each key of an indexer, whose channels they keep in one byte."""


@dataclass(frozen=True)
class Indexer:
    """Sizes of the indexers of a model."""

    query_rank: int
    """Rank of attention's queries, of whose latents indexers make theirs."""
    n_heads: int
    dim: int
    """Width of a query head, and of the key that all heads share."""
    top_k: int
    """Tokens that a token attends to at most."""
    layers: tuple[bool, ...]
    """Which layers have one, one entry a layer; the others attend to what the last one before them has chosen."""

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of one indexer's tensors."""
        return {
            "wq_b.weight": (self.n_heads * self.dim, self.query_rank),
            "wk.weight": (self.dim, hidden),
            "k_norm.weight": (self.dim,),
            "k_norm.bias": (self.dim,),
            "weights_proj.weight": (self.n_heads, hidden),
        }

    def parameters(self, hidden: int) -> int:
        """Return the parameters of all indexers."""
        return sum(self.layers) * sum(map(prod, self.tensors(hidden).values()))

    def cache_bytes(self, n_tokens: int) -> int:
        """Return the bytes of the keys that a server keeps of a sequence, in all layers."""
        return n_tokens * sum(self.layers) * (self.dim + _SCALE_BYTES)
