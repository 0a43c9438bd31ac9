"""The engine of each backend that generates: the one place that builds them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fivefold.imports import large_imports
from fivefold.layout.backends import backend_names
from fivefold.rollout.contract import RolloutEngine
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.command import check_command
from fivefold.rollout.servers.dialect import Dialect
from fivefold.rollout.servers.sglang_dialect import SGLangDialect
from fivefold.rollout.servers.vllm_dialect import VLLMDialect
from fivefold.weights.folder import NodePlace, Save

DIALECTS: Mapping[str, Dialect] = {"vllm": VLLMDialect(), "sglang": SGLangDialect()}
"""The dialect of each backend that is a server."""


def check_server(spec: ReplicaSpec) -> None:
    """Refuse a server that is not installed, or whose further arguments repeat other keys; pass any other engine.

    Raises:
        ValueError: naming the package and how to install it, or the argument.
    """
    if spec.backend in DIALECTS:
        check_command(DIALECTS[spec.backend], spec)


def build_engine(spec: ReplicaSpec, place: NodePlace, save: Save) -> RolloutEngine:
    """Build the engine of one replica; a server is started, and ready when this returns.

    Args:
        place: the replica's index on its node, and its node's number of replicas. Servers alone use it.
        save: writes tensors as the model folder that a server reads.

    Raises:
        ValueError: a backend that has no engine, a model that the engine cannot run, or a server without room for its
            weights in files.
        RuntimeError: a server that ended at its start, or whose requests another process gets.
    """
    # Imported here, because the driver, which builds no engine, needs neither them nor transformers' models.
    if spec.backend in DIALECTS:
        from fivefold.rollout.servers.engine import ServerEngine

        return ServerEngine(DIALECTS[spec.backend], spec, place, save)
    if spec.backend != "transformers":
        raise ValueError(f"no engine generates with {spec.backend}: use {backend_names(trains=False)}")
    with large_imports():
        from fivefold.rollout.transformers_engine import TransformersEngine

    return TransformersEngine.from_path(
        spec.path,
        dtype=spec.dtype,
        device=weights_device(spec),
        max_batch_size=spec.max_batch_size,
        tokenizer_path=spec.tokenizer_path,
        trust_remote_code=spec.trust_remote_code,
        load_weights=spec.load_weights,
        recomputes=not spec.keeps_cache,
        transport=spec.route.transport,
        records_routes=spec.returns_routes,
    )


def weights_device(spec: ReplicaSpec) -> str:
    """The device on which the engine of `spec` takes its weights."""
    # A server reads its weights from files: they stay on the host.
    return "cuda" if spec.backend not in DIALECTS and torch.cuda.is_available() else "cpu"
