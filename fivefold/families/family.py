"""What a model family is: one object that says everything that is special to it.

    config.json ──Family.read──> ModelShape          planning, engines
    tensor names of Hugging Face files                bridge, rollout
    names of the GGUF architecture                    convert

A new family is a file in this folder that makes a `Family`, and a line in `registry.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape

BODY = "model."
"""What precedes the names of a language model's tensors in transformers."""
FURTHER = "mtp."
"""What precedes the names of tensors for multi-token prediction, in files that do not have them as further layers."""


@dataclass(frozen=True)
class MLPNames:
    """Names of a gated MLP's weights, relative to the layer."""

    gate: str = "mlp.gate_proj.weight"
    up: str = "mlp.up_proj.weight"
    down: str = "mlp.down_proj.weight"


@dataclass(frozen=True)
class JointNames:
    """Names of experts' tensors that files hold once for all experts, with the expert as a further first dimension.

    Weights are [in, out], and gate and up alternate among the channels of one projection.
    """

    gate_up: str = "mlp.experts.{expert}.gate_up_proj"
    gate_up_bias: str = "mlp.experts.{expert}.gate_up_proj_bias"
    down: str = "mlp.experts.{expert}.down_proj"
    down_bias: str = "mlp.experts.{expert}.down_proj_bias"


@dataclass(frozen=True)
class MoENames:
    """Names of a mixture-of-experts layer's weights, relative to the layer; the experts' have an `{expert}` field."""

    router: str = "mlp.gate.weight"
    router_in_memory: str = "mlp.gate"
    """What transformers calls the router itself."""
    expert: MLPNames = MLPNames(
        gate="mlp.experts.{expert}.gate_proj.weight",
        up="mlp.experts.{expert}.up_proj.weight",
        down="mlp.experts.{expert}.down_proj.weight",
    )
    joint: JointNames | None = None
    """Names of the experts' tensors in the place of `expert`; None: each expert has its own tensors in files."""
    are_fused: bool = False
    """Whether folders have the matrices of `expert` of a layer in two tensors for all experts: gate with up
    [E, in, 2 x out], and down [E, in, out]. Each is read and trained on its own all the same."""
    shift: str | None = None
    """Bias of the router's logits."""
    bias: str | None = None
    """Offsets of the experts' scores."""
    bias_in_memory: str = "mlp.gate.e_score_correction_bias"
    """What transformers calls them."""
    shared: MLPNames | None = None
    shared_gate: str | None = None


@dataclass(frozen=True)
class GGUFArchitecture:
    """How GGUF files hold a family's models."""

    name: str
    """`general.architecture`, which is also the prefix of the architecture's metadata keys."""
    class_name: str
    """The class of transformers that a config names under `architectures`."""
    rotates_neighbours: bool = False
    """Whether the rows of Q and K are stored for rotating neighbouring rows, instead of rows half a head apart."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Metadata keys without their prefix, in addition to all architectures' -> the keys of config.json they fill."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that GGUF has no word for."""


@dataclass(frozen=True)
class Family:
    """One model family. The defaults of the names are Llama's, which most others kept."""

    model_type: str
    """`model_type` of the config.json."""
    read: Callable[[HFConfig], ModelShape]
    """Reads the shape; raises ValueError for a feature that Fivefold does not implement."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json keys that may be left out, where they differ from most families' values."""
    mlp: MLPNames = MLPNames()
    moe: MoENames | None = None
    """None where no layer has experts."""
    ignored: tuple[tuple[str, str], ...] = (
        (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", "rotary frequencies are computed from the config"),
    )
    """Tensors that files may hold and loading need not use: (regular expression of the whole name, reason)."""
    inner_type: str | None = None
    """`model_type` of the config of the language model, where this is inside another model's; None: it is not."""
    body: str = BODY
    """What precedes the names of all tensors but the output layer's, in files; transformers' is `model.` in memory."""
    kept: tuple[str, ...] = ()
    """Tensors of parts that are not trained, which a folder that is written has unchanged: regular expressions."""
    sees: bool = False
    """Whether its models have a vision tower."""
    tower: str = "model.visual."
    """What precedes the names of a vision tower's tensors in files."""
    predicts_further: bool = False
    """Whether files may hold layers behind the last one, for multi-token prediction, which are kept as they are."""
    computed_as: str | None = None
    """`model_type` of a model of transformers that computes the same with the tensors that are not kept; None: of the
    family's own."""
    gguf: GGUFArchitecture | None = None
    """None where GGUF files are not converted."""

    def in_files(self, name: str) -> str:
        """Return the name in files of a tensor that transformers' language model calls `name`."""
        return self.body + name.removeprefix(BODY) if name.startswith(BODY) else name

    def in_memory(self, name: str) -> str:
        """Return what transformers' language model calls a tensor of files."""
        return BODY + name.removeprefix(self.body) if name.startswith(self.body) else name

    def keeps(self, name: str, n_layers: int) -> bool:
        """Return whether a tensor in files of a model of `n_layers` layers is kept and not trained."""
        return self.is_further(name, n_layers) or any(re.fullmatch(pattern, name) for pattern in self.kept)

    @property
    def may_predict_further(self) -> bool:
        """Whether files may hold tensors for multi-token prediction."""
        return self.predicts_further or any(pattern.startswith(re.escape(FURTHER)) for pattern in self.kept)

    def is_further(self, name: str, n_layers: int) -> bool:
        """Return whether a tensor of files is for multi-token prediction: under `mtp.`, or of a layer behind the last
        one."""
        if name.startswith(FURTHER):
            return any(re.fullmatch(pattern, name) for pattern in self.kept)
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return self.predicts_further and layer is not None and int(layer[1]) >= n_layers
