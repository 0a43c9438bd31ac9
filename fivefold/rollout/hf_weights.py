"""New weights for a model in memory: all of its tensors, each exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_N_NAMED = 8
"""Names that an error spells out before it counts the rest."""


@dataclass(frozen=True)
class FileTensor:
    """Where the tensor of a file lies in memory."""

    parameter: Tensor
    index: tuple[int | slice, ...] = ()

    def view(self) -> Tensor:
        """Return the tensor, which shares memory with the parameter."""
        return self.parameter.detach()[self.index] if self.index else self.parameter.detach()


@torch.no_grad()
def receive_weights(tensors: Mapping[str, FileTensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `weights` into the model in place, cast to its dtype and device.

    Raises:
        ValueError: as `audited`, after the whole iterator is consumed.
    """
    for name, tensor in audited(tensors, weights):
        tensors[name].view().copy_(tensor)


def audited(tensors: Mapping[str, FileTensor], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the `weights` that fit, and check at the end that every tensor came exactly once.

    It consumes the whole iterator before it reports, because other ranks may wait for this one in its collectives.

    Raises:
        ValueError: naming every tensor that is missing, unknown, sent twice, or of the wrong shape.
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
            + "; ".join(_described(problem, names) for problem, names in problems.items() if names)
        )


def _described(problem: str, names: list[str]) -> str:
    rest = len(names) - _N_NAMED
    return f"{problem}: {', '.join(names[:_N_NAMED])}" + (f" and {rest} more" if rest > 0 else "")
