"""Gated delta nets (Yang et al. 2024, https://arxiv.org/abs/2412.06464): their sizes, in a `config.json` and alone.

A head keeps a state S [key channels, value channels] in place of the keys and values of all tokens:

    S <- exp(decay) S + beta k (v - exp(decay) S^T k)^T          output = S^T q

Queries, keys and values pass through a short convolution over the tokens, each channel by itself, and the output
through a norm and a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.families.hf_config import HFConfig

CHUNK = 64
"""Tokens that the engines compute together (`fivefold.engine.kernels.delta_rule`)."""


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of a gated delta net. A key head serves as many value heads as there are for each."""

    n_key_heads: int
    """Heads of queries and keys."""
    n_value_heads: int
    key_dim: int
    """Width of a query or key head."""
    value_dim: int
    kernel: int
    """Tokens that the convolution sees."""
    is_grouped: bool
    """Whether files hold two projections whose rows are grouped by key head, instead of four by what they make."""

    @property
    def key_width(self) -> int:
        """Channels of all key heads."""
        return self.n_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Channels of all value heads."""
        return self.n_value_heads * self.value_dim

    @property
    def convolved_width(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def input_width(self) -> int:
        """Channels of the projection of a token: queries, keys, values, output gates, and two numbers a value head."""
        return self.convolved_width + self.value_width + 2 * self.n_value_heads

    @property
    def state_elements(self) -> int:
        """Elements that generation keeps for a sequence in one layer, whatever its length."""
        return self.n_value_heads * self.key_dim * self.value_dim + self.kernel * self.convolved_width

    @property
    def flops(self) -> int:
        """FLOPs of the recurrence of a token: the state is read for the key, changed, and read for the query."""
        return 6 * self.n_value_heads * self.key_dim * self.value_dim

    def projection_weights(self, hidden: int) -> int:
        """Return the weights of one layer that are matrices."""
        return hidden * (self.input_width + self.value_width)

    def split_parameters(self, hidden: int) -> int:
        """Return the parameters of one layer that tensor parallelism divides: all but the output's norm."""
        return self.projection_weights(hidden) + self.kernel * self.convolved_width + 2 * self.n_value_heads


def read_delta_net(config: HFConfig, *, is_grouped: bool) -> DeltaNet:
    """Return the sizes of the gated delta net in a config.json; `is_grouped` as in `DeltaNet`.

    Raises:
        ValueError: a key that is missing or inconsistent.
    """
    sizes = DeltaNet(
        n_key_heads=config.integer("linear_num_key_heads"),
        n_value_heads=config.integer("linear_num_value_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim"),
        is_grouped=is_grouped,
    )
    if sizes.n_value_heads % sizes.n_key_heads:
        raise config.error(
            f"linear_num_value_heads={sizes.n_value_heads} is not a multiple of "
            f"linear_num_key_heads={sizes.n_key_heads}, so the value heads cannot be grouped"
        )
    return sizes


def read_delta_layers(config: HFConfig, n_layers: int) -> tuple[bool, ...]:
    """Return which layers are gated delta nets; the others have full attention.

    Raises:
        ValueError: another kind of layer, none with attention, or not one kind a layer.
    """
    kinds = config.items("layer_types", str)
    if not kinds:
        interval = config.integer("full_attention_interval")
        kinds = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(n_layers)]
    if strays := sorted(set(kinds) - {"linear_attention", "full_attention"}):
        raise config.error(
            f"layer_types has {', '.join(strays)}; only linear_attention and full_attention are supported"
        )
    if len(kinds) != n_layers:
        raise config.error(f"layer_types has {len(kinds)} entries for num_hidden_layers={n_layers}")
    if "full_attention" not in kinds:
        raise config.error("layer_types has no full_attention; a model of gated delta nets alone is not supported")
    return tuple(kind == "linear_attention" for kind in kinds)
