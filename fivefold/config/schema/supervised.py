"""What the recipes of `fivefold sft`, `dpo` and `rm` share: they learn from given answers, and sample none."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.schema.rules import rule
from fivefold.config.schema.run import RunConfig, StatsConfig

LOSSES = ("nll", "loss")
"""Metrics that should fall."""


class SupervisedConfig(RunConfig):
    """The keys of every recipe of supervised training."""

    @rule
    def _samples(self) -> Iterator[str]:
        default = StatsConfig()
        for name in ("n_logged_samples", "logged_tokens", "shown_samples_freq_steps"):
            if getattr(self.stats, name) != getattr(default, name):
                yield f"stats.{name} is about completions, and this run samples none: drop it"

    @rule
    def _best(self) -> Iterator[str]:
        best = self.recover.keep_best
        if best is not None and best.startswith("eval/"):
            yield (
                f"recover.keep_best={best} is measured after the last step alone, so it compares no checkpoints: name "
                "a metric of the training steps"
            )
        if best in LOSSES:
            yield (
                f"recover.keep_best={best} keeps the checkpoint with the largest value, which is the worst one of a "
                "loss: name a metric that grows as the model improves, such as accuracy of pairs, or drop it"
            )
