"""Low-rank adapters (LoRA: Hu et al. 2022, arXiv 2106.09685) on the linear layers of a model.

    y = W x + scale * B (A x)          W [out, in] is frozen, A [rank, in] and B [out, rank] are trained

Every expert has its own A and B. A linear layer of the experts may have a smaller rank than the others, because several
experts see each token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import sqrt
from typing import Literal, TypeVar

PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's layers."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Files of a folder of adapters."""
Matrix = Literal["A", "B"]
MATRICES: tuple[Matrix, ...] = ("A", "B")
JOINT = ("gate_up_proj", "down_proj")
"""Weights of an expert [in, out], which files hold in one tensor for all experts, and whose names end so (GPT-OSS)."""

T = TypeVar("T")


@dataclass(frozen=True)
class AdapterShape:
    """The adapters of a model."""

    rank: int
    """Rank outside of routed experts."""
    expert_rank: int | None
    """Rank of each routed expert's; None: routed experts have none."""
    alpha: float
    shares_outer: bool = False
    """Whether the experts of a layer share the matrices that see or make hidden states: A of gate and up, B of down."""
    rank_stabilized: bool = False
    """Whether the scale is alpha / sqrt(rank) in place of alpha / rank (Kalajdzievski 2023, arXiv 2312.03732)."""
    targets: tuple[str, ...] = ("*",)
    """Patterns of the names of layers that have adapters, such as `q_proj`."""
    dropout: float = 0.0
    """Probability by which each of an adapter's inputs is 0 in training."""
    init: str = field(default="kaiming", compare=False)
    """How A is drawn (`actor.lora.init`)."""
    path: str | None = field(default=None, compare=False)
    """Folder of adapters to begin with, as PEFT writes it; None: new ones."""

    def rank_of(self, name: str, *, of_expert: bool) -> int | None:
        """Return the rank of the adapter of the weight `name`; None: it has none."""
        layer = layer_of(name)
        if layer is None or not any(fnmatchcase(layer, target) for target in self.targets):
            return None
        return self.expert_rank if of_expert else self.rank

    def scale(self, rank: int) -> float:
        """Return the factor of B A."""
        return self.alpha / (sqrt(rank) if self.rank_stabilized else rank)


def layer_of(name: str) -> str | None:
    """Return the name of the linear layer that a weight belongs to, such as `q_proj`; None: it can have no adapter.

    Routers and the gate of a shared expert have none: they are small, and say where tokens go. Nor have convolutions.
    """
    *path, layer, kind = name.split(".")
    if kind in JOINT and path[-1:] == ["experts"]:
        return kind
    is_linear = (
        "layers" in path and kind == "weight" and not layer.endswith(("gate", "router", "norm", "layernorm", "conv1d"))
    )
    return layer if is_linear else None


def adapter_name(weight: str, matrix: Matrix) -> str:
    """Return the name of a matrix of the adapter of a weight, as PEFT writes it."""
    return f"{weight.removesuffix('.weight')}.lora_{matrix}.weight"


def shared_name(weight: str, matrix: Matrix) -> str:
    """Return the name of a matrix that all experts share, of the adapters of one expert's weight or of a pattern."""
    return adapter_name(re.sub(r"\.experts\.(\d+|\{expert\})\.", ".experts.", weight), matrix)


def find_adapter(known: Mapping[str, T], weight: str, matrix: Matrix) -> T | None:
    """Return what is known of a matrix of a weight's adapter, be it the weight's own or shared; None: nothing."""
    return known.get(adapter_name(weight, matrix), known.get(shared_name(weight, matrix)))
