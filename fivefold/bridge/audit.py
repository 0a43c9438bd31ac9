"""The audit of both sides: every Megatron parameter is filled, every Hugging Face tensor used, all shapes are equal.

check_weights   a folder, by the headers of its files, before any process is started
check_files     the same of any source of tensors, without the files
check_model     the parameters that a load is to fill
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from heapq import nlargest
from itertools import takewhile
from operator import eq
from pathlib import Path
from types import MappingProxyType

from fivefold.bridge.decoder import VALUE_ALIASES, expected_tensors, file_tensors, is_ignored, is_optional
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import WeightMapping
from fivefold.bridge.reading import StoredTensors
from fivefold.bridge.weight_files import WeightFiles, survey
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import VALUE_WEIGHT, Shape, kept_tensors

_FLOATING = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes of weights, as safetensors writes them; others mean a quantized model."""
_LISTED = 8
"""Most strays that an error names; the others are counted."""
_COMPARED = 1000
"""Most names that are searched for the nearest one."""
_LIKELY = 20
"""Most of them that are compared letter by letter, which is slow."""


class WeightMismatchError(ValueError):
    """The weights are not whole, or they do not fit the model; the message names files and tensors on each side."""


def check_model(
    mappings: Mapping[str, WeightMapping], stages: Sequence[Mapping[str, Shape]], groups: ShardGroups
) -> None:
    """Check the parameters of all pipeline stages.

    Args:
        mappings: the model's mappings by Megatron name.
        stages: shape of the shard by Megatron name, for each stage.
        groups: this rank's place.

    Raises:
        WeightMismatchError: parameters that no mapping knows, mapped parameters that no stage has, or shapes that are
            not the mapping's.
    """
    present = {name for stage in stages for name in stage}
    expected = {name for name, mapping in mappings.items() if mapping.exists(groups)}
    shapes = [
        f"{name} on pipeline stage {number}: {list(shape)}, expected {list(mappings[name].local_shape(groups))}"
        for number, stage in enumerate(stages)
        for name, shape in stage.items()
        if name in expected and shape != mappings[name].local_shape(groups)
    ]
    raise_if_any(
        "the model does not fit its family's mapping",
        strays("Megatron parameters that no mapping knows", present - expected, expected - present),
        strays("mapped Megatron parameters that no pipeline stage has", expected - present, present - expected),
        listed("Megatron parameters of the wrong shape", len(shapes), shapes),
    )


def check_weights(folder: Path, shape: ModelShape | None) -> None:
    """Check that the weight files in `folder` are whole and hold the tensors of a model of `shape`.

    Only headers are read, so this is quick and needs no process: tensors with NaN or infinite values are found later,
    by the load.

    Args:
        folder: the model's folder.
        shape: the model; None where its tensors are not known, so that only the files are checked.

    Raises:
        WeightMismatchError: naming files that are missing or damaged, tensors that are missing, unknown, quantized or
            of another shape, and how to mend each.
    """
    files = survey(folder)
    misfits = []
    if (
        shape is not None and files.names
    ):  # without any header, every tensor would be missing for a reason named already
        # Quantized models have tensors of scales besides, which would all be listed.
        kept = kept_tensors(shape)
        misfits = _quantized(shape, kept, files) or _misfits(shape, files, files.unread, kept)
    raise_if_any(
        f"{folder} does not hold the weights of the model that its config.json describes",
        listed("Problems of the weight files", len(files.problems), files.problems),
        misfits,
    )


def check_files(shape: ModelShape, source: StoredTensors) -> None:
    """Check that the tensors of `source` are a model of `shape`.

    Raises:
        WeightMismatchError: tensors that are missing or unused, or that have another shape.
    """
    raise_if_any(
        f"the weights in {source.folder} do not fit the model that its config.json describes", _misfits(shape, source)
    )


def _misfits(
    shape: ModelShape,
    source: StoredTensors,
    unread: Collection[str] = (),
    kept: Mapping[str, Shape] = MappingProxyType({}),
) -> list[str]:
    """Return what does not fit, apart from the tensors `unread`, whose absence is reported elsewhere.

    `kept` are tensors that must be there though no parameter uses them.
    """
    expected, present = expected_tensors(shape) | dict(kept), source.names
    unused = {name for name in present - expected.keys() if not is_ignored(name, shape)}
    missing = {name for name in expected.keys() - present - set(unread) if not is_optional(name, shape)}
    shapes = [
        f"{name} in {source.file(name)}: {list(source.shape(name))}, expected {list(wanted)}"
        for name, wanted in expected.items()
        if name in present and source.shape(name) != wanted
    ]
    places = {name: f" in {source.file(name)}" for name in unused}
    lines = [
        *strays("Hugging Face tensors that no parameter uses", unused, missing, places),
        *strays("Hugging Face tensors that are missing", missing, unused),
        *listed("Hugging Face tensors of the wrong shape", len(shapes), shapes),
    ]
    if unused & {VALUE_WEIGHT, *VALUE_ALIASES}:
        fix = "  this is a reward model or a critic, which has a score in the place of words: it serves as "
        fix += "reward.model.path or critic.path; name a language model here"
    else:
        fix = "  config.json and weights must be of one model: correct config.json, or fetch the weights again"
    return [*lines, fix] if lines else []


def _quantized(shape: ModelShape, kept: Mapping[str, Shape], files: WeightFiles) -> list[str]:
    expected = expected_tensors(shape).keys() | kept.keys() | {f"{name}_blocks" for name in file_tensors(shape)}
    lines = [
        f"{name} in {tensor.file}: {tensor.dtype}, expected one of {', '.join(sorted(_FLOATING))}"
        for name, tensor in files.tensors.items()
        if name in expected and tensor.dtype not in _FLOATING
    ]
    fix = (
        "  quantized weights are not read: `fivefold convert` makes bfloat16 of fp8 in blocks and of mxfp4; take any "
        "other model in a floating-point format"
    )
    return [*listed("Hugging Face tensors that are quantized", len(lines), lines), fix] if lines else []


def strays(
    title: str, names: Collection[str], others: Collection[str], places: Mapping[str, str] | None = None
) -> list[str]:
    """Return the title and the names, each with the name that is nearest among the strays of the other side.

    Args:
        title: what is wrong with the names.
        names: the strays.
        others: the strays of the other side.
        places: what follows a name that has a place.
    """
    shown = sorted(names)[:_LISTED]
    lines = [name + (places or {}).get(name, "") + _nearest(name, others) for name in shown]
    return listed(title, len(names), lines)


def _nearest(name: str, others: Collection[str]) -> str:
    likely = nlargest(_LIKELY, sorted(others)[:_COMPARED], key=lambda other: _shared_ends(name, other))
    close = get_close_matches(name, likely, n=1)
    return f" (nearest: {close[0]})" if close else ""


def _shared_ends(first: str, second: str) -> int:
    """Return how many letters two names share at their beginning and at their end."""
    same = map(eq, first, second), map(eq, reversed(first), reversed(second))
    return sum(sum(takewhile(bool, letters)) for letters in same)


def listed(title: str, count: int, lines: Sequence[str]) -> list[str]:
    """Return the title with the count, and the first lines; none if there is nothing to list."""
    if not count:
        return []
    shown = list(lines[:_LISTED])
    more = [f"    ... and {count - len(shown)} more"] if count > len(shown) else []
    return [f"  {title} ({count}):", *(f"    {line}" for line in shown), *more]


def raise_if_any(summary: str, *sections: list[str]) -> None:
    """Raise an error of the summary and all lines of the sections, unless they have none.

    Raises:
        WeightMismatchError: there are lines.
    """
    lines = [line for section in sections for line in section]
    if lines:
        raise WeightMismatchError("\n".join([summary, *lines]))
