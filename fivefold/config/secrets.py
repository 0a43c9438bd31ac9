"""Which environment variables hold secrets: no recipe may have their values, because files and trackers show it."""

from __future__ import annotations

import re

_SECRET = re.compile(r"(^|_)(API)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)


def names_secret(variable: str) -> bool:
    """Return whether the name of an environment variable says that its value is a secret, such as `WANDB_API_KEY`."""
    return _SECRET.search(variable) is not None
