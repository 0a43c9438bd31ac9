"""Rules of layouts: degrees must divide the model's sizes, and a server's replicas whole nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from fivefold.families.shape import ModelShape
from fivefold.layout.backends import BACKENDS
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import Placement, RolePlacement
from fivefold.layout.stages import chunk_sizes


def layout_problems(layout: ParallelLayout, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each degree that does not divide a size of the model.

    The vocabulary may have any size: its rows are padded to a multiple of the tensor parallel degree.
    """
    yield from _tensor_problems(layout, shape)
    yield from _pipeline_problems(layout, shape)
    if BACKENDS[layout.backend].folds_experts:
        yield from _expert_problems(layout, shape)


def replica_problems(placement: Placement) -> Iterator[str]:
    """Yield a line for each role with a replica of a server that spans nodes in another way than servers can.

    A replica that fits on a node is on one. A larger one has all devices of its nodes, because the servers start as
    many processes on each node, and number their ranks in the order of the nodes.
    """
    per_node = placement.n_devices_per_node
    for placed in placement.roles:
        layout, size = placed.layout, placed.layout.tp * placed.layout.pp
        spans = [_span(placed, group) for group in placed.straddling_groups("tp", "pp")] if layout.is_server else []
        uneven = next((span for span in spans if any(count != per_node for _, count in span)), None)
        if uneven is not None:
            nodes = ", ".join(map(str, sorted({node for node, _ in uneven})))
            rule = (
                f"it fits on one, so t x p = {size} must divide the GPUs that the role has on each"
                if size <= per_node
                else f"one that is larger than a node takes whole nodes, so t x p = {size} must be a multiple of "
                f"{per_node}, and the role begin with a node (or list whole nodes in its device_mapping)"
            )
            yield f"{placed.role}: a replica of {layout.backend} would span nodes {nodes}: {rule}"
        elif spans and layout.backend == "sglang" and layout.pp % len(spans[0]) and len(spans[0]) % layout.pp:
            yield (
                f"{placed.role}: SGLang puts whole pipeline stages on a node, or a stage on whole nodes: p{layout.pp} "
                f"and the {len(spans[0])} nodes of a replica must divide one another; change p and t"
            )


def _span(placed: RolePlacement, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the nodes of ranks in their order, each with the number of ranks that are on it side by side."""
    return [(node, len(list(own))) for node, own in groupby(placed.devices[rank].node for rank in ranks)]


def _tensor_problems(layout: ParallelLayout, shape: ModelShape) -> Iterator[str]:
    tp = layout.tp
    if shape.n_heads % tp:
        yield _indivisible("attention heads", shape.n_heads, "t", tp)
    if shape.n_kv_heads % tp:
        # Engines that generate copy key/value heads if there are fewer heads than ranks.
        is_copied = not layout.is_training and tp % shape.n_kv_heads == 0
        if not is_copied:
            yield _indivisible("key/value heads", shape.n_kv_heads, "t", tp)
    if shape.delta is not None and layout.is_training and shape.delta.n_key_heads % (tp * layout.cp):
        yield (
            f"{shape.delta.n_key_heads} key heads of gated delta nets cannot be split over t{tp} x c{layout.cp}, whose "
            f"ranks have some each: t x c must divide {shape.delta.n_key_heads} "
            f"({_divisors(shape.delta.n_key_heads)})"
        )
    if not all(shape.moe_layers) and shape.ffn_hidden % tp:
        yield _indivisible("columns of the MLP", shape.ffn_hidden, "t", tp)
    if shape.shared_expert_ffn_hidden % tp:
        yield _indivisible("columns of the shared expert", shape.shared_expert_ffn_hidden, "t", tp)
    if shape.is_moe and not BACKENDS[layout.backend].folds_experts and shape.expert_ffn_hidden % tp:
        yield _indivisible("columns of an expert", shape.expert_ffn_hidden, "t", tp)


def _pipeline_problems(layout: ParallelLayout, shape: ModelShape) -> Iterator[str]:
    if layout.vpp > 1 and layout.pp == 1:
        yield f"v{layout.vpp} splits each pipeline stage, but there is one stage only: add p2 or more, or drop v"
    try:
        chunk_sizes(shape.n_layers, layout.pp, layout.vpp, layout.split)
    except ValueError as error:
        yield str(error)


def _expert_problems(layout: ParallelLayout, shape: ModelShape) -> Iterator[str]:
    if not shape.is_moe:
        if layout.ep > 1 or layout.etp > 1:
            degree = f"e{layout.ep}" if layout.ep > 1 else f"ffn t{layout.etp}"
            yield f"{degree} splits experts, and {shape.family} has none: drop it"
        return
    if shape.top_k == 1 and shape.norm_topk_prob:
        yield (
            "each token visits one expert with norm_topk_prob=true, so its weight is always 1 and the router learns "
            "nothing, which Megatron-Core refuses: use a model with norm_topk_prob=false or with more experts a token"
        )
    if shape.n_experts % layout.ep:
        yield _indivisible("experts", shape.n_experts, "e", layout.ep)
    if shape.expert_ffn_hidden % layout.etp:
        yield _indivisible("columns of an expert", shape.expert_ffn_hidden, "ffn t", layout.etp)


def _indivisible(what: str, size: int, letter: str, degree: int) -> str:
    return f"{size} {what} cannot be split over {letter}{degree}: {letter} must divide {size} ({_divisors(size)})"


def _divisors(size: int) -> str:
    """Return the first divisors of `size`, as far as they are plausible degrees."""
    divisors = [degree for degree in range(1, min(size, 256) + 1) if size % degree == 0]
    shown = ", ".join(map(str, divisors[:8]))
    return shown + ", ..." if len(divisors) > 8 else shown
