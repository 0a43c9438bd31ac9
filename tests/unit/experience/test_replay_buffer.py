"""Groups that are trained again: which, by a replay of the whole history in plain Python; and after a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.batch import Columns
from fivefold.config.schema.rollout import ReplayBufferConfig
from fivefold.engine.state.dcp_files import finish
from fivefold.experience.group import Group
from fivefold.experience.replay_buffer import Kept, ReplayBuffer, read_buffer, restored
from fivefold.rewards.token_rewards import TokenRewards
from fivefold.roles import remote_batch
from fivefold.roles.remote_batch import Piece, RemoteBatch, read_columns
from fivefold.roles.responses import Answer
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.types import Prompt, Sample
from tests.unit.experience.local_replicas import LocalGroup, LocalWorker
from tests.unit.experience.streams import BATCH, SAMPLES, STEPS, arithmetic, common, recipe_of

N_PROMPTS = 9
SAMPLING = SamplingParams.for_training(recipe_of())


def prompt(index: int) -> Prompt:
    return Prompt(index, f"?{index}", (1, index), "", extra_info={"of": index})


def group(index: int, versions: list[int], draw: random.Random) -> Group:
    """Return a rewarded group, with one sample for each version, whose tokens are numbers drawn at random."""
    lengths = [draw.randint(3, 6) for _ in versions]
    n = sum(lengths)
    values: dict[str, Any] = {
        "tokens": np.array([draw.randrange(50) for _ in range(n)], np.int32),
        "mask": np.ones(n, bool),
        "rollout_logprobs": np.array([-draw.random() for _ in range(n)], np.float32),
        "versions": np.repeat(np.array(versions, np.int32), lengths),
    }
    columns: Any = Columns(np.array(lengths, np.int32), values)
    batch = RemoteBatch(np.array(lengths), np.array(lengths), (Piece(columns, np.arange(len(lengths))),))
    samples = [
        Sample(prompt(index), "text", "stop", length, length - 2, (version, version + 1))
        for length, version in zip(lengths, versions, strict=True)
    ]
    found = Group(samples[0].prompt, [GenerationRequest((1, index), 0)] * len(versions), SAMPLING)
    found.add(Answer(0, 0, samples, batch))
    weights = {"a": 1.0, "b": 0.5}
    found.rewarded = [
        sample.rewarded({"a": draw.random(), "b": TokenRewards(0.75, (0.25, draw.random()), (0, 2))}, weights, "a")
        for sample in samples
    ]
    return found


def steps(n: int, draw: random.Random, first: int = 0) -> Iterator[tuple[int, list[Group]]]:
    """Yield the number of each step, and its new groups, of weights that are up to two versions old."""
    for turn in range(first, first + n):
        indices = draw.sample(range(N_PROMPTS), 3)
        yield turn, [group(index, [max(0, turn - draw.randint(0, 2)) for _ in range(2)], draw) for index in indices]


def told(chosen: list[Kept]) -> list[tuple[int, int, int]]:
    return [(each.number, each.uses, each.used_at) for each in chosen]


def by_hand(history: list[dict[str, Any]], turn: int, fresh: set[int], config: ReplayBufferConfig) -> list[int]:
    """Return what a step trains again, from all that was ever trained: one group after the other, the best first."""
    taken, chosen = set(fresh), list[int]()
    while len(chosen) < config.batch_size:
        best = None
        for number, row in enumerate(history):
            oldest = min(row["versions"])
            may = (
                len(row["trained"]) < config.max_uses
                and turn - oldest <= config.max_age
                and turn - row["trained"][-1] >= config.cooldown_steps
                and row["prompt"] not in taken
            )
            priority = oldest - config.decay * len(row["trained"])
            if may and (best is None or priority > best[0]):
                best = (priority, number)
        if best is None:
            break
        chosen.append(best[1])
        taken.add(history[best[1]]["prompt"])
    for number in chosen:
        history[number]["trained"].append(turn)
    return chosen


def test_the_groups_of_the_largest_priority_are_trained_again_within_all_bounds() -> None:
    again = 0
    for seed in range(40):
        draw = random.Random(seed)
        config = ReplayBufferConfig(
            batch_size=draw.randint(1, 5), max_age=draw.randint(3, 8), max_uses=draw.randint(2, 4),
            cooldown_steps=draw.randint(1, 3), decay=draw.choice([0.0, 0.5, 2.0]),
        )  # fmt: skip
        buffer, history = ReplayBuffer(config, seed), list[dict[str, Any]]()
        for turn, new in steps(14, draw):
            fresh = {each.prompt.index for each in new}
            chosen = buffer.choose(turn, fresh)
            buffer.add(new, turn)
            assert [each.number for each in chosen] == by_hand(history, turn, fresh, config)
            history += [
                {
                    "prompt": each.prompt.index,
                    "versions": [sample.versions[0] for sample in each.samples],
                    "trained": [turn],
                }
                for each in new
            ]
            again += len(chosen)
            if chosen:
                measured = buffer.metrics(chosen, len(new) + len(chosen), turn)
                ages = [turn - min(history[each.number]["versions"]) for each in chosen]
                uses = [len(history[each.number]["trained"]) - 1 for each in chosen]
                assert measured["reuse/age/max"] == max(ages) <= config.max_age
                assert measured["reuse/uses"] == pytest.approx(sum(uses) / len(uses))
                assert measured["reuse/share"] == len(chosen) / (len(new) + len(chosen))
    assert again > 300


def test_noise_changes_the_order_and_is_drawn_by_seed_step_and_group() -> None:
    def run(seed: int, sigma: float) -> list[list[int]]:
        buffer = ReplayBuffer(ReplayBufferConfig(batch_size=2, max_age=6, sigma=sigma), seed)
        found = []
        for turn, new in steps(10, random.Random(1)):
            found.append([each.number for each in buffer.choose(turn, ())])
            buffer.add(new, turn)
        return found

    assert run(1, 3.0) == run(1, 3.0)
    assert run(1, 3.0) != run(1, 0.0)
    assert run(1, 3.0) != run(2, 3.0)


@pytest.mark.usefixtures("local_objects")
def test_a_run_that_goes_on_from_a_checkpoint_chooses_the_same_groups_with_the_same_bits(tmp_path: Path) -> None:
    config = ReplayBufferConfig(batch_size=3, max_age=6, max_uses=4, decay=0.5, sigma=1.0)
    draw, buffer = random.Random(3), ReplayBuffer(config, 5)
    for turn, new in steps(6, draw):
        buffer.choose(turn, {each.prompt.index for each in new})
        buffer.add(new, turn)
    buffer.snapshot(tmp_path)
    later = list(steps(6, draw, first=6))

    def go_on(buffer: ReplayBuffer) -> Iterator[Kept]:
        for turn, new in later:
            yield from buffer.choose(turn, {each.prompt.index for each in new})
            buffer.add(new, turn)

    whole = list(go_on(buffer))
    finish(tmp_path, buffer.write_snapshot())  # what came after the snapshot is not in it
    saved = read_buffer(tmp_path)
    resumed = list(go_on(ReplayBuffer(config, 5, restored(saved, map(prompt, range(N_PROMPTS))))))
    assert told(resumed) == told(whole)
    assert len(whole) > 10
    for mine, other in zip(resumed, whole, strict=True):
        assert mine.samples == other.samples
        assert [sample.reward for sample in mine.samples] == [sample.reward for sample in other.samples]
        for own, theirs in zip(mine.samples, other.samples, strict=True):
            assert vars(own.rewards["b"]) == vars(theirs.rewards["b"])
        assert [sample.is_right for sample in mine.samples] == [sample.is_right for sample in other.samples]
        for own, theirs in zip(read_columns(mine.batch, 9), read_columns(other.batch, 9), strict=True):
            assert own.keys() == theirs.keys()
            assert all(own[name].tobytes() == theirs[name].tobytes() for name in own)
    assert restored(saved, [Prompt(index, "", (7,), "") for index in range(N_PROMPTS)]) == []


@pytest.mark.usefixtures("local_objects")
def test_an_empty_buffer_is_a_part_of_a_checkpoint_too(tmp_path: Path) -> None:
    buffer = ReplayBuffer(ReplayBufferConfig(batch_size=1, max_age=3), 1)
    buffer.snapshot(tmp_path)
    finish(tmp_path, buffer.write_snapshot())
    assert read_buffer(tmp_path) == []


@pytest.mark.usefixtures("local_objects")
def test_a_step_trains_old_groups_after_its_new_ones_with_the_log_probs_of_their_sampling() -> None:
    """Over replicas in this process, whose weights stay the same."""
    config = ReplayBufferConfig(batch_size=2, max_age=5, max_uses=2)
    replicas = LocalGroup([LocalWorker(max_batch_size=6)])
    replicas.each("set_version", 0)

    def reward(response: str, ground_truth: Any, **_: Any) -> float:
        return float(len(response) % 2)

    first: dict[int, list[Any]] = {}
    recipe = recipe_of("rollout.max_head_offpolicyness=1")
    with common(recipe, replicas, reward, arithmetic(40)).source(buffer=ReplayBuffer(config, 1)) as source:
        source.weights_sent(0)
        for step in range(1, STEPS + 1):
            experience = source.take(step)
            columns = read_columns(experience.batch, len(experience.batch))
            n_groups = len(set(experience.groups))
            assert n_groups == BATCH + (0 if step == 1 else 2)
            assert (len(experience.new), experience.n_again) == (BATCH * SAMPLES, (n_groups - BATCH) * SAMPLES)
            assert experience.metrics["reuse/share"] == pytest.approx((n_groups - BATCH) / n_groups)
            for place, index in enumerate(experience.groups):
                bits = (columns[place]["tokens"].tobytes(), columns[place]["rollout_logprobs"].tobytes())
                own = (*bits, experience.samples[place].reward)
                if place < BATCH * SAMPLES:
                    first.setdefault(index, []).append(own)
                else:
                    assert own in first[index]
            source.weights_sent(step)


def test_the_columns_of_a_batch_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step adds to its batch is not in the buffer: scalars, spans and untrained samples are of the copy."""
    monkeypatch.setattr(remote_batch, "put", lambda columns: columns)
    buffer = ReplayBuffer(ReplayBufferConfig(batch_size=1, max_age=3), 1)
    own = group(0, [0, 0], random.Random(1))
    buffer.add([own], 0)
    RemoteBatch.joined([own.finished_batch]).with_scalars(advantages=np.ones(2, np.float32)).untrained([0])
    [kept] = buffer.choose(1, ())
    assert not kept.batch.scalars
    assert (kept.batch.trained_N > 0).all()
