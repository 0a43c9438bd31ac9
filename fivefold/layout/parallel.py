"""The layout of one role: its degree in each dimension of parallelism."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from fivefold.layout.backends import BACKENDS
from fivefold.layout.stages import NEARLY_EQUAL, StageSplit, stage_split

if TYPE_CHECKING:
    from fivefold.config.schema.megatron import MegatronConfig


@dataclass(frozen=True)
class ParallelLayout:
    """Degrees of parallelism of one role, with every degree known.

    Attention and dense layers split the world as dp x pp x cp x tp; experts split the same world as
    edp x pp x ep x etp (MoE parallel folding, Liu et al. 2025, https://arxiv.org/abs/2504.14960).

        megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)     dp1 pp4 cp2 tp2 = 16 = edp1 pp4 ep4 etp1
    """

    backend: str
    """A name in `BACKENDS`."""
    tp: int
    """Tensor parallel degree of attention and dense layers."""
    pp: int
    """Pipeline stages."""
    cp: int
    """Context parallel degree: ranks that share one sequence."""
    dp: int
    """Data parallel degree of attention and dense layers; the number of replicas, if the backend generates."""
    vpp: int
    """Virtual stages: model chunks on each pipeline stage (interleaved schedule); 1 is plain 1F1B."""
    ep: int
    """Expert parallel degree."""
    etp: int
    """Tensor parallel degree inside each expert."""
    edp: int
    """Data parallel degree of the experts."""
    split: StageSplit = NEARLY_EQUAL
    """What the recipe says about the layers of each stage."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"ParallelLayout.backend is {self.backend!r}; use one of {', '.join(BACKENDS)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("backend", "split") and value < 1:
                raise ValueError(f"ParallelLayout.{field.name} is {value}; a degree is at least 1")
        dense, experts = self.dp * self.tp * self.cp, self.edp * self.etp * self.ep
        if dense != experts:
            raise ValueError(
                f"dp*tp*cp = {self.dp}*{self.tp}*{self.cp} = {dense}, "
                f"but edp*etp*ep = {self.edp}*{self.etp}*{self.ep} = {experts}: "
                "attention and experts share the ranks of a stage, so the two must be equal"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks of the role; each has one device, or is one CPU process."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def gathers_replicas(self) -> bool:
        """Whether ranks that hold slices of the same experts, and so gather their tokens, are of several replicas."""
        return self.tp * self.cp % self.etp > 0

    @property
    def seen_tokens(self) -> float:
        """Tokens whose keys a rank's queries see, over its own tokens.

        With context parallelism its two chunks see prefixes of 2 cp + 1 chunks together.
        """
        return self.cp + 0.5 if self.cp > 1 else 1.0

    @property
    def is_training(self) -> bool:
        """Whether the backend trains; otherwise it only generates."""
        return BACKENDS[self.backend].trains

    @property
    def is_server(self) -> bool:
        """Whether the backend runs in a separate server process."""
        return BACKENDS[self.backend].is_server


def with_stages(layout: ParallelLayout, config: MegatronConfig) -> ParallelLayout:
    """Return a layout whose stages have the layers that a section `megatron` says; all else stays.

    A section that says nothing leaves the layout as it is: a reference is divided as the actor whose processes it is
    in.

    Raises:
        ValueError: the section says something else than the layout.
    """
    split = stage_split(config)
    if split == NEARLY_EQUAL or split == layout.split:
        return layout
    if layout.split != NEARLY_EQUAL:
        raise ValueError(
            f"the layout has stages of {layout.split}, and megatron.transformer says {split}: keep one of them"
        )
    return replace(layout, split=split)


def describe(layout: ParallelLayout) -> str:
    """Return the backend, the degrees that are not 1, and the number of ranks: `megatron tp2 ep4 (8 ranks)`."""
    names = ["tp", "pp", "vpp", "cp", "dp"]
    if BACKENDS[layout.backend].folds_experts:
        names += ["ep", "etp", "edp"]
    degrees = [f"{name}{value}" for name in names if (value := getattr(layout, name)) > 1]
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    return f"{' '.join([layout.backend, *degrees])} ({ranks})"
