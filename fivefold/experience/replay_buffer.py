"""Groups that were trained and may be trained again, and which of them a step trains besides its new ones.

    new groups of step s ──> step s ──> buffer ──choose──> steps s + cooldown_steps, ...
                                          └── dropped: trained max_uses times, or older than max_age

    priority = version - decay * uses + sigma * z

`version` is the oldest version of the weights that sampled one of the group's tokens, `uses` the number of steps that
have trained it, and z is drawn from a normal distribution, by the seed, the step and the group alone. Of equals, the
group that was sampled first is chosen. The samples keep their rewards and the log-probs with which they were sampled.

    replay_buffer/   as in waiting.py, with rewards, and
                     uses   uint8, JSON: uses, step of the last one, weights of the rewards and what counts as right
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from fivefold.config.schema.rollout import ReplayBufferConfig
from fivefold.experience.group import Group
from fivefold.experience.waiting import SavedGroup, group_tensors, read_arrays, read_groups
from fivefold.rewards.token_rewards import TokenRewards
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.types import Prompt, Sample

if TYPE_CHECKING:
    from fivefold.engine.state.dcp_files import WrittenPart

USES = "uses"


@dataclass(frozen=True, eq=False)
class Kept:
    """A group that was trained."""

    number: int
    """Place in the order in which groups were trained first."""
    samples: Sequence[Sample]
    """Its samples, with all rewards."""
    batch: RemoteBatch
    """Their sequences, in the same order."""
    uses: int
    """Number of steps that have trained it."""
    used_at: int
    """The last of these steps, counted from 0."""

    @property
    def prompt(self) -> Prompt:
        """The prompt of all samples."""
        return self.samples[0].prompt

    @property
    def version(self) -> int:
        """Oldest version of the weights that sampled a token."""
        return min(sample.versions[0] for sample in self.samples if sample.n_sampled)


class ReplayBuffer:
    """The buffer. Checkpoints take it as a `StateOwner`."""

    def __init__(self, config: ReplayBufferConfig, seed: int, kept: Iterable[Kept] = ()) -> None:
        """Begin with the groups of a checkpoint, if there are any."""
        self._config = config
        self._seed = seed
        self._kept = {each.number: each for each in kept}
        self._n_added = max(self._kept, default=-1) + 1
        self._moment: tuple[Path, list[Kept]] | None = None
        """What the last snapshot has, until it is on the disk."""
        self._written: list[WrittenPart] = []

    def choose(self, turn: int, fresh: Collection[int]) -> list[Kept]:
        """Return the groups that a step trains again, and count their use.

        Args:
            turn: the step, counted from 0, which is the version of the weights that it trains.
            fresh: indices of its new prompts. A step has no prompt as two groups.
        """
        config = self._config
        self._kept = {
            number: each
            for number, each in self._kept.items()
            if each.uses < config.max_uses and turn - each.version <= config.max_age
        }
        ready = [each for each in self._kept.values() if turn - each.used_at >= config.cooldown_steps]
        taken, chosen = set(fresh), list[Kept]()
        for each in sorted(ready, key=lambda each: (-self._priority(each, turn), each.number)):
            if len(chosen) < config.batch_size and each.prompt.index not in taken:
                taken.add(each.prompt.index)
                chosen.append(each)
        self._kept |= {each.number: replace(each, uses=each.uses + 1, used_at=turn) for each in chosen}
        return chosen

    def add(self, groups: Iterable[Group], turn: int) -> None:
        """Keep groups that the step `turn`, counted from 0, trains for the first time."""
        for group in groups:
            if any(sample.n_sampled for sample in group.finished):
                self._kept[self._n_added] = Kept(self._n_added, group.finished, group.finished_batch, 1, turn)
                self._n_added += 1

    def metrics(self, chosen: Sequence[Kept], n_groups: int, turn: int) -> dict[str, float]:
        """Return the share of the groups of a step that are trained again, their ages and uses, and the buffer's size.

        Args:
            chosen: the groups that the step trains again.
            n_groups: all groups of the step.
            turn: the step, counted from 0.
        """
        found = {"reuse/share": len(chosen) / n_groups, "reuse/kept": float(len(self._kept))}
        if not chosen:
            return found
        ages, uses = [turn - each.version for each in chosen], [each.uses for each in chosen]
        return found | {
            "reuse/age": fmean(ages),
            "reuse/age/max": float(max(ages)),
            "reuse/uses": fmean(uses),
            "reuse/uses/max": float(max(uses)),
        }

    def _priority(self, kept: Kept, turn: int) -> float:
        config = self._config
        noise = random.Random(f"{self._seed}-{turn}-{kept.number}").gauss(0, config.sigma) if config.sigma else 0.0
        return kept.version - config.decay * kept.uses + noise

    def snapshot(self, folder: Path) -> None:
        """Keep the groups of this moment for `write_snapshot`. They never change, so that nothing is copied."""
        self._moment = (folder, list(self._kept.values()))

    def write_snapshot(self) -> list[WrittenPart]:
        """Write the groups of the last snapshot, whose tokens come to this process for it.

        Raises:
            OSError: a file cannot be written.
        """
        from fivefold.engine.state.state_store import StateWriter  # late: a driver needs torch's library only for this

        if self._moment is not None:
            folder, kept = self._moment
            tensors = group_tensors({each.number: each for each in kept})
            if kept:
                rows = json.dumps([_used(each) for each in kept]).encode()
                tensors[USES] = torch.frombuffer(bytearray(rows), dtype=torch.uint8)
            self._written = [StateWriter(0, ()).snapshot(folder, (), tensors).write()]
            self._moment = None
        return self._written


def _used(kept: Kept) -> dict[str, Any]:
    first = kept.samples[0]
    return {
        "uses": kept.uses,
        "used_at": kept.used_at,
        "weights": dict(first.weights),
        "accuracy_of": first.accuracy_of,
        "token_rewards": [_of_tokens(sample) for sample in kept.samples],
    }


def _of_tokens(sample: Sample) -> dict[str, tuple[float, Sequence[float], Sequence[int]]]:
    """Return the rewards of single tokens, by the reward's name; the samples of a checkpoint have only their sum."""
    return {
        name: (float(reward), reward.values, reward.places)
        for name, reward in sample.rewards.items()
        if isinstance(reward, TokenRewards)
    }


@dataclass(frozen=True, eq=False)
class SavedKept:
    """A group of the buffer in a checkpoint."""

    group: SavedGroup
    """Its place is the number in the buffer."""
    used: Mapping[str, Any]

    def restored(self, prompt: Prompt) -> Kept:
        """Return the group, whose tokens are put into the object store."""
        answer, used = self.group.restored(prompt), self.used
        samples = [
            sample.rewarded(
                {name: TokenRewards(*parts) for name, parts in of_tokens.items()}, used["weights"], used["accuracy_of"]
            )
            for sample, of_tokens in zip(answer.samples, used["token_rewards"], strict=True)
        ]
        return Kept(self.group.place, samples, answer.batch, used["uses"], used["used_at"])


def read_buffer(folder: Path) -> list[SavedKept]:
    """Return the groups that a `ReplayBuffer` has written to `folder`.

    Raises:
        ValueError: a file is missing or damaged.
    """
    arrays = read_arrays(folder)
    if not arrays:
        return []
    used = json.loads(arrays.pop(USES).tobytes())
    return [SavedKept(group, each) for group, each in zip(read_groups(arrays), used, strict=True)]


def restored(saved: Iterable[SavedKept], prompts: Iterable[Prompt]) -> list[Kept]:
    """Return the groups of a checkpoint whose prompts are in the data."""
    by_index = {prompt.index: prompt for prompt in prompts}
    return [
        each.restored(prompt)
        for each in saved
        if (prompt := by_index.get(each.group.prompt_index)) and prompt.key == each.group.key
    ]
