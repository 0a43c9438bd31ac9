"""The audit of both sides: every Megatron parameter is filled, every Hugging Face tensor used, all shapes are equal."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches

from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.mapping import Shape, TensorReader, WeightMapping

_LISTED = 8
"""Most strays that an error names; the others are counted."""
_COMPARED = 1000
"""Most names that are searched for the nearest one."""


class WeightMismatchError(ValueError):
    """The model and the weights do not fit each other; the message names what is left over on each side."""


def check_model(
    mappings: Mapping[str, WeightMapping], stages: Sequence[Mapping[str, Shape]], groups: ShardGroups
) -> None:
    """Check the parameters of all pipeline stages.

    Args:
        mappings: the model's mappings by Megatron name.
        stages: shape of the shard by Megatron name, for each stage.
        groups: where this rank stands.

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
    _raise_if_any(
        "the model does not fit its family's mapping",
        _strays("Megatron parameters that no mapping knows", present - expected, expected - present),
        _strays("mapped Megatron parameters that no pipeline stage has", expected - present, present - expected),
        _listed("Megatron parameters of the wrong shape", len(shapes), shapes),
    )


def check_files(mappings: Iterable[WeightMapping], source: TensorReader, ignored: Iterable[tuple[str, str]]) -> None:
    """Check the tensors of `source` against those that `mappings` read.

    Args:
        mappings: all of the model's mappings.
        source: the model's files.
        ignored: names that may go unused, as (regular expression, reason).

    Raises:
        WeightMismatchError: tensors that are missing or unused, or that have another shape.
    """
    expected = {name: shape for mapping in mappings for name, shape in mapping.hf_shapes().items()}
    patterns = [re.compile(pattern) for pattern, _ in ignored]
    unused = {n for n in source.names - expected.keys() if not any(p.fullmatch(n) for p in patterns)}
    missing = expected.keys() - source.names
    shapes = [
        f"{name}: {list(source.shape(name))}, expected {list(shape)}"
        for name, shape in expected.items()
        if name not in missing and source.shape(name) != shape
    ]
    _raise_if_any(
        f"the weights in {source.folder} do not fit the model that its config describes",
        _strays("Hugging Face tensors that no parameter uses", unused, missing),
        _strays("Hugging Face tensors that are missing", missing, unused),
        _listed("Hugging Face tensors of the wrong shape", len(shapes), shapes),
    )


def _strays(title: str, names: Collection[str], others: Collection[str]) -> list[str]:
    """Return the title and the names, each with the name that is nearest among the strays of the other side."""
    listed = sorted(names)[:_LISTED]
    return _listed(title, len(names), [name + _nearest(name, others) for name in listed])


def _nearest(name: str, others: Collection[str]) -> str:
    close = get_close_matches(name, sorted(others)[:_COMPARED], n=1)
    return f" (nearest: {close[0]})" if close else ""


def _listed(title: str, count: int, lines: Sequence[str]) -> list[str]:
    if not count:
        return []
    shown = list(lines[:_LISTED])
    more = [f"    ... and {count - len(shown)} more"] if count > len(shown) else []
    return [f"  {count} {title}:", *(f"    {line}" for line in shown), *more]


def _raise_if_any(summary: str, *sections: list[str]) -> None:
    lines = [line for section in sections for line in section]
    if lines:
        raise WeightMismatchError("\n".join([summary, *lines]))
