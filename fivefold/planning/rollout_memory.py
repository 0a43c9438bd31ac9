"""Memory of a rank that generates: weights, and the keys and values of the sequences that it decodes together."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.families.shape import ModelShape
from fivefold.layout.backends import BACKENDS
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.gpus import Gpu
from fivefold.planning.memory import COMMUNICATOR, CUDA_CONTEXT

_FLOAT = 4


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes on one rank, awake."""

    weights: int
    kv_cache: int
    """Servers: the pool they take. The embedded engine: a full batch at its longest."""
    workspace: int
    context: int
    sequences: int
    """Of the longest length, that one replica holds at one time."""
    least_cache: int
    """Of `kv_cache`, what it cannot do without. Servers: one sequence. The embedded engine: all of it."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.workspace + self.context


def asleep_bytes(layout: ParallelLayout) -> int:
    """What stays of one rank on its GPU while the engine sleeps."""
    return BACKENDS[layout.backend].asleep_bytes if layout.is_server else _context(layout)


def _context(layout: ParallelLayout) -> int:
    """CUDA and NCCL of one rank's process."""
    return CUDA_CONTEXT + (COMMUNICATOR if layout.tp > 1 else 0)


def rollout_memory(
    layout: ParallelLayout,
    shape: ModelShape,
    gpu: Gpu,
    *,
    sequence_length: int,
    batch_size: int,
    element_bytes: int,
    taken: int = 0,
    fraction: float | None = None,
) -> RolloutMemory:
    """The memory of one rank of an inference layout; a replica spans tp * pp ranks.

    Args:
        sequence_length: tokens of prompt and answer, at the longest.
        batch_size: sequences that a replica of the embedded engine decodes together; servers decide for themselves.
        taken: bytes that trainers keep on the same GPU while they wait.
        fraction: of the GPU's memory, what a server takes; None: its usual share, less `taken`.
    """
    ranks = layout.tp * layout.pp
    weights = shape.n_parameters * element_bytes // ranks
    # Heads are divided, and copied where there are fewer than ranks; MLA's latent is copied to all.
    copies = layout.tp if shape.latent is not None else max(1, layout.tp // shape.n_kv_heads)
    per_sequence = shape.kv_cache_elements * element_bytes * sequence_length * copies // ranks
    context = _context(layout)
    if not layout.is_server:
        # Logits of one token a row: the model's, their float32 copy, and sorted for sampling.
        workspace = batch_size * shape.vocab * (element_bytes + 3 * _FLOAT)
        cache = batch_size * per_sequence
        return RolloutMemory(weights, cache, workspace, context, batch_size, least_cache=cache)
    server = BACKENDS[layout.backend]
    whole = gpu.memory * server.memory_share - taken if fraction is None else gpu.memory * fraction
    room = int(whole) - weights - server.workspace_bytes - context
    pool = max(room, 0)
    return RolloutMemory(weights, pool, server.workspace_bytes, context, pool // per_sequence, least_cache=per_sequence)
