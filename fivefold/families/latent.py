"""The sizes of multi-head latent attention."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (MLA): queries, and keys with values, pass through narrow projections.

    DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1. Megatron-Core keeps the projections down to a rank whole
    on every tensor parallel rank, and splits those up to the heads.
    """

    query_rank: int | None
    """Rank of the queries; None: one projection makes them of the hidden state."""
    kv_rank: int
    nope_dim: int
    """Width of a head's queries and keys without position."""
    rope_dim: int
    """Width of the part with position; all heads share its key."""
    value_dim: int
    rotates_neighbours: bool = True
    """Whether neighbouring channels of the part with position turn together, instead of channels half of it apart."""
    score_factor: float = 1.0
    """Factor of the attention scores, besides 1 / sqrt(qk_dim)."""

    @property
    def qk_dim(self) -> int:
        """Width of one query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of the latents of a token, including its queries' latents."""
        return (self.query_rank or 0) + self.kv_rank

    @property
    def shared_dim(self) -> int:
        """Width of what the keys and values of all heads are made of: a latent, and the key with position."""
        return self.kv_rank + self.rope_dim

    @property
    def score_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return self.score_factor / math.sqrt(self.qk_dim)

    def down_parameters(self, hidden: int) -> int:
        """Return the weights of one layer's projections down to the ranks."""
        return hidden * (self.latent_dim + self.rope_dim)

    def up_parameters(self, hidden: int, n_heads: int) -> int:
        """Return the weights of one layer's projections up to the heads."""
        return n_heads * (self.query_rank or hidden) * self.qk_dim + self.key_value_parameters(n_heads)

    def key_value_parameters(self, n_heads: int) -> int:
        """Return the weights of one layer that make keys and values of latents."""
        return n_heads * self.kv_rank * (self.nope_dim + self.value_dim)
