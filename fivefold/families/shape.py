"""The shape of a model: its sizes, the features that its weights depend on, and the widths and counts that follow.

    config.json ──fivefold.families.read──> ModelShape ──> layouts, memory, time, weight names

The families share one skeleton (RMSNorm, rotary positions, attention with grouped or latent keys and values, SwiGLU
MLPs, some of them mixtures of experts) and differ in the fields below.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from fivefold.config.paths import user_path
from fivefold.config.schema.engine import TrainedModelConfig
from fivefold.config.schema.lora import LoraConfig
from fivefold.config.schema.role import Head
from fivefold.families.adapters import AdapterShape
from fivefold.families.delta_net import DeltaNet
from fivefold.families.indexer import Indexer
from fivefold.families.latent import LatentAttention
from fivefold.families.rope_scaling import RopeScaling
from fivefold.families.vision import VisionShape
from fivefold.types import MOST_IN_A_BYTE

LayerKind = Literal["full", "window", "latent", "delta"]
"""How a layer mixes tokens: attention with keys and values of every token, the same of the last tokens alone (a sliding
window), of every token and made of latents (MLA), or a state of fixed size (a gated delta net)."""


class LayerSort(NamedTuple):
    """What layers of a model may differ in; layers of one sort cost the same."""

    is_delta: bool
    """Whether it is a gated delta net, and not attention."""
    is_moe: bool


@dataclass(frozen=True)
class ModelShape:
    """Everything that layouts, memory and weight names need to know of a model. Sizes are unpadded."""

    family: str
    """`model_type` of the config.json, which is the family's key in `fivefold.families.registry`."""
    n_layers: int
    hidden: int
    n_heads: int
    """Query heads."""
    n_kv_heads: int
    """Key/value heads (grouped-query attention)."""
    head_dim: int
    """Width of a query or key head."""
    ffn_hidden: int
    """Width of a dense MLP; unused if every layer is MoE."""
    vocab: int
    max_positions: int
    n_experts: int
    """Routed experts of an MoE layer; 0 for a dense model."""
    top_k: int
    """Experts that a token visits."""
    expert_ffn_hidden: int
    shared_expert_ffn_hidden: int
    """Width of the expert that every token visits; 0 where there is none."""
    moe_layers: tuple[bool, ...]
    """Which layers are MoE, one entry a layer."""
    norm_topk_prob: bool
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    qkv_bias: bool
    qk_norm: bool
    """Whether there are RMSNorms on queries and keys: on each head, unless they are wide."""
    tied_embeddings: bool
    """Whether the output layer is the embedding."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    shared_expert_gate: bool = False
    """Whether a sigmoid gate scales the shared expert; else it is added as it is."""
    router_bias: bool = False
    """Whether the router has an offset for each expert, which balances their load. It counts for the choice alone."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """What turns the router's logits into scores; `sigmoid` scores of the chosen experts are scaled to sum to 1."""
    router_scale: float = 1.0
    """Factor of the chosen experts' weights, after that."""
    expert_groups: int = 1
    """Equal groups into which the experts are divided."""
    groups_per_token: int = 1
    """Groups of experts that a token may visit: those whose best experts have the largest scores."""
    group_best: int = 2
    """Best experts of a group whose scores are added to rank it."""
    wide_qk_norm: bool = False
    """Whether the norms on queries and keys are over all heads together, in place of each."""
    rotary_dim: int | None = None
    """Channels of a head that rotary positions turn, the first ones; None: all."""
    latent: LatentAttention | None = None
    """Sizes of multi-head latent attention; None for grouped-query attention."""
    indexer: Indexer | None = None
    """Sizes of the indexers that choose the tokens which latent attention sees; None: it sees all."""
    delta: DeltaNet | None = None
    """Sizes of the layers that are gated delta nets; None: there are none."""
    delta_layers: tuple[bool, ...] = ()
    """Which layers are gated delta nets, one entry a layer; empty: none."""
    window: int | None = None
    """Tokens that each token sees in layers with a sliding window, itself among them; None: no layer has one."""
    window_layers: tuple[bool, ...] = ()
    """Which layers have a sliding window, one entry a layer; empty: none."""
    sinks: bool = False
    """Whether each query head has a score, trained, to which attention may give weight in the place of any token."""
    output_bias: bool = False
    """Whether attention's output projection has a bias."""
    expert_clamp: float | None = None
    """Limit of GPT-OSS's clamped activation, whose experts have biases, and alternating channels of gate and up; None:
    experts are SwiGLU without biases."""
    router_shift: bool = False
    """Whether the router's logits have a bias, which is trained."""
    output_gate: bool = False
    """Whether sigmoid gates, which the projection of the queries makes, scale the channels of attention's output."""
    local_rope_theta: float | None = None
    """Theta of the rotary positions in layers with a sliding window, which are not scaled; None: as in other layers."""
    score_scale: float | None = None
    """What the products of queries and keys are multiplied by; None: 1 / sqrt(their width)."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by sqrt(hidden) before the first layer."""
    sandwich_norms: bool = False
    """Whether there are norms on the outputs of attention and MLP too, before they are added to the residual stream."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """The activation of gates in MLPs."""
    zero_centered_norms: bool = False
    """Whether the norms of layers, query and key heads, and the last one multiply by 1 + weight."""
    vision: VisionShape | None = None
    """The vision tower of a model that sees images; None: it reads text alone."""
    value_head: bool = False
    """Whether the output layer has one row, whose product is the value of a state, instead of logits."""
    value_bias: bool = True
    """Whether a value head has a bias: a critic's has one, a reward model's none."""
    adapters: AdapterShape | None = None
    """Low-rank adapters on its linear layers; None: it has none."""
    frozen: tuple[str, ...] = ()
    """Patterns of the names of weights that are not trained; with adapters, none of the weights is."""
    name: str = field(default="", compare=False)
    """What tables and pictures call the model; empty where it has no name."""

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return any(self.moe_layers)

    @property
    def n_moe_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.moe_layers)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """How each layer mixes tokens."""
        own: LayerKind = "full" if self.latent is None else "latent"
        if self.window_layers:
            return tuple("window" if has_window else own for has_window in self.window_layers)
        return tuple("delta" if is_delta else own for is_delta in self.delta_layers) or (own,) * self.n_layers

    @cached_property
    def layer_sorts(self) -> tuple[LayerSort, ...]:
        """The sort of each layer."""
        kinds = zip(self.layer_kinds, self.moe_layers, strict=True)
        return tuple(LayerSort(kind == "delta", is_moe) for kind, is_moe in kinds)

    @property
    def n_delta_layers(self) -> int:
        """Layers that are gated delta nets."""
        return sum(self.delta_layers)

    @property
    def n_attention_layers(self) -> int:
        """Layers that attend to keys and values of tokens."""
        return self.n_layers - self.n_delta_layers

    @property
    def n_window_layers(self) -> int:
        """Those among them that have a sliding window."""
        return sum(self.window_layers)

    @property
    def most_tokens(self) -> int:
        """Most tokens of a sequence: the model's positions, or the tokens that an indexer chooses."""
        return self.max_positions if self.indexer is None else min(self.max_positions, self.indexer.top_k)

    @property
    def limit(self) -> str:
        """What gives it so many, as the end of a sentence about the model."""
        if self.indexer is None or self.most_tokens == self.max_positions:
            return f"has {self.max_positions} positions"
        return f"is computed for up to index_topk={self.most_tokens} tokens, where its attention is dense"

    @property
    def route_bytes(self) -> int:
        """Bytes of a token's routes: its experts in all layers."""
        return self.n_moe_layers * self.top_k * (1 if self.n_experts <= MOST_IN_A_BYTE else 2)

    def trained_by(self, config: TrainedModelConfig | None) -> ModelShape:
        """Return the shape of this model as a recipe trains it, with its head; None: it is not trained."""
        if config is None:
            return replace(self, adapters=None, frozen=())
        return replace(self.with_lora(config.lora), frozen=tuple(config.freeze))

    def with_lora(self, config: LoraConfig | None) -> ModelShape:
        """Return the shape of this model with the adapters of a recipe; None: it has none."""
        if config is None:
            return replace(self, adapters=None)
        expert_rank = config.rank_of_experts or max(1, config.rank // max(1, self.top_k))
        adapters = AdapterShape(
            rank=config.rank,
            expert_rank=None if config.experts == "none" else expert_rank,
            shares_outer=config.experts == "shared_outer",
            alpha=config.alpha,
            rank_stabilized=config.use_rslora,
            targets=tuple(config.targets),
            dropout=config.dropout,
            init=config.init,
            path=None if config.path is None else str(user_path(config.path).resolve()),
        )
        return replace(self, adapters=adapters)

    @property
    def adapted(self) -> str:
        """What the adapters are, as a text: `rank 32, 4 of each expert, on q_proj, v_proj`."""
        adapters = self.adapters
        if adapters is None:
            return "no adapters"
        experts = f", {adapters.expert_rank} of each expert" if self.is_moe and adapters.expert_rank else ""
        experts += ", outer matrices shared" if experts and adapters.shares_outer else ""
        layers = "" if adapters.targets == ("*",) else f", on {', '.join(adapters.targets)}"
        return f"rank {adapters.rank}{experts}{layers}"

    def with_head(self, head: Head) -> ModelShape:
        """Return the shape of this model with another last layer; a head in weight files is taken to have no bias."""
        shapes = {"value": self.as_critic, "score": self.as_reward_model, "stored": self.as_reward_model}
        return shapes[head]() if head in shapes else self

    def as_critic(self, *, has_bias: bool = True) -> ModelShape:
        """Return the shape of this model with a value head in place of its output layer."""
        return replace(self, value_head=True, value_bias=has_bias, tied_embeddings=False)

    def as_reward_model(self) -> ModelShape:
        """Return the shape of this model with a value head without bias in place of its output layer."""
        return self.as_critic(has_bias=False)

    # Widths

    @property
    def output_rows(self) -> int:
        """Rows of the output layer: the vocabulary, or the one of a value head."""
        return 1 if self.value_head else self.vocab

    @property
    def output_biases(self) -> int:
        """Biases of the output layer: the one of a critic's value head."""
        return int(self.value_head and self.value_bias)

    @property
    def query_width(self) -> int:
        """Channels of all query heads."""
        return self.n_heads * self._qk_dim

    @property
    def query_rows(self) -> int:
        """Rows of the projection that makes the queries, and the gates of attention's output where there are such."""
        return self.query_width * (2 if self.output_gate else 1)

    @property
    def key_width(self) -> int:
        """Channels of all key heads, as attention sees them."""
        return self.n_kv_heads * self._qk_dim

    @property
    def value_width(self) -> int:
        """Channels of all value heads."""
        return self.n_kv_heads * self._value_dim

    @property
    def output_width(self) -> int:
        """Channels of attention's output, before the output projection."""
        return self.n_heads * self._value_dim

    @property
    def head_widths(self) -> tuple[int, int]:
        """Channels of a query or key head, and channels of a value head."""
        return self._qk_dim, self._value_dim

    @property
    def _qk_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.qk_dim

    @property
    def _value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotated_channels(self) -> int:
        """Channels of a head that rotary positions turn."""
        return self.latent.rope_dim if self.latent is not None else self.rotary_dim or self.head_dim

    def kv_cache_elements(self, n_tokens: int) -> int:
        """Return the elements that generation keeps for a sequence, in all layers. MLA keeps its latent, which the
        heads share; a layer with a sliding window keeps the tokens in it.
        """
        if self.latent is not None:
            return n_tokens * self.n_attention_layers * self.latent.shared_dim
        kept = n_tokens * (self.n_attention_layers - self.n_window_layers)
        kept += min(n_tokens, self.window or 0) * self.n_window_layers
        return kept * (self.key_width + self.value_width)

    @property
    def state_elements(self) -> int:
        """Elements that generation keeps for a sequence whatever its length, in all gated delta nets."""
        return self.n_delta_layers * self.delta.state_elements if self.delta is not None else 0

    # Parameters of one layer

    def mixer_parameters(self, kind: LayerKind) -> int:
        """Return the parameters of one layer that mix tokens: projections, their biases, and norms inside."""
        return self.split_mixer_parameters(kind) + self.whole_mixer_parameters(kind)

    def split_mixer_parameters(self, kind: LayerKind) -> int:
        """Return those that tensor parallelism divides."""
        if kind == "delta":
            return self._delta.split_parameters(self.hidden)
        output = self.output_width * self.hidden
        if self.latent is not None:
            return self.latent.up_parameters(self.hidden, self.n_heads) + output
        heads = self.query_width + self.key_width if self.wide_qk_norm else 0
        heads += self.n_heads * self.sinks
        return (self.hidden + self.qkv_bias) * (self.query_rows + self.key_width + self.value_width) + output + heads

    def whole_mixer_parameters(self, kind: LayerKind) -> int:
        """Return those that every tensor parallel rank has: norms, and MLA's projections down."""
        if kind == "delta":
            return self._delta.value_dim
        if self.latent is not None:
            return self.latent.down_parameters(self.hidden) + self.latent.latent_dim
        norms = 2 * self.head_dim if self.qk_norm and not self.wide_qk_norm else 0
        return norms + self.hidden * self.output_bias

    def projection_weights(self, kind: LayerKind) -> int:
        """Return the weights of one layer that mix tokens and are matrices: neither norms, biases nor convolutions."""
        if kind == "delta":
            return self._delta.projection_weights(self.hidden)
        if self.latent is not None:
            return self.mixer_parameters(kind) - self.latent.latent_dim  # a norm has a weight for each channel
        return self.hidden * (self.query_rows + self.key_width + self.value_width + self.output_width)

    @property
    def all_projection_weights(self) -> int:
        """The same of all layers."""
        return sum(self.projection_weights(kind) for kind in self.layer_kinds)

    def mixer_shares(self, layers: Collection[int]) -> tuple[float, float]:
        """Return what some layers have of all projections that mix tokens, and of all attention.

        Gated delta nets count nothing as attention: their recurrence is little next to it.
        """
        kinds = [self.layer_kinds[layer] for layer in layers]
        weights = sum(self.projection_weights(kind) for kind in kinds)
        n_attention = sum(kind != "delta" for kind in kinds)
        return weights / self.all_projection_weights, n_attention / self.n_attention_layers

    @property
    def layer_matrix_weights(self) -> int:
        """Weights of all layers that are matrices of projections, MLPs and experts, but not of routers."""
        experts = self.n_experts * self.expert_parameters + self.shared_expert_parameters
        mlps = self.n_moe_layers * experts + (self.n_layers - self.n_moe_layers) * self.dense_mlp_parameters
        return self.all_projection_weights + mlps

    @property
    def _delta(self) -> DeltaNet:
        assert self.delta is not None, "a layer is a gated delta net, and its sizes are not given"
        return self.delta

    @property
    def dense_mlp_parameters(self) -> int:
        """Parameters of one dense MLP: gate, up and down projections."""
        return 3 * self.hidden * self.ffn_hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert: gate, up and down projections, and their biases where there are such."""
        biases = 0 if self.expert_clamp is None else 2 * self.expert_ffn_hidden + self.hidden
        return 3 * self.hidden * self.expert_ffn_hidden + biases

    @property
    def shared_expert_parameters(self) -> int:
        """Parameters of one layer's shared expert, without its gate."""
        return 3 * self.hidden * self.shared_expert_ffn_hidden

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router, its biases and offsets, and the shared expert's gate, if there are such."""
        of_router = self.n_experts * (self.hidden + self.router_bias + self.router_shift)
        return of_router + self.hidden * self.shared_expert_gate

    @property
    def further_layer_parameters(self) -> int:
        """Parameters of a layer for multi-token prediction, which is like the last layer, with a projection that joins
        two inputs, and norms of these and of the output.
        """
        mlp = self._moe_parameters(self.n_experts) if self.moe_layers[-1] else self.dense_mlp_parameters
        return self.mixer_parameters(self.layer_kinds[-1]) + mlp + (2 * self.hidden + 5) * self.hidden

    # Parameters of the whole model

    @property
    def n_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        return self._parameters(self.n_experts)

    @property
    def n_live_parameters(self) -> int:
        """Those among them that are computed with, trained and sent: all but the ones of indexers."""
        return self.n_parameters - (0 if self.indexer is None else self.indexer.parameters(self.hidden))

    @property
    def n_active_parameters(self) -> int:
        """Parameters that one token touches: of the experts, the `top_k` that it visits."""
        return self._parameters(self.top_k)

    def _moe_parameters(self, experts_counted: int) -> int:
        return self.router_parameters + experts_counted * self.expert_parameters + self.shared_expert_parameters

    def _parameters(self, experts_counted: int) -> int:
        moe = self._moe_parameters(experts_counted)
        mlps = self.n_moe_layers * moe + (self.n_layers - self.n_moe_layers) * self.dense_mlp_parameters
        norms = (4 if self.sandwich_norms else 2) * self.hidden
        layers = sum(self.mixer_parameters(kind) + norms for kind in self.layer_kinds)
        layers += 0 if self.indexer is None else self.indexer.parameters(self.hidden)
        output = 0 if self.tied_embeddings else self.output_rows * self.hidden + self.output_biases
        return layers + mlps + self.vocab * self.hidden + output + self.hidden
