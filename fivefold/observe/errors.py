"""The failures of a run that has started."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run broke after its set-up; the message is meant for the person who started it."""
