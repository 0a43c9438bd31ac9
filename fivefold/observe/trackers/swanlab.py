"""SwanLab. SWANLAB_MODE=offline or local keeps a run on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import swanlab

from fivefold.observe.trackers.background import TrackedRun, numbers

MOST_TEXTS = 100
"""Most texts of one call: SwanLab drops those beyond 108."""


class SwanlabTracker:
    """A run of SwanLab."""

    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        # By default, SwanLab asks for an account in the middle of a run, and replaces the process's output streams.
        settings = swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"))
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.key,
            resume="allow",
            config=dict(run.config),
            log_dir=str(run.folder),
            settings=settings,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        if metrics:  # SwanLab treats a step without metrics as an error
            self._run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the summary's numbers and samples as texts, and close."""
        last = {f"summary/{name}": value for name, value in numbers(summary).items()}
        texts = [
            swanlab.Text(f"{sample['prompt']}\n\n{sample['response']}", caption=f"reward {sample['reward']}")
            for sample in samples[-MOST_TEXTS:]
        ]
        if last or texts:
            self._run.log({**last, **({"samples": texts} if texts else {})})
        self._run.finish(state="success" if summary else "aborted")
