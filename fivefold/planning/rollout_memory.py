"""Memory of a rank that generates: its weights, and keys and values of the sequences that it decodes."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.families.shape import ModelShape
from fivefold.layout.backends import BACKENDS
from fivefold.layout.gpus import Gpu
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.memory import COMMUNICATOR, CUDA_CONTEXT
from fivefold.planning.vision import pass_bytes, tower_weights

_FLOAT = 4


@dataclass(frozen=True)
class RolloutMemory:
    """Memory of one rank while it is awake, in bytes."""

    weights: int
    """Bytes of the rank's weights, and of adapters next to them."""
    kv_cache: int
    """Keys and values: a server's pool, or a full batch of the longest sequences in the embedded engine."""
    workspace: int
    """Activations and buffers for sampling."""
    context: int
    """CUDA and NCCL of the process."""
    sequences: int
    """Sequences of the longest length that one replica holds at one time."""
    least_cache: int
    """Least bytes of `kv_cache` for the engine: one sequence for a server, all of it for the embedded engine."""

    @property
    def total(self) -> int:
        """All bytes of the rank."""
        return self.weights + self.kv_cache + self.workspace + self.context


def asleep_bytes(layout: ParallelLayout) -> int:
    """Return the bytes that one rank keeps on its GPU while the engine sleeps."""
    return BACKENDS[layout.backend].asleep_bytes if layout.is_server else _context(layout)


def _context(layout: ParallelLayout) -> int:
    """Return the bytes that CUDA and NCCL take for one rank's process."""
    return CUDA_CONTEXT + (COMMUNICATOR if layout.tp > 1 else 0)


def rollout_memory(
    layout: ParallelLayout,
    shape: ModelShape,
    gpu: Gpu,
    *,
    sequence_length: int,
    batch_size: int,
    element_bytes: int,
    is_quantized: bool = False,
    drafts_by_layers: bool = False,
    adapters: int = 0,
    taken: int = 0,
    fraction: float | None = None,
) -> RolloutMemory:
    """Return the memory of one rank of a layout that generates; a replica spans tp * pp ranks.

    Args:
        layout: layout of the rollout.
        shape: the model.
        gpu: the GPU of the rank.
        sequence_length: tokens of the longest prompt and completion together.
        batch_size: sequences that a replica of the embedded engine decodes together; servers choose their number.
        element_bytes: bytes of one weight, key or value.
        is_quantized: whether a server keeps the matrices of layers in one byte an element.
        drafts_by_layers: whether a server holds a layer for multi-token prediction, with keys and values, too.
        adapters: bytes of the rank's room for adapters next to its weights.
        taken: bytes that other roles keep on the same GPU.
        fraction: share of the GPU's memory that a server takes; None: its usual share, minus `taken`.
    """
    ranks = layout.tp * layout.pp
    saved = (element_bytes - 1) * shape.layer_matrix_weights if is_quantized else 0
    # The embedded engine computes without indexers.
    n_weights = shape.n_parameters if layout.is_server else shape.n_live_parameters
    n_weights += shape.further_layer_parameters if drafts_by_layers else 0
    weights = (n_weights * element_bytes - saved) // ranks + adapters
    # Ranks divide the heads, and copy them if there are fewer heads than ranks. All ranks have MLA's latent.
    copies = layout.tp if shape.latent is not None else max(1, layout.tp // shape.n_kv_heads)
    cached = shape.kv_cache_elements(sequence_length)
    cached += cached // shape.n_attention_layers if drafts_by_layers else 0
    per_sequence = cached * element_bytes * copies // ranks
    per_sequence += shape.state_elements * _FLOAT // ranks
    if shape.indexer is not None and layout.is_server:
        per_sequence += shape.indexer.cache_bytes(sequence_length) * copies // ranks
    context = _context(layout)
    if not layout.is_server:
        # The logits of one token per row: the model's own, and three float32 copies while they are sorted.
        workspace = batch_size * shape.vocab * (element_bytes + 3 * _FLOAT)
        cache = batch_size * per_sequence
        weights += tower_weights(shape, element_bytes)
        return RolloutMemory(weights, cache, workspace, context, batch_size, least_cache=cache)
    server = BACKENDS[layout.backend]
    weights += tower_weights(shape, element_bytes) // layout.tp
    workspace = server.workspace_bytes + pass_bytes(shape, sequence_length, element_bytes)
    whole = gpu.memory * server.memory_share - taken if fraction is None else gpu.memory * fraction
    room = int(whole) - weights - workspace - context
    pool = max(room, 0)
    return RolloutMemory(weights, pool, workspace, context, pool // per_sequence, least_cache=per_sequence)
