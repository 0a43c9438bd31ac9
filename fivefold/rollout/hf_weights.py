"""A transformers model's parameters under the names that Hugging Face *files* give them.

transformers 5 keeps a layer's experts fused in memory; files, and the tensors that arrive from the actor, keep one
tensor an expert. A file's tensor is then a slice of a parameter:

    file     model.layers.3.mlp.experts.7.gate_proj.weight  [F, H]
    memory   model.layers.3.mlp.experts.gate_up_proj        [E, 2F, H]     slice [7, :F]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_N_NAMED = 8
"""Names spelled out in an error before it counts the rest."""


@dataclass(frozen=True)
class FileTensor:
    """Where the tensor of a file lies in memory."""

    parameter: nn.Parameter
    index: tuple[int | slice, ...] = ()

    def view(self) -> Tensor:
        """The tensor, sharing memory with the parameter."""
        return self.parameter.detach()[self.index] if self.index else self.parameter.detach()


@dataclass(frozen=True)
class _ExpertNames:
    """How a family's files name a mixture-of-experts block and the matrices of one expert."""

    block: str
    gate: str
    up: str
    down: str


_QWEN_EXPERTS = _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
_EXPERT_NAMES = {
    "qwen2_moe": _QWEN_EXPERTS,
    "qwen3_moe": _QWEN_EXPERTS,
    "mixtral": _ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
}


def file_tensors(model: PreTrainedModel) -> dict[str, FileTensor]:
    """Every tensor of the model's file, by name. A tied output layer has none: it is the embedding.

    Raises ValueError for a family whose fused experts have no entry here.
    """
    tensors: dict[str, FileTensor] = {}
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name:
            tensors.update(_split_experts(name, parameter, _expert_names(model)))
        elif model.config.model_type in _EXPERT_NAMES:
            block = f".{_expert_names(model).block}."
            tensors[name.replace(".mlp.", block)] = FileTensor(parameter)
        else:
            tensors[name] = FileTensor(parameter)
    return tensors


def _expert_names(model: PreTrainedModel) -> _ExpertNames:
    family = model.config.model_type
    if family not in _EXPERT_NAMES:
        raise ValueError(
            f"model_type {family!r} has experts whose names in files are not known to the transformers rollout "
            f"engine; it knows {', '.join(sorted(_EXPERT_NAMES))}"
        )
    return _EXPERT_NAMES[family]


def _split_experts(name: str, parameter: nn.Parameter, names: _ExpertNames) -> Iterator[tuple[str, FileTensor]]:
    prefix, _, fused = name.rpartition(".mlp.experts.")
    half = parameter.shape[1] // 2
    matrices: dict[str, tuple[slice, ...]]
    if fused == "gate_up_proj":
        matrices = {names.gate: (slice(0, half),), names.up: (slice(half, None),)}
    elif fused == "down_proj":
        matrices = {names.down: ()}
    else:
        raise ValueError(f"parameter {name!r} is not one of the fused experts `gate_up_proj` and `down_proj`")
    for expert in range(parameter.shape[0]):
        for matrix, rows in matrices.items():
            file_name = f"{prefix}.{names.block}.experts.{expert}.{matrix}.weight"
            yield file_name, FileTensor(parameter, (expert, *rows))


@torch.no_grad()
def receive_weights(tensors: Mapping[str, FileTensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `weights` into the model in place, cast to its dtype and device.

    Raises ValueError as `audited` does, after the whole iterator is consumed.
    """
    for name, tensor in audited(tensors, weights):
        tensors[name].view().copy_(tensor)


def audited(tensors: Mapping[str, FileTensor], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Pass on those of `weights` that fit, and see at the end that every tensor came exactly once.

    The whole iterator is consumed before anything is reported, since collectives may stand behind it that other ranks
    take part in. Raises ValueError naming every tensor that is missing, unknown, sent twice, or of the wrong shape.
    """
    problems: dict[str, list[str]] = {"missing": [], "unknown": [], "sent twice": [], "wrong shape": []}
    seen: set[str] = set()
    for name, tensor in weights:
        if name not in tensors:
            problems["unknown"].append(name)
            continue
        if name in seen:
            problems["sent twice"].append(name)
        seen.add(name)
        wanted = tensors[name].view().shape
        if wanted != tensor.shape:
            problems["wrong shape"].append(f"{name} {tuple(tensor.shape)}, wanted {tuple(wanted)}")
            continue
        yield name, tensor
    problems["missing"] = [name for name in tensors if name not in seen]
    if any(problems.values()):
        raise ValueError(
            f"the weights do not fit the rollout model, which wants each of its {len(tensors)} tensors exactly once: "
            + "; ".join(_describe(problem, names) for problem, names in problems.items() if names)
        )


def _describe(problem: str, names: list[str]) -> str:
    shown = ", ".join(names[:_N_NAMED])
    rest = len(names) - _N_NAMED
    return f"{problem}: {shown}" + (f" and {rest} more" if rest > 0 else "")
