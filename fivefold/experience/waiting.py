"""Groups that were answered and wait for their step, and those that are being answered, in a checkpoint.

    experience/   groups                 uint8, JSON: place, prompt and samples of each group
                  lengths                int64 [rows]
                  columns/tokens, ...    [tokens of all rows, ...], one after the other
                  begun                  uint8, JSON: place, prompt, and tokens and end of each request
                  begun/token_ids, ...   [tokens of all requests], one after the other

Rewards are not among them, but for those that an environment gave: functions compute theirs again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fivefold.batch import Columns
from fivefold.checkpoints.changes import is_below
from fivefold.checkpoints.start import FromScratch, Resume
from fivefold.checkpoints.store import EXPERIENCE, REPLAY_BUFFER
from fivefold.experience.group import Group
from fivefold.roles.remote_batch import RemoteBatch, read_columns
from fivefold.roles.responses import Answer
from fivefold.rollout.protocol import Begun, GenerationRequest
from fivefold.types import NOT_SAMPLED, Effort, FinishReason, Move, Prompt, Sample, StopReason

if TYPE_CHECKING:
    from fivefold.engine.state.dcp_files import WrittenPart
    from fivefold.experience.replay_buffer import SavedKept

SAMPLED_WITH = (
    "gconfig.greedy",
    "gconfig.max_tokens",
    "gconfig.min_new_tokens",
    "gconfig.stop",
    "gconfig.stop_token_ids",
    "gconfig.temperature",
    "gconfig.top_k",
    "gconfig.top_p",
    "gconfig.min_p",
    "gconfig.repetition_penalty",
    "gconfig.logit_bias",
    "gconfig.bad_token_ids",
)
"""Keys of the recipe that decide which responses are sampled, and what their log-probs are of."""
GROUPS, LENGTHS, COLUMNS = "groups", "lengths", "columns/"
BEGUN, BEGUN_ARRAYS = "begun", ("token_ids", "logprobs", "versions")


@dataclass(frozen=True, eq=False)
class SavedGroup:
    """A group of a checkpoint."""

    place: int
    """Place of the prompt among those that were not trained on, in the order of the data."""
    prompt_index: int
    key: tuple[int, ...]
    """As in `Prompt`."""
    samples: Sequence[Mapping[str, Any]]
    columns: Columns

    def fits(self, group: Group) -> bool:
        """Return whether the samples answer a group.

        They do not if they lack log-probs that are asked for, as a changed loss may.
        """
        prompt, most = group.prompt, group.sampling.max_new_tokens
        own = self.prompt_index, self.key, len(self.samples)
        if own != (prompt.index, prompt.key, len(group.requests)):
            return False
        if not all(_is_as_long(each["n_sampled"], each["finish_reason"], most) for each in self.samples):
            return False
        return _has_wanted([self.columns.values["rollout_logprobs"]], group.requests)

    @property
    def oldest(self) -> int:
        """Oldest version of the weights that sampled its tokens; `NOT_SAMPLED` if there are none."""
        sampled = [sample["versions"][0] for sample in self.samples if sample["n_sampled"]]
        return min(sampled, default=NOT_SAMPLED)

    def restored(self, prompt: Prompt) -> Answer:
        """Return the samples, whose tokens are put into the object store."""
        samples = [
            Sample(
                prompt,
                **{
                    **each,
                    "versions": tuple(each["versions"]),
                    "moves": tuple(Move(*move) for move in each["moves"]),
                    "effort": Effort(*each.get("effort", ())),
                },
            )
            for each in self.samples
        ]
        columns = self.columns
        if prompt.images:
            from fivefold.data.images import placed  # by those whose prompts have images

            columns = replace(columns, images=(placed(prompt.images),) * len(samples))
        return Answer(self.place, 0, samples, RemoteBatch.of(columns))


@dataclass(frozen=True, eq=False)
class BegunGroup:
    """A group of a checkpoint that was being answered."""

    place: int
    """Place of the prompt, as in `SavedGroup`."""
    token_ids: tuple[int, ...]
    """The prompt's tokens."""
    begun: Sequence[Begun | None]
    """What each completion had; None: nothing."""

    @property
    def oldest(self) -> int:
        """Oldest version of the weights that sampled its tokens; there is at least one."""
        return min(int(begun.versions.min()) for begun in self.begun if begun and len(begun.versions))

    def fits(self, group: Group) -> bool:
        """Return whether the completions of a group can continue from it."""
        if self.token_ids != group.prompt.token_ids or len(self.begun) != len(group.requests):
            return False
        given = [begun for begun in self.begun if begun is not None]
        most = group.sampling.max_new_tokens
        if not all(_is_as_long(len(begun.token_ids), begun.finish_reason, most) for begun in given):
            return False
        return _has_wanted([begun.logprobs for begun in given], group.requests)

    def continued(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Return the requests of the group with the tokens that they have."""
        return [replace(request, begun=begun) for request, begun in zip(requests, self.begun, strict=True)]


def _is_as_long(n_tokens: int, reason: StopReason | None, most_tokens: int) -> bool:
    """Return whether so many tokens are what a limit of `most_tokens` leaves of a completion, by why it has ended.

    One that reached a lower limit would continue under this one, and count as cut off though it is not. An episode that
    an environment has ended has several completions, each with the limit.
    """
    if reason not in (None, "stop", "length"):
        return True
    if reason is None:
        return n_tokens < most_tokens
    return n_tokens == most_tokens if reason == "length" else n_tokens <= most_tokens


def _has_wanted(logprobs: Sequence[npt.NDArray[Any]], requests: Sequence[GenerationRequest]) -> bool:
    """Return whether log-probs are known, or the requests of one prompt do not ask for them."""
    return not requests[0].wants_logprobs or not any(np.isnan(values_T).any() for values_T in logprobs)


@dataclass(frozen=True, eq=False)
class Saved:
    """What a checkpoint has of a stream."""

    groups: Sequence[SavedGroup] = ()
    begun: Sequence[BegunGroup] = ()
    kept: Sequence[SavedKept] = ()
    """Groups of the replay buffer."""


class WaitingGroups:
    """The groups that wait or are being answered, as checkpoints take them (`StateOwner`)."""

    def __init__(
        self, groups: Callable[[], Mapping[int, Group]], begun: Callable[[], Mapping[int, Sequence[GenerationRequest]]]
    ) -> None:
        """Take note of where the groups are.

        Args:
            groups: returns the groups that wait at this moment, by the place of their prompt, as in `SavedGroup`.
            begun: returns the requests of those that are being answered.
        """
        self._groups = groups
        self._begun = begun
        self._moment: _Moment | None = None
        """What the last snapshot has, until it is on the disk."""
        self._written: list[WrittenPart] = []

    def snapshot(self, folder: Path) -> None:
        """Keep the groups of this moment for `write_snapshot`. They never change, so that nothing is copied."""
        # A group that is finished between the two is in both, and `Saved.groups` counts.
        begun = self._begun()
        groups = self._groups()
        running = {place: requests for place, requests in begun.items() if place not in groups}
        self._moment = _Moment(folder, groups, running)

    def write_snapshot(self) -> list[WrittenPart]:
        """Write the groups of the last snapshot, whose tokens come to this process for it.

        Raises:
            OSError: a file cannot be written.
        """
        # Imported late: a driver needs torch's checkpoint library only for this.
        from fivefold.engine.state.state_store import StateWriter

        if self._moment is not None:
            tensors = group_tensors(self._moment.groups) | _begun_tensors(self._moment.running)
            self._written = [StateWriter(0, ()).snapshot(self._moment.folder, (), tensors).write()]
            # The tokens' place in the object store is free once their step is over.
            self._moment = None
        return self._written


@dataclass(frozen=True, eq=False)
class _Moment:
    """What a checkpoint gets."""

    folder: Path
    groups: Mapping[int, Group]
    running: Mapping[int, Sequence[GenerationRequest]]


def taken_over(start: FromScratch | Resume) -> tuple[Saved, str | None]:
    """Return what a run takes over from its checkpoint, and a text for the user if the sampling has changed.

    What was sampled in another way is not taken over: the trainer would take its log-probs, of a truncated distribution
    for example, for log-probs of the distribution that the recipe now names.
    """
    if not isinstance(start, Resume) or not (folder := start.checkpoint.path / EXPERIENCE).is_dir():
        return Saved(), None
    saved = replace(read_waiting(folder), kept=_read_kept(start))
    changed = [str(change) for change in start.changes if is_below(change.key, SAMPLED_WITH)]
    if any(is_below(change.key, ("reward",)) for change in start.changes):
        saved = replace(saved, kept=())  # their rewards are others
    if not changed:
        return saved, None
    if not (saved.groups or saved.begun):
        return Saved(), None
    n_groups = len(saved.groups) + len(saved.begun)
    return Saved(), (
        f"{n_groups} groups of samples of the checkpoint were sampled in another way ({', '.join(changed)}): their "
        "prompts are answered again"
    )


def _read_kept(start: Resume) -> Sequence[SavedKept]:
    if not (folder := start.checkpoint.path / REPLAY_BUFFER).is_dir():
        return ()
    from fivefold.experience.replay_buffer import read_buffer  # here, because most runs have none

    return read_buffer(folder)


def read_waiting(folder: Path) -> Saved:
    """Return the groups that `WaitingGroups` has written to `folder`.

    Raises:
        ValueError: a file is missing or damaged.
    """
    arrays = read_arrays(folder)
    begun = _read_begun(arrays)
    return Saved(read_groups(arrays), begun)


def read_arrays(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors in a folder of a checkpoint, by key.

    Raises:
        ValueError: a file is missing or damaged.
    """
    from fivefold.bridge.dcp_folder import DCPFolder  # late, as above

    with DCPFolder(folder) as files:
        return {name: files.read(name, *(slice(0, size) for size in files.shape(name))).numpy() for name in files.names}


def read_groups(arrays: dict[str, npt.NDArray[Any]]) -> list[SavedGroup]:
    """Return the groups of `group_tensors`; `arrays` has no others."""
    if not arrays:
        return []
    rows = json.loads(arrays.pop(GROUPS).tobytes())
    lengths = arrays.pop(LENGTHS)
    values = {name.removeprefix(COLUMNS): array for name, array in arrays.items()}
    groups, first, start = [], 0, 0
    for row in rows:
        own = lengths[first : first + len(row["samples"])]
        end = start + int(own.sum())
        cuts = None if row["cuts"] is None else tuple(map(tuple, row["cuts"]))
        columns = Columns(own.astype(np.int32), {name: array[start:end] for name, array in values.items()}, cuts)
        groups.append(SavedGroup(row["place"], row["prompt"], tuple(row["token_ids"]), row["samples"], columns))
        first, start = first + len(own), end
    return groups


class Answered(Protocol):
    """A group that is answered."""

    @property
    def samples(self) -> Sequence[Sample]:
        """Its samples."""

    @property
    def batch(self) -> RemoteBatch:
        """Their sequences, in the same order."""


def group_tensors(groups: Mapping[int, Answered]) -> dict[str, Tensor]:
    """Return groups as tensors on the CPU, by key; none if there are no groups."""
    if not groups:
        return {}
    rows = [
        {
            "place": place,
            "prompt": group.samples[0].prompt.index,
            "token_ids": group.samples[0].prompt.key,
            "samples": [_fields(sample) for sample in group.samples],
            "cuts": group.batch.cuts,
        }
        for place, group in groups.items()
    ]
    sequences = [columns for group in groups.values() for columns in read_columns(group.batch, len(group.batch))]
    names = set.intersection(*(set(columns) for columns in sequences))
    columns = {
        COLUMNS + name: torch.from_numpy(np.concatenate([sequence[name] for sequence in sequences])) for name in names
    }
    lengths = torch.tensor([len(sequence["tokens"]) for sequence in sequences])
    text = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)
    return {GROUPS: text, LENGTHS: lengths, **columns}


def _begun_tensors(jobs: Mapping[int, Sequence[GenerationRequest]]) -> dict[str, Tensor]:
    """Return groups that are being answered, and have tokens, as tensors on the CPU, by key; none if there are none."""
    jobs = {place: requests for place, requests in jobs.items() if any(_has_tokens(request) for request in requests)}
    parts = [request.begun for requests in jobs.values() for request in requests if request.begun is not None]
    if not parts:
        return {}
    rows = [
        {"place": place, "token_ids": requests[0].token_ids, "begun": [_outline(each.begun) for each in requests]}
        for place, requests in jobs.items()
    ]
    whole = Begun.joined(parts)
    arrays = {f"{BEGUN}/{name}": torch.from_numpy(getattr(whole, name)) for name in BEGUN_ARRAYS}
    return {BEGUN: torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8), **arrays}


def _has_tokens(request: GenerationRequest) -> bool:
    return request.begun is not None and len(request.begun.token_ids) > 0


def _outline(begun: Begun | None) -> tuple[int, FinishReason | None] | None:
    return None if begun is None else (len(begun.token_ids), begun.finish_reason)


def _read_begun(arrays: dict[str, npt.NDArray[Any]]) -> list[BegunGroup]:
    """Return the groups of `_begun_tensors`, and take them out of `arrays`."""
    if BEGUN not in arrays:
        return []
    rows = json.loads(arrays.pop(BEGUN).tobytes())
    values = [arrays.pop(f"{BEGUN}/{name}") for name in BEGUN_ARRAYS]
    groups, start = [], 0
    for row in rows:
        begun: list[Begun | None] = []
        for outline in row["begun"]:
            if outline is None:
                begun.append(None)
                continue
            n, reason = outline
            tokens, logprobs, versions = (array[start : start + n] for array in values)
            begun.append(Begun(tokens, logprobs, versions, reason))
            start += n
        groups.append(BegunGroup(row["place"], tuple(row["token_ids"]), begun))
    return groups


def _fields(sample: Sample) -> dict[str, Any]:
    return {
        "response_text": sample.response_text,
        "finish_reason": sample.finish_reason,
        "n_tokens": sample.n_tokens,
        "n_sampled": sample.n_sampled,
        "versions": list(sample.versions),
        "rewards": dict(sample.rewards),
        "n_turns": sample.n_turns,
        "n_sequences": sample.n_sequences,
        "transcript": sample.transcript,
        "effort": astuple(sample.effort),
        "moves": [(move.start, move.n_tokens, dict(move.rewards), move.state) for move in sample.moves],
    }
