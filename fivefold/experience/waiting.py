"""Groups that were answered and wait for their step, in a checkpoint.

    experience/   groups                 uint8, JSON: number, prompt and samples of each group
                  lengths                int64 [sequences]
                  columns/tokens, ...    [tokens of all sequences, ...], one after the other

Rewards are not among them: they are computed anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fivefold.roles.remote_batch import RemoteBatch, read_columns
from fivefold.roles.rollout import Group
from fivefold.types import Columns, Prompt, Sample

if TYPE_CHECKING:
    from fivefold.engine.state_store import HostSnapshot, WrittenPart

GROUPS, LENGTHS, COLUMNS = "groups", "lengths", "columns/"


@dataclass(frozen=True, eq=False)
class SavedGroup:
    """A group of a checkpoint."""

    number: int
    """Number of the prompt in the order of the data, from the first step on."""
    prompt_index: int
    token_ids: tuple[int, ...]
    """The prompt's tokens."""
    samples: Sequence[Mapping[str, Any]]
    columns: Columns

    def is_of(self, prompt: Prompt) -> bool:
        """Return whether `prompt` is the one that was answered."""
        return (self.prompt_index, self.token_ids) == (prompt.index, prompt.token_ids)

    @property
    def oldest(self) -> int:
        """Oldest version of the weights that sampled its tokens."""
        return min(sample["versions"][0] for sample in self.samples)

    def restored(self, prompt: Prompt, size: int) -> Group:
        """Return the group with its `size` samples, whose tokens are put into the object store."""
        samples = [Sample(prompt, **{**each, "versions": tuple(each["versions"])}) for each in self.samples]
        return Group(self.number * size, samples, RemoteBatch.of(self.columns))


class WaitingGroups:
    """The groups that wait, as checkpoints take them (`StateOwner`)."""

    def __init__(self, groups: Callable[[], Mapping[int, Group]]) -> None:
        """`groups` returns the groups that wait at this moment, by the number of their prompt."""
        self._groups = groups
        self._snapshot: HostSnapshot | None = None

    def snapshot(self, folder: Path) -> int:
        """Copy the groups to this process, for `write_snapshot`. Returns their bytes."""
        # Imported late: a driver needs torch's checkpoint library only for this.
        from fivefold.engine.state_store import StateWriter

        self._snapshot = StateWriter(0, ()).snapshot(folder, (), _tensors(self._groups()))
        return self._snapshot.n_bytes

    def write_snapshot(self) -> list[WrittenPart]:
        """Write the groups of the last snapshot.

        Raises:
            OSError: a file cannot be written.
        """
        assert self._snapshot is not None
        return [self._snapshot.write()]


def read_groups(folder: Path) -> list[SavedGroup]:
    """Return the groups that `WaitingGroups` has written to `folder`.

    Raises:
        ValueError: a file is missing or damaged.
    """
    from fivefold.bridge.dcp_folder import DCPFolder  # late, as above

    with DCPFolder(folder) as files:
        if not files.names:
            return []
        arrays = {
            name: files.read(name, *(slice(0, size) for size in files.shape(name))).numpy() for name in files.names
        }
    rows = json.loads(arrays.pop(GROUPS).tobytes())
    lengths = arrays.pop(LENGTHS)
    values = {name.removeprefix(COLUMNS): array for name, array in arrays.items()}
    groups, first, start = [], 0, 0
    for row in rows:
        own = lengths[first : first + len(row["samples"])]
        end = start + int(own.sum())
        columns = Columns(own.astype(np.int32), {name: array[start:end] for name, array in values.items()})
        groups.append(SavedGroup(row["number"], row["prompt"], tuple(row["token_ids"]), row["samples"], columns))
        first, start = first + len(own), end
    return groups


def _tensors(groups: Mapping[int, Group]) -> dict[str, Tensor]:
    """Return all groups as tensors on the CPU, by key; none if there are no groups."""
    if not groups:
        return {}
    rows = [
        {
            "number": number,
            "prompt": group.samples[0].prompt.index,
            "token_ids": group.samples[0].prompt.token_ids,
            "samples": [_fields(sample) for sample in group.samples],
        }
        for number, group in groups.items()
    ]
    sequences = [columns for group in groups.values() for columns in read_columns(group.batch, len(group.batch))]
    names = set.intersection(*(set(columns) for columns in sequences))
    columns = {
        COLUMNS + name: torch.from_numpy(np.concatenate([sequence[name] for sequence in sequences])) for name in names
    }
    lengths = torch.tensor([len(sequence["tokens"]) for sequence in sequences])
    text = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)
    return {GROUPS: text, LENGTHS: lengths, **columns}


def _fields(sample: Sample) -> dict[str, Any]:
    return {
        "response_text": sample.response_text,
        "finish_reason": sample.finish_reason,
        "n_tokens": sample.n_tokens,
        "n_sampled": sample.n_sampled,
        "versions": list(sample.versions),
    }
