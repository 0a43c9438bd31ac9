"""The keys that the sections of all roles have that generate."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fivefold.config.limits import MOST_SECONDS
from fivefold.config.schema.fields import DeviceList, NonNegative, PathText, Sequences
from fivefold.config.schema.role import RoleConfig
from fivefold.config.schema.rules import OfServers


class GeneratorConfig(RoleConfig):
    """An engine that generates, and where it runs."""

    backend: str = "transformers:d1"
    """Engine and layout: `transformers:d2`, or a server such as `vllm:d4t2` (docs/rollout.md)."""
    device_mapping: DeviceList | None = None
    """GPUs of the replicas, written like `actor.device_mapping`."""
    max_batch_size: Sequences = 256
    """Most sequences that one replica decodes at one time."""
    max_server_restarts: Annotated[NonNegative, OfServers()] = 3
    """Times that the server of a replica is started again if it dies or hangs; then the run ends. What it was answering
    is asked for again, of the other replicas too (docs/async.md)."""
    server_timeout_s: Annotated[float, Field(gt=0, le=MOST_SECONDS), OfServers()] = 300.0
    """Seconds without an answer after which a server must show that it still works: one that then samples no token for
    a minute hangs, and is started again (docs/async.md). So is one that takes a minute longer than this to load weights
    from files, to sleep or to wake."""
    memory_fraction: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, OfServers()] = None
    """Share of each GPU's memory that a server takes; null: its usual share, less what other roles keep there."""
    server_python: Annotated[PathText | None, OfServers()] = None
    """Python program of the environment in which the server is installed; null: Fivefold's own."""
    server_args: Annotated[list[str | int | float], OfServers()] = []
    """Further arguments of the server's command line, for example `[--enforce-eager]`."""
