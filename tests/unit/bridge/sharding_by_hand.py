"""Megatron-Core's parameters of one rank, cut out of Hugging Face tensors by loops over heads, experts and rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """A layout of 8 processes; those that its degrees do not use are replicas."""

    tp: int = 1
    etp: int = 1
    ep: int = 1
    layers: tuple[tuple[int, ...], ...] = ((0, 1, 2),)
    """Layers of each pipeline stage."""

    @property
    def pp(self) -> int:
        return len(self.layers)


LAYOUTS = (
    Layout(tp=2),
    Layout(tp=8),
    Layout(etp=2),
    Layout(ep=4),
    Layout(layers=((0, 1), (2,))),
    Layout(layers=((0,), (1, 2))),
    # Interleaved chunks: the first stage holds the embedding and layers 0 and 2.
    Layout(tp=2, layers=((0, 2), (1,))),
    Layout(tp=2, etp=2, ep=2, layers=((0,), (1, 2))),
    Layout(tp=4, etp=2, ep=4),
    Layout(tp=4, ep=4, layers=((0, 1), (2,))),
)


@dataclass(frozen=True)
class Position:
    tp: int
    etp: int
    ep: int
    pp: int


def shard_by_hand(
    hf: Mapping[str, Tensor], config: Mapping[str, int], layout: Layout, at: Position
) -> dict[str, Tensor]:
    """Return the parameters of the rank at `at`, by Megatron-Core's names with global layer numbers."""
    out: dict[str, Tensor] = {}
    if at.pp == 0:
        out["embedding.word_embeddings.weight"] = vocabulary_rows(hf["model.embed_tokens.weight"], layout.tp, at.tp)
    for layer in layout.layers[at.pp]:
        tensors = {n.split(".", 3)[3]: t for n, t in hf.items() if n.startswith(f"model.layers.{layer}.")}
        for name, tensor in _layer(tensors, config, layout, at).items():
            out[f"decoder.layers.{layer}.{name}"] = tensor
    if at.pp == layout.pp - 1:
        out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if "lm_head.weight" in hf:
            out["output_layer.weight"] = vocabulary_rows(hf["lm_head.weight"], layout.tp, at.tp)
        elif layout.pp > 1:
            out["output_layer.weight"] = vocabulary_rows(hf["model.embed_tokens.weight"], layout.tp, at.tp)
    return {name: tensor.clone() for name, tensor in out.items()}


def vocabulary_rows(table: Tensor, tp: int, rank: int) -> Tensor:
    width = (len(table) + tp - 1) // tp
    zero = torch.zeros_like(table[0])
    return torch.stack([table[i] if i < len(table) else zero for i in range(rank * width, (rank + 1) * width)])


def _layer(hf: Mapping[str, Tensor], config: Mapping[str, int], layout: Layout, at: Position) -> dict[str, Tensor]:
    out = {
        "input_layernorm.weight": hf["input_layernorm.weight"],
        "pre_mlp_layernorm.weight": hf["post_attention_layernorm.weight"],
        "self_attention.linear_qkv.weight": _qkv(hf, "weight", config, layout.tp, at.tp),
        "self_attention.linear_proj.weight": _columns(hf["self_attn.o_proj.weight"], layout.tp, at.tp),
    }
    if "self_attn.q_proj.bias" in hf:
        out["self_attention.linear_qkv.bias"] = _qkv(hf, "bias", config, layout.tp, at.tp)
    if "self_attn.q_norm.weight" in hf:
        out["self_attention.q_layernorm.weight"] = hf["self_attn.q_norm.weight"]
        out["self_attention.k_layernorm.weight"] = hf["self_attn.k_norm.weight"]
    names = {re.sub(r"block_sparse_moe", "mlp", name): tensor for name, tensor in hf.items()}
    for w, name in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        names = {name_.replace(f".{w}.", f".{name}."): tensor for name_, tensor in names.items()}
    if "mlp.gate_proj.weight" in names:
        out |= _mlp("mlp", names, "mlp", layout.tp, at.tp)
    if "mlp.gate.weight" in names:
        out["mlp.router.weight"] = names["mlp.gate.weight"]
        out |= _experts(names, layout, at)
    if "mlp.shared_expert_gate.weight" in names:
        out |= _mlp("mlp.shared_experts", names, "mlp.shared_expert", layout.tp, at.tp)
        out["mlp.shared_experts.gate_weight"] = names["mlp.shared_expert_gate.weight"]
    return out


def _qkv(hf: Mapping[str, Tensor], kind: str, config: Mapping[str, int], tp: int, rank: int) -> Tensor:
    n_kv, dim = config["num_key_value_heads"], config["head_dim"]
    per_group = config["num_attention_heads"] // n_kv
    q, k, v = (hf[f"self_attn.{letter}_proj.{kind}"].split(dim) for letter in "qkv")
    rows = []
    for head in range(rank * n_kv // tp, (rank + 1) * n_kv // tp):
        rows += [*q[head * per_group : (head + 1) * per_group], k[head], v[head]]
    return torch.cat(rows)


def _rows(weight: Tensor, size: int, rank: int) -> Tensor:
    return weight.tensor_split(size, dim=0)[rank]


def _columns(weight: Tensor, size: int, rank: int) -> Tensor:
    return weight.tensor_split(size, dim=1)[rank]


def _mlp(name: str, hf: Mapping[str, Tensor], hf_name: str, size: int, rank: int) -> dict[str, Tensor]:
    gate, up, down = (hf[f"{hf_name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return {
        f"{name}.linear_fc1.weight": torch.cat([_rows(gate, size, rank), _rows(up, size, rank)]),
        f"{name}.linear_fc2.weight": _columns(down, size, rank),
    }


def _experts(hf: Mapping[str, Tensor], layout: Layout, at: Position) -> dict[str, Tensor]:
    n_local = sum(name.endswith("down_proj.weight") and ".experts." in name for name in hf) // layout.ep
    mlps = [
        _mlp("expert", hf, f"mlp.experts.{expert}", layout.etp, at.etp)
        for expert in range(at.ep * n_local, (at.ep + 1) * n_local)
    ]
    return {
        "mlp.experts.weight1": torch.stack([mlp["expert.linear_fc1.weight"] for mlp in mlps]),
        "mlp.experts.weight2": torch.stack([mlp["expert.linear_fc2.weight"] for mlp in mlps]),
    }
