"""The check that the nodes whose processes write to a run's folder see the driver's folder, and no other one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import ray

from fivefold.cluster.nodes import Node


def check_shared(folder: Path, nodes: Sequence[Node]) -> None:
    """Refuse a folder that is not on storage that all of `nodes` share with this process.

    This process writes a file there for a moment, which a process on each node looks for.

    Raises:
        ValueError: some nodes do not see the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    token = folder / f".seen-by-all-nodes-{secrets.token_hex(8)}"
    token.touch()
    try:
        look = ray.remote(_sees)
        seen = ray.get([look.options(num_cpus=0, scheduling_strategy=node.strategy).remote(token) for node in nodes])
    finally:
        token.unlink()
    if blind := [node.host for node, sees in zip(nodes, seen, strict=True) if not sees]:
        raise ValueError(
            f"the run's folder {folder} is written by processes on several machines, but what the driver writes there "
            f"is not seen on {', '.join(blind)}: set cluster.fileroot to a folder on storage that all nodes share"
        )


def _sees(path: Path) -> bool:
    # A network file system may keep an old listing of the folder for a while. Opening the folder renews it.
    return path.name in {entry.name for entry in path.parent.iterdir()} if path.parent.is_dir() else False
