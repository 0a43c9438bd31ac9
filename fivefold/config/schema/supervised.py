"""What the recipes of `fivefold sft`, `dpo` and `rm` share: they learn from given answers, and sample none."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.schema.data import DividedConfig, RowsConfig
from fivefold.config.schema.engine import TrainedModelConfig
from fivefold.config.schema.rules import rule
from fivefold.config.schema.run import EvaluationsConfig, RunConfig, StatsConfig


class SupervisedConfig(RunConfig):
    """The keys of every recipe of supervised training."""

    actor: TrainedModelConfig
    train_dataset: DividedConfig
    valid_dataset: RowsConfig | None = None
    evaluator: EvaluationsConfig = EvaluationsConfig()

    @property
    def held_out(self) -> dict[str, RowsConfig]:
        """The file of held-out rows, by the key of its section; there may be none."""
        return {} if self.valid_dataset is None else {"valid_dataset": self.valid_dataset}

    @property
    def has_held_out(self) -> bool:
        """Whether there are held-out rows."""
        return bool(self.held_out) or self.train_dataset.hold_out > 0

    @rule
    def _samples(self) -> Iterator[str]:
        default = StatsConfig()
        for name in ("n_logged_samples", "logged_tokens", "shown_samples_freq_steps"):
            if getattr(self.stats, name) != getattr(default, name):
                yield f"stats.{name} is about completions, and this run samples none: drop it"

    @rule
    def _held_out(self) -> Iterator[str]:
        if self.valid_dataset is not None and self.train_dataset.hold_out > 0:
            yield (
                f"train_dataset.hold_out={self.train_dataset.hold_out:g} and valid_dataset exclude each other: drop "
                "one of them"
            )
        if not self.has_held_out and self.evaluator != EvaluationsConfig():
            yield (
                "the section evaluator has no effect without held-out rows: set valid_dataset.path or "
                "train_dataset.hold_out, or drop evaluator"
            )
        best = self.recover.keep_best
        if not self.has_held_out and best is not None and best.startswith("eval/"):
            yield (
                f"recover.keep_best={best} is measured on held-out rows: set valid_dataset.path or "
                "train_dataset.hold_out, or name a metric of the training steps"
            )
