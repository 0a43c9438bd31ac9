"""Estimates of the time that a replica needs to decode a token, and of the cost of new weights.

    token of n sequences = max(reading weights, matmuls) + scheduling, sampling, keys and values of n sequences
                           + all-reduces of tensor parallelism between nodes

A few constants were measured with vLLM on H200s. Traffic inside a node and prefill are not counted, so real engines are
slower with long prompts or a large `t`. Traffic between nodes was not measured: its bytes are counted, its latency is
not.
"""

from __future__ import annotations

from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import Gpu
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.rollout_memory import RolloutMemory
from fivefold.planning.timing import BANDWIDTH_EFFICIENCY, DENSE_EFFICIENCY, GROUPED_EFFICIENCY
from fivefold.planning.traffic import Traffic

SEQUENCE_SECONDS = 5.3e-6
"""Seconds of scheduling and sampling per sequence and token: vLLM 0.25.1 on H200s, the same with 8 and 48 layers of
Qwen3-30B-A3B, and after most sequences have ended."""
LOGPROB_SECONDS = 4e-6
"""Extra seconds per token for each sequence with log-probs: vLLM 0.25.1 on an H200, 3e-6 with 256 sequences and 5e-6
with 512."""
SENDING_RATE = 26e9
"""Bytes/s at which a model goes to the replicas: Qwen3-30B-A3B with CUDA IPC on two H200s."""


def token_seconds(
    layout: ParallelLayout,
    shape: ModelShape,
    gpu: Gpu,
    memory: RolloutMemory,
    *,
    sequence_length: int,
    context: float,
    slots: int,
    element_bytes: int,
    tp_on_node: int,
) -> tuple[float, ...]:
    """Return the seconds in which a replica decodes one token of each of n sequences, at index n up to `slots`.

    Args:
        layout: layout of the rollout.
        shape: the model.
        gpu: the GPU of its ranks.
        memory: memory of a rank, from `rollout_memory`.
        sequence_length: tokens of the longest sequence for which `memory` was computed.
        context: mean number of tokens of a sequence while it is decoded.
        slots: most sequences.
        element_bytes: bytes of one weight.
        tp_on_node: ranks of a tensor parallel group on one node.
    """
    cache = memory.least_cache if layout.is_server else memory.kv_cache / memory.sequences
    bandwidth = gpu.bandwidth * BANDWIDTH_EFFICIENCY
    keys = cache / sequence_length * context / bandwidth
    experts = shape.n_moe_layers * shape.n_experts * shape.expert_parameters if shape.is_moe else 0
    # A token passes all ranks of a pipeline, one after another.
    ranks = layout.tp * layout.pp
    matmuls = 2 * shape.n_active_parameters / (layout.tp * gpu.peak * _efficiency(shape))
    sums = _sum_seconds(layout, shape, gpu, element_bytes, tp_on_node)
    seconds = [0.0]
    for n in range(1, slots + 1):
        unread = experts * (1 - shape.top_k / shape.n_experts) ** n if experts else 0.0
        weights = (memory.weights * ranks - unread * element_bytes) / layout.tp
        each = SEQUENCE_SECONDS + keys * layout.pp + sums
        seconds.append(max(weights / bandwidth, n * matmuls) + n * each)
    return tuple(seconds)


def _sum_seconds(layout: ParallelLayout, shape: ModelShape, gpu: Gpu, element_bytes: int, tp_on_node: int) -> float:
    """Return the seconds in which a tensor parallel group over several nodes reduces the stream of one token."""
    if tp_on_node == layout.tp:
        return 0.0
    # Twice in each layer, after attention and after the MLP: reduce-scatter and all-gather of the residual stream.
    passes = 2 * shape.n_layers * 2 * (layout.tp - 1) / layout.tp
    sent = passes * shape.hidden * element_bytes
    return Traffic("tp", layout.tp, tp_on_node, sent, exchanges_pairs=False).seconds(gpu)


def reading_seconds(layout: ParallelLayout, shape: ModelShape, gpu: Gpu) -> float:
    """Return the seconds in which a replica reads one token of a sequence that it continues."""
    ranks = layout.tp * layout.pp
    return 2 * shape.n_active_parameters / (ranks * gpu.peak * _efficiency(shape))


def sending_seconds(shape: ModelShape, element_bytes: int) -> float:
    """Return the seconds in which all replicas receive new weights."""
    return shape.n_live_parameters * element_bytes / SENDING_RATE


def _efficiency(shape: ModelShape) -> float:
    return GROUPED_EFFICIENCY if shape.is_moe else DENSE_EFFICIENCY
