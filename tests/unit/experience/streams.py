"""Streams of samples over replicas in this process, some of which answer by a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.batch import Columns
from fivefold.config.load import load_recipe
from fivefold.config.schema.rewards import RewardConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.chosen_sampler import ChosenSampler
from fivefold.data.replay import Replay
from fivefold.data.sampler import EpochSampler
from fivefold.engine.state.dcp_files import finish
from fivefold.experience.group import Group
from fivefold.experience.replay_buffer import ReplayBuffer
from fivefold.experience.source import Source
from fivefold.experience.stream import Stream
from fivefold.experience.waiting import Saved, SavedGroup, WaitingGroups, read_waiting
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.contract import PromptReward, Reward
from fivefold.rewards.resolve import resolve_rewards
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.responses import Job, Responses
from fivefold.roles.reward_model import RewardModel
from fivefold.roles.rollout import Rollout
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.rollout.protocol import Begun, GenerationRequest, SamplingParams
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.types import Completion, Episode, Prompt
from tests.unit.experience.local_replicas import LocalGroup, LocalRollout

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
BATCH, SAMPLES, STEPS = 4, 2, 6
PATIENCE_S = 300.0
"""Seconds after which a test takes what it waits for as failed; nothing that holds depends on them."""


def arithmetic(n: int) -> list[Prompt]:
    tokenizer = load_tokenizer("fivefold/models/tiny-moe")
    texts = [f"{12 + i}+{37 + 2 * i}=" for i in range(n)]
    return [Prompt(i, text, tuple(tokenizer(text).input_ids), "") for i, text in enumerate(texts)]


def full_marks(response: str, ground_truth: Any, **_: Any) -> float:
    return 1.0


def never(version: int) -> None:
    raise AssertionError("no replica lacks weights")


def recipe_of(*overrides: str) -> TrainRecipe:
    words = ["actor.ppo_n_minibatches=1", f"train_dataset.batch_size={BATCH}", f"gconfig.n_samples={SAMPLES}"]
    return load_recipe(QUICKSTART, [*words, *overrides], TrainRecipe)


@dataclass
class Parts:
    """What a source of samples is made of."""

    recipe: TrainRecipe
    sampler: EpochSampler[Prompt]
    rollout: Rollout
    rewards: RewardSet
    timers: PhaseTimers = field(default_factory=PhaseTimers)
    reward_model: RewardModel | None = None
    told: list[str] = field(default_factory=list)
    """What the user was told."""

    @contextmanager
    def source(
        self,
        *,
        first_step: int = 1,
        last_step: int = STEPS,
        resend: Callable[[int], None] = never,
        saved: Saved | None = None,
        corrects: Callable[[], bool] = lambda: False,
        buffer: ReplayBuffer | None = None,
    ) -> Iterator[Source]:
        """Yield a source over a stream that runs inside the block."""
        sampling = SamplingParams.for_training(self.recipe)
        steps = {"first_step": first_step, "last_step": last_step}
        parts = (self.recipe, self.rollout, self.rewards, self.timers, resend, self.reward_model)
        with Stream(*parts, tell=self.told.append) as stream:
            yield Source(
                self.recipe,
                self.sampler,
                sampling,
                stream,
                self.timers,
                **steps,
                saved=saved,
                corrects=corrects,
                buffer=buffer,
            )


def common(
    recipe: TrainRecipe,
    group: LocalGroup,
    reward: Callable[..., float],
    prompts: list[Prompt],
    replays: bool = False,
    *,
    is_server: bool = False,
) -> Parts:
    size = recipe.train_dataset.batch_size
    sampler = EpochSampler(prompts, batch_size=size, shuffle=True, seed=1)
    if replays:
        choice = Replay(prompts, batch_size=size, shuffle=True, seed=1, share=0.5, at_most=0.5)
        sampler = ChosenSampler(prompts, choice, "replay", batch_size=size, shuffle=True, seed=1, fingerprint="")
    rewards = RewardSet.of(NamedReward("f", reward, None))
    return Parts(recipe, sampler, LocalRollout(group, is_server=is_server), rewards)


def wait_until(source: Source, holds: Callable[[], bool]) -> None:
    """Wait for something that the thread of the rollout brings about."""
    stream = source.stream
    with stream.changed:
        assert stream.changed.wait_for(lambda: stream._failure is not None or holds(), PATIENCE_S)
        assert stream._failure is None


def answered(source: Source) -> set[int]:
    """Return the numbers of the prompts that are answered and wait for their step."""
    return set(source._waiting())


def begun(request: GenerationRequest) -> GenerationRequest:
    one = np.zeros(1)
    return replace(request, begun=Begun(one.astype(np.int32), one.astype(np.float32), one.astype(np.int32), None))


class ScriptedWorker(RolloutWorker):
    """Answers each job in a slice of its own with one token; fails at the jobs of some prompts, dies at some slices."""

    def __init__(self, fails: frozenset[int] = frozenset(), dies: frozenset[int] = frozenset()) -> None:
        self._waiting: list[Job] = []
        self._fails = fails
        self._dies = dies
        self._n_slices = 0
        self.has_weights = True
        self.n_answered = self.n_gone_on = 0

    def take_version(self, version: int) -> None:
        self.has_weights = True

    def unfinished(self) -> dict[int, list[GenerationRequest]]:
        return {}

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
        assert self.has_weights
        self._waiting += jobs
        self._n_slices += 1
        if self._n_slices in self._dies:
            lost = {job.number: [begun(request) for request in job.requests] for job in self._waiting}
            self._waiting, self.has_weights = [], False
            report = replace(Responses.of([], [], []), lost=lost, has_weights=False)
            return replace(report, restarts=[f"it ended in slice {self._n_slices}"]), None
        job = self._waiting.pop(0)
        if job.prompt.index in self._fails:
            raise OSError("the replica is gone")
        self.n_answered += 1
        self.n_gone_on += job.requests[0].begun is not None
        trajectories = [Episode.single_turn(job.prompt, Completion.of([5], [-1.0], "stop", 0)) for _ in job.requests]
        return Responses.of([job.number], trajectories, ["5"] * len(trajectories), 0.001), Columns.of(trajectories)


def scripted(
    worker: ScriptedWorker,
    reward: Reward | PromptReward | RewardModel,
    *overrides: str,
    told: list[str] | None = None,
    **options: Any,
) -> AbstractContextManager[Source]:
    recipe = recipe_of("rollout.max_head_offpolicyness=2", *overrides)
    prompts = [Prompt(i, str(i), (3, 4), "") for i in range(40)]
    parts = common(recipe, LocalGroup([worker]), full_marks, prompts)
    parts.told = [] if told is None else told
    if isinstance(reward, RewardModel):
        parts.reward_model = reward
        parts.rewards = resolve_rewards(RewardConfig.model_validate({"fn": "model", "model": {"path": "m"}}))
    else:
        parts.rewards = RewardSet.of(NamedReward("f", reward, None, **options))
    return parts.source()


def saved(waiting: Mapping[int, Group], folder: Path) -> Sequence[SavedGroup]:
    """Write groups to the folder of a checkpoint; return what is read from it."""
    owner = WaitingGroups(lambda: waiting, dict)
    owner.snapshot(folder)
    finish(folder, owner.write_snapshot())
    return read_waiting(folder).groups
