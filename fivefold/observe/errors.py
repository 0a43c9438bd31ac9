"""The failures of a run that has started."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run failed after its setup. The message is for the person who started it."""


class RunStopped(KeyboardInterrupt):
    """A run ended early, after a whole step, because it was asked to. The same command resumes it."""
