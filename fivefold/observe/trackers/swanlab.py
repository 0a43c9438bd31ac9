"""SwanLab. SWANLAB_MODE=offline or local keeps a run on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import swanlab

from fivefold.observe.trackers.tracker import TrackedRun, numbers

MOST_TEXTS = 100
"""Most texts of a call: SwanLab drops what is beyond 108."""


class SwanlabTracker:
    """A run of SwanLab."""

    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        # SwanLab would ask for an account in the middle of a run, and put its own streams in place of the process's.
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
        if metrics:  # SwanLab calls a step without any an error
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
