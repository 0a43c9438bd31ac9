"""The columns of the table of steps, by command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["fixed", "short", "rate", "count"]
"""How a number is formatted; see `table.number`."""


@dataclass(frozen=True)
class Column:
    """A column of the table: one number of each step."""

    label: str
    keys: tuple[str, ...]
    """Names of metrics. The first one that the step has is shown."""
    kind: Kind
    width: int
    """Characters of the column."""
    rank: int = 0
    """On a narrow screen, columns of the highest rank are left out first. Rank 0 always stays."""
    is_optional: bool = False
    """Leave out the column if the step does not have the metric."""


TRAIN_COLUMNS = (
    Column("reward", ("reward/mean",), "fixed", 6),
    Column("acc", ("accuracy",), "fixed", 5),
    Column("KL", ("kl_ref", "teacher_kl", "ppo_kl_k3"), "short", 7, rank=3),
    Column("entropy", ("entropy",), "fixed", 7, rank=4),
    Column("clip", ("clip_fraction",), "fixed", 5, rank=5),
    Column("gnorm", ("grad_norm",), "short", 7, rank=2),
    Column("lr", ("lr",), "rate", 7, rank=6),
    Column("EV", ("critic/explained_variance",), "fixed", 6, rank=7, is_optional=True),
    Column("len", ("response_length/mean",), "count", 5),
    Column("tok/s", ("tokens_per_second",), "count", 5),
    Column("GB", ("peak_memory_gb/max",), "count", 5, rank=1, is_optional=True),
)
"""Columns of reinforcement learning. KL is to the reference if there is one, else to a teacher, else to the sampling
policy."""

SFT_COLUMNS = (
    Column("loss", ("nll",), "short", 7),
    Column("entropy", ("entropy",), "fixed", 7, rank=3),
    Column("gnorm", ("grad_norm",), "short", 7),
    Column("lr", ("lr",), "rate", 7, rank=2),
    Column("tok/s", ("tokens_per_second",), "count", 5),
    Column("GB", ("peak_memory_gb/max",), "count", 5, rank=1, is_optional=True),
)
"""Columns of supervised fine-tuning."""

PAIR_COLUMNS = (
    Column("loss", ("loss",), "short", 7),
    Column("acc", ("accuracy",), "fixed", 5),
    Column("margin", ("margin",), "fixed", 6),
    Column("gnorm", ("grad_norm",), "short", 7, rank=3),
    Column("lr", ("lr",), "rate", 7, rank=2),
    Column("tok/s", ("tokens_per_second",), "count", 5),
    Column("GB", ("peak_memory_gb/max",), "count", 5, rank=1, is_optional=True),
)
"""Columns of training on preference pairs."""

KTO_COLUMNS = tuple(
    Column("KL", ("kl",), "short", 7) if column.label == "margin" else column for column in PAIR_COLUMNS
)
"""Columns of training on labelled single answers. KL is the divergence that scores are compared with."""
