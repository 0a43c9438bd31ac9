"""How the layers of a model are divided over the stages of a pipeline, and over their virtual stages.

94 layers on p8                     11 12 12 12 12 12 12 11     the ends have the embedding and the output layer too
10 layers on p2v2                   2 3 | 3 2                   stage 0 has the first and the third chunk
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.layout.errors import RuleError

if TYPE_CHECKING:
    from fivefold.config.schema.megatron import MegatronConfig

_MOST_REPEATS = 1000


@dataclass(frozen=True)
class StageSplit:
    """What a recipe says about the layers of each stage; nothing by default: as equal as can be."""

    first: int | None = None
    """Layers of the first stage, all its virtual stages together."""
    last: int | None = None
    """Layers of the last stage."""
    counts_embedding: bool = False
    """Whether the embedding counts as a layer of the first stage."""
    counts_loss: bool = False
    """Whether the output layer counts as a layer of the last stage."""
    chunks: tuple[int, ...] | None = None
    """Layers of each chunk, in the order of the model."""


NEARLY_EQUAL = StageSplit()
"""A split that leaves it to `chunk_sizes`: as equal as can be."""


def chunk_sizes(n_layers: int, pp: int, vpp: int, split: StageSplit) -> tuple[int, ...]:
    """Return the layers of each of the pp * vpp chunks in the order of the model; stage s has every pp-th from s on.

    Raises:
        ValueError: layers that cannot be divided so.
    """
    if split.chunks is not None:
        sizes = split.chunks
        if len(sizes) != pp * vpp or sum(sizes) != n_layers:
            raise ValueError(
                f"pipeline_model_parallel_layout has {sum(sizes)} layers in {len(sizes)} parts, and the model has "
                f"{n_layers} layers in {_written(pp, vpp)} parts"
            )
        return sizes
    if split.first is not None or split.last is not None:
        return _with_given_ends(n_layers, pp, vpp, split)
    if split.counts_embedding or split.counts_loss:
        return _with_counted_ends(n_layers, pp, vpp, split)
    if n_layers < pp * vpp:
        raise ValueError(f"{n_layers} layers are too few for {_written(pp, vpp)} parts: each has at least one layer")
    return _nearly_equal(n_layers, pp * vpp)


def _nearly_equal(n_layers: int, n_chunks: int) -> tuple[int, ...]:
    """Return sizes that differ by one at most; the ends, which have the embedding and the head, have the smaller."""
    least, rest = divmod(n_layers, n_chunks)
    first = (n_chunks - rest) // 2
    return tuple(least + (first <= chunk < first + rest) for chunk in range(n_chunks))


def _with_given_ends(n_layers: int, pp: int, vpp: int, split: StageSplit) -> tuple[int, ...]:
    ends = {0: split.first, pp - 1: split.last} if pp > 1 else {}
    given = {stage: count for stage, count in ends.items() if count is not None}
    n_middle = pp - len(given)
    rest = n_layers - sum(given.values())
    if pp == 1 or rest < n_middle or (n_middle == 0 and rest) or (n_middle and rest % n_middle):
        raise ValueError(
            f"num_layers_in_first_pipeline_stage={split.first} and num_layers_in_last_pipeline_stage={split.last} "
            f"leave {rest} of {n_layers} layers, which do not divide equally over the other {max(0, n_middle)} stages "
            f"of p{pp}: change them, or write pipeline_model_parallel_layout"
        )
    stages = [given.get(stage, rest // n_middle if n_middle else 0) for stage in range(pp)]
    if any(count % vpp for count in stages):
        raise ValueError(
            f"the stages have {', '.join(map(str, stages))} layers, which do not divide over v{vpp}: change "
            "num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage, or drop v"
        )
    return tuple(count // vpp for _ in range(vpp) for count in stages)


def _with_counted_ends(n_layers: int, pp: int, vpp: int, split: StageSplit) -> tuple[int, ...]:
    counted = n_layers + split.counts_embedding + split.counts_loss
    if counted % (pp * vpp):
        raise ValueError(
            f"{n_layers} layers with account_for_embedding_in_pipeline_split={str(split.counts_embedding).lower()} and "
            f"account_for_loss_in_pipeline_split={str(split.counts_loss).lower()} count as {counted}, which do not "
            f"divide over {_written(pp, vpp)}: change p or v, or drop these keys"
        )
    sizes = [counted // (pp * vpp)] * (pp * vpp)
    sizes[0] -= split.counts_embedding
    sizes[-1] -= split.counts_loss
    if min(sizes) < 1:
        raise ValueError(f"{n_layers} layers leave a stage of {_written(pp, vpp)} without a layer: choose a smaller p")
    return tuple(sizes)


def _written(pp: int, vpp: int) -> str:
    return f"p{pp}" + (f"*v{vpp} = {pp * vpp}" if vpp > 1 else "")


def stage_split(config: MegatronConfig) -> StageSplit:
    """Return what a section `megatron` says about the layers of each stage.

    Raises:
        ValueError: a layout that cannot be read.
    """
    fields = config.transformer
    text = fields.pipeline_model_parallel_layout
    return StageSplit(
        first=fields.num_layers_in_first_pipeline_stage,
        last=fields.num_layers_in_last_pipeline_stage,
        counts_embedding=fields.account_for_embedding_in_pipeline_split,
        counts_loss=fields.account_for_loss_in_pipeline_split,
        chunks=None if text is None else parse_stages(text),
    )


_PARTS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}


def parse_stages(layout: str | list[list[str]]) -> tuple[int, ...]:
    """Return the layers of each chunk from a layout as Megatron-Core writes it: `Et*11|(t*12|)*6t*11L`.

    E is the embedding, t a layer, L the output layer, `|` separates chunks, `x*n` and `(...)*n` repeat. A list has a
    list of the words `embedding`, `decoder` and `loss` for each chunk.

    Raises:
        ValueError: a text that cannot be read, or the ends of the model in another place than the ends of the pipeline.
    """
    if isinstance(layout, str):
        text = layout.replace(",", "").replace(" ", "")
        for pattern in (r"\(([^()]+)\)\*(\d+)", r"([^()|*\d])\*(\d+)"):
            text = re.sub(pattern, _repeated, text)
        chunks = text.split("|")
    else:
        chunks = ["".join(_PARTS.get(word.strip().lower(), "?") for word in chunk) for chunk in layout]
    whole = "".join(chunks)
    if not re.fullmatch(r"Et+L", whole):
        raise ValueError(
            f"pipeline_model_parallel_layout={layout!r} must be E (the embedding), then layers t, then L (the output "
            "layer), with | between the parts, such as Et*11|(t*12|)*6t*11L; there is no multi-token prediction (m)"
        )
    return tuple(chunk.count("t") for chunk in chunks)


def _repeated(match: re.Match[str]) -> str:
    times = int(match[2][:9])
    if times > _MOST_REPEATS:
        raise ValueError(
            f"pipeline_model_parallel_layout repeats {match[1]} {match[2]} times; {_MOST_REPEATS} is the most"
        )
    return match[1] * times


def implied_virtual_stages(split: StageSplit, pp: int) -> int:
    """Return the virtual stages of a split that names all chunks; 1 for any other.

    Raises:
        RuleError: a number of chunks that is no multiple of the stages.
    """
    if split.chunks is None:
        return 1
    if len(split.chunks) % pp:
        raise RuleError(
            f"pipeline_model_parallel_layout has {len(split.chunks)} parts, no multiple of p{pp}",
            "write one part for each stage, or for each virtual stage",
        )
    return len(split.chunks) // pp
