"""Samples that are answered ahead of their step, over replicas in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.batch import Columns
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.sampler import SamplerState
from fivefold.engine.state.dcp_files import finish
from fivefold.experience import waiting
from fivefold.experience.group import Group
from fivefold.experience.source import Experience
from fivefold.experience.waiting import BegunGroup, Saved, WaitingGroups, read_waiting
from fivefold.observe.errors import RunFailed
from fivefold.roles import remote_batch
from fivefold.roles.responses import Job, Responses
from fivefold.rollout.protocol import Begun, GenerationRequest, SamplingParams, ServerCounts, complete, group_requests
from fivefold.types import Completion, Episode, FinishReason, Prompt
from tests.rows import long
from tests.unit.experience.local_replicas import EngineWorker, LocalGroup, LocalWorker
from tests.unit.experience.streams import (
    BATCH,
    PATIENCE_S,
    SAMPLES,
    STEPS,
    ScriptedWorker,
    answered,
    arithmetic,
    common,
    full_marks,
    recipe_of,
    scripted,
    wait_until,
)


def half_marks(response: str, ground_truth: Any, **_: Any) -> float:
    return float(len(response) % 2)


def told(experience: Experience) -> list[tuple[int, str, int]]:
    return [(sample.prompt.index, sample.response_text, sample.n_sampled) for sample in experience.samples]


def without_logprobs(columns: Columns) -> Columns:
    unknown = np.full_like(columns.values["rollout_logprobs"], np.nan)
    return replace(columns, values={**columns.values, "rollout_logprobs": unknown})


@pytest.fixture(scope="module")
def workers() -> list[LocalWorker]:
    return [LocalWorker(max_batch_size=6) for _ in range(2)]


def test_a_replica_reports_jobs_as_they_end_with_the_bits_of_a_whole_batch(workers: list[LocalWorker]) -> None:
    """The jobs are the last of three samples of a prompt, and whole groups of two others."""
    prompts, [worker, _] = arithmetic(3), workers
    worker.set_version(0)
    sampling = SamplingParams.for_training(recipe_of())
    requests = group_requests([prompt.token_ids for prompt in prompts], 3, ("key",))
    jobs = [Job(n, prompts[n], requests[3 * n : 3 * n + 3], sampling) for n in range(3)]
    jobs[0] = jobs[0].part(2, 3)
    reports = [worker.advance(jobs, 60.0)]
    while reports[-1][0].n_running:
        reports.append(worker.advance([], 60.0))
    assert len(reports) > 1, "all jobs are reported at the end"
    assert sorted(number for report, _ in reports for number in report.jobs) == [0, 1, 2]
    expected = complete(worker.engine, requests[2:], sampling)
    starts = {0: 0, 1: 1, 2: 4}
    for report, columns in reports:
        assert columns is not None
        wanted = [expected[starts[number] + i] for number in report.jobs for i in range(len(jobs[number].requests))]
        ends = columns.lengths_N.cumsum()
        for completion, end, length in zip(wanted, ends, columns.lengths_N, strict=True):
            own = columns.values["rollout_logprobs"][end - length : end][-len(completion.logprobs) :]
            assert own.tolist() == completion.logprobs.tolist()


@pytest.mark.parametrize("age", [1, 2])
def test_steps_have_the_samples_of_synchronous_training_if_the_weights_are_the_same(
    age: int, workers: list[LocalWorker]
) -> None:
    group, prompts = LocalGroup(workers), arithmetic(11)
    group.each("set_version", 0)

    def steps(recipe: TrainRecipe) -> Iterator[tuple[Experience, SamplerState]]:
        with common(recipe, group, full_marks, prompts).source() as source:
            source.weights_sent(0)
            for step in range(1, STEPS + 1):
                yield source.take(step), source.sampler_state
                source.weights_sent(step)

    ahead = recipe_of(f"rollout.max_head_offpolicyness={age}")
    for (mine, place), (expected, wanted) in zip(list(steps(ahead)), list(steps(recipe_of())), strict=True):
        assert told(mine) == told(expected)
        assert mine.batch.lengths_N.tolist() == expected.batch.lengths_N.tolist()
        assert place == wanted


@pytest.mark.usefixtures("local_objects")
@pytest.mark.parametrize("n_replicas", [3, *long(1)])
def test_a_synchronous_step_has_the_bits_of_equal_shares_that_are_decoded_together(n_replicas: int) -> None:
    """With three replicas, the shares of 3, 3 and 2 completions cut a group. The weights differ in each step."""
    workers = [LocalWorker(max_batch_size=BATCH * SAMPLES) for _ in range(n_replicas)]
    alone, prompts, recipe = LocalWorker(max_batch_size=BATCH * SAMPLES), arithmetic(11), recipe_of()
    group, size = LocalGroup(workers), -(-BATCH * SAMPLES // n_replicas)
    sampling = SamplingParams.for_training(recipe)
    of_each_step = []
    with common(recipe, group, full_marks, prompts).source() as source:
        for step in range(1, STEPS + 1):
            group.each("set_weights_of", step - 1)
            alone.set_weights_of(step - 1)
            source.weights_sent(step - 1)
            taken = source.take(step)
            sequences = remote_batch.read_columns(taken.batch, len(taken.batch))
            asked = [sample.prompt.token_ids for sample in taken.samples[::SAMPLES]]
            requests = group_requests(asked, SAMPLES, (recipe.seed, "train", step))
            shares = [requests[start : start + size] for start in range(0, len(requests), size)]
            wanted = [completion for share in shares for completion in complete(alone.engine, share, sampling)]
            for mine, completion in zip(sequences, wanted, strict=True):
                assert mine["tokens"][mine["mask"]].tolist() == completion.token_ids.tolist()
                assert mine["rollout_logprobs"][mine["mask"]].tolist() == completion.logprobs.tolist()
                assert set(mine["versions"][mine["mask"]]) == {step - 1}
            of_each_step.append(tuple(sequences[0]["tokens"].tolist()))
    assert len(set(of_each_step)) == STEPS, "weights differ"


@pytest.mark.parametrize("most", ["null", "3"])
def test_no_token_is_older_than_the_bound_and_weights_change_on_the_way(most: str, workers: list[LocalWorker]) -> None:
    group = LocalGroup(workers)
    recipe = recipe_of("rollout.max_head_offpolicyness=2", f"rollout.max_concurrent_rollouts={most}")
    group.each("set_version", 0)
    n_reported = n_taken = 0.0
    with common(recipe, group, full_marks, arithmetic(40)).source() as source:
        source.weights_sent(0)
        for step in range(1, STEPS + 1):
            taken = source.take(step)
            assert len(taken.samples) == len(taken.batch) == BATCH * SAMPLES
            n_taken += sum(sample.n_sampled for sample in taken.samples)
            n_reported += taken.metrics["replica_tokens/min"] + taken.metrics["replica_tokens/max"]
            assert n_taken <= n_reported <= STEPS * BATCH * SAMPLES * recipe.gconfig.max_new_tokens
            assert 0 <= taken.metrics["replica_busy/min"] <= taken.metrics["replica_busy/mean"]
            ages = [step - 1 - version for sample in taken.samples for version in sample.versions]
            assert 0 <= min(ages) <= max(ages) <= 2
            assert taken.metrics["staleness/max"] == max(ages)
            assert 0 <= taken.metrics["staleness/mean"] <= max(ages)
            assert 0 <= taken.metrics["idle/trainer"] <= 1
            assert 0 <= taken.metrics["idle/rollout"] <= 1
            group.each("set_version", step)
            source.weights_sent(step)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("rollout", "rewards"))]


class NotingWorker(ScriptedWorker):
    """Notes the prompts in the order in which they come; their completions have as many tokens as their index."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Any]:
        self.begun += [job.prompt.index for job in jobs]
        self._waiting += jobs
        job = self._waiting.pop(0)
        completion = Completion.of([5] * (1 + job.prompt.index), [-1.0] * (1 + job.prompt.index), "stop", 0)
        trajectories = [Episode.single_turn(job.prompt, completion) for _ in job.requests]
        report = Responses.of([job.number], trajectories, ["5"] * SAMPLES, 0.001)
        return replace(report, n_running=SAMPLES * len(self._waiting)), Columns.of(trajectories)


@pytest.mark.parametrize("is_server", [True, False])
def test_servers_get_the_prompts_of_each_step_with_the_longest_answers_first(is_server: bool) -> None:
    recipe = recipe_of("rollout.max_head_offpolicyness=1")
    prompts = [Prompt(i, str(i), (3, 4 + i), "") for i in range(2 * BATCH)]
    worker = NotingWorker()
    parts = common(recipe, LocalGroup([worker]), full_marks, prompts, is_server=is_server)
    taken: list[list[int]] = []
    with parts.source(last_step=4) as source:
        for step in range(1, 5):
            source.weights_sent(step - 1)
            samples = source.take(step).samples
            taken.append([sample.prompt.index for sample in samples[::SAMPLES]])
            if step == 1:  # the next step's answers tell the lengths of the other half of the prompts
                wait_until(
                    source, lambda: sum(group.rewarded is not None for group in source._waiting().values()) == BATCH
                )
    own = [worker.begun[start : start + BATCH] for start in range(0, 4 * BATCH, BATCH)]
    assert own[:2] == taken[:2], "no length is known yet"
    assert own[2:] == [sorted(step, reverse=True) if is_server else step for step in taken[2:]]
    assert taken[2:] != [sorted(step, reverse=True) for step in taken[2:]], "they are trained in the order of the data"


def test_what_fails_beside_the_trainer_ends_its_wait() -> None:
    def reward(response: str, ground_truth: Any, **_: Any) -> float:
        raise KeyError("no such answer")

    with scripted(ScriptedWorker(), reward) as source:
        source.weights_sent(0)
        with pytest.raises(ValueError, match="no such answer"):
            source.take(1)
    with scripted(ScriptedWorker(frozenset(range(40))), full_marks) as source:
        source.weights_sent(0)
        with pytest.raises(OSError, match="the replica is gone"):
            source.take(1)


@pytest.mark.parametrize("age", [0, 2])
@pytest.mark.parametrize("others", [0, 1])
def test_prompts_of_a_server_that_dies_go_to_others_or_to_its_successor(others: int, age: int) -> None:
    deadly = ScriptedWorker(dies=frozenset({2, 5}))
    workers = [deadly, *(ScriptedWorker() for _ in range(others))]
    group = LocalGroup(workers)
    sent: list[int] = []

    def send(version: int) -> None:
        sent.append(version)
        group.each("take_version", version)

    prompts = [Prompt(i, str(i), (3, 4), "") for i in range(40)]
    recipe = recipe_of(f"rollout.max_head_offpolicyness={age}")
    with common(recipe, group, full_marks, prompts, is_server=True).source(resend=send) as source:
        source.weights_sent(0)
        for step in range(1, STEPS + 1):
            numbers = source.take(step).groups
            assert len(set(numbers)) == BATCH
            assert all(numbers.count(number) == SAMPLES for number in numbers)
            # No slice begins meanwhile, so that the replica does not die between the two.
            source.stream._rollout.gate.close()
            group.each("take_version", step)
            source.weights_sent(step)
            source.stream._rollout.gate.open()
    # One that is alone gets its weights while the trainer waits for it.
    assert sent or others
    assert sum(worker.n_gone_on for worker in workers) > 0, "jobs come back with the tokens that they have"


def test_a_checkpoint_has_the_tokens_of_jobs_that_wait_for_another_server(tmp_path: Path) -> None:
    worker, told = ScriptedWorker(dies=frozenset({1})), list[str]()
    with scripted(worker, full_marks, told=told) as source:
        source.weights_sent(0)
        wait_until(source, lambda: source.stream._replicas.needs_weights)
        # While the step is under way, before the server has weights again.
        assert told == ["rollout rank 0: it ended in slice 1\nLog: logs/rollout-0.log"]
        [owner] = source.owners.values()
        owner.snapshot(tmp_path)
        finish(tmp_path, owner.write_snapshot())
        saved = read_waiting(tmp_path).begun
        assert [group.place for group in saved] == list(range(3 * BATCH))
        assert all(begun is not None and len(begun.token_ids) == 1 for group in saved for begun in group.begun)
        worker.has_weights = True
        source.weights_sent(0)
        source.take(1)
    assert source._numbered().keys().isdisjoint(range(BATCH))


class LosingEngine:
    """An engine whose server dies with each request; it has weights again at once."""

    n_running, has_weights = 0, True

    def __init__(self) -> None:
        self._lost: dict[int, GenerationRequest] = {}

    def unfinished(self) -> dict[int, GenerationRequest]:
        return {}

    def take_restarts(self) -> list[str]:
        return []

    def take_counts(self) -> ServerCounts:
        return ServerCounts()

    def take_lost(self) -> dict[int, GenerationRequest]:
        lost, self._lost = self._lost, {}
        return lost

    def submit(self, number: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        self._lost[number] = request

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        return []


def test_a_replica_knows_the_jobs_that_it_has_lost_until_its_report_was_read() -> None:
    request = GenerationRequest((3, 4), 0)
    worker = EngineWorker(LosingEngine())
    sampling = SamplingParams.for_training(recipe_of())
    report, _ = worker.advance([Job(8, Prompt(0, "", (3, 4), ""), [request], sampling)], 0.0)
    assert report.lost == worker.unfinished() == {8: [request]}
    # The next call shows that the driver has read the report.
    worker.advance([], 0.0)
    assert worker.unfinished() == {}


def test_a_rollout_that_finishes_nothing_ends_the_run() -> None:
    with scripted(ScriptedWorker(), full_marks, "scheduler.timeout_s=1") as source:
        source.stream._rollout.gate.close()
        source.weights_sent(0)
        with pytest.raises(RunFailed, match=r"no group of samples was finished for scheduler.timeout_s=1 s"):
            source.take(1)


@pytest.mark.usefixtures("local_objects")
@pytest.mark.parametrize(("after", "replays"), [(1, False), (4, False), (2, True)])
def test_a_run_that_goes_on_has_the_samples_of_one_that_was_not_interrupted(
    after: int, replays: bool, workers: list[LocalWorker], tmp_path: Path
) -> None:
    group, prompts = LocalGroup(workers), arithmetic(11)
    group.each("set_version", 0)
    recipe = recipe_of("rollout.max_head_offpolicyness=2")
    steps = range(1, STEPS + 1)
    expected, columns = {}, {}
    # At the checkpoint, the groups of one step and a half wait, and those behind them have not begun.
    numbers = range(after * BATCH, after * BATCH + BATCH + BATCH // 2)
    group.each("hold", numbers.stop)
    with common(recipe, group, half_marks, prompts, replays).source() as source:
        source.weights_sent(0)
        for step in steps:
            taken = source.take(step)
            expected[step] = told(taken)
            columns[step] = remote_batch.read_columns(taken.batch, len(taken.batch))
            group.each("set_version", step)
            source.weights_sent(step)
            if step == after:
                wait_until(source, lambda: len(answered(source)) == len(numbers))
                position, [(folder, owner)] = source.sampler_state, source.owners.items()
                assert folder == "experience"
                owner.snapshot(tmp_path)
                finish(tmp_path, owner.write_snapshot())
                group.each("hold", None)
    saved = read_waiting(tmp_path).groups
    assert sorted(group.place for group in saved) == list(range(len(numbers)))
    parts = common(recipe, group, half_marks, prompts, replays)
    parts.sampler.load_state_dict(json.loads(json.dumps(position)))
    with parts.source(first_step=after + 1, saved=Saved(saved)) as resumed:
        assert answered(resumed) == set(range(len(numbers)))
        resumed.weights_sent(after)
        for step in range(after + 1, STEPS + 1):
            taken = resumed.take(step)
            assert told(taken) == expected[step]
            for mine, theirs in zip(
                remote_batch.read_columns(taken.batch, len(taken.batch)), columns[step], strict=True
            ):
                assert mine.keys() == theirs.keys()
                assert mine["tokens"].tolist() == theirs["tokens"].tolist()
                assert mine["mask"].tolist() == theirs["mask"].tolist()
            resumed.weights_sent(step)
    # Groups are answered anew that are of another data set, of weights that are too old, too long, cut off at a lower
    # limit, or without log-probs that the loss needs.
    others = [Prompt(prompt.index, "?", (3,), "") for prompt in prompts]
    old = [replace(group, samples=[{**each, "versions": [-9, -9]} for each in group.samples]) for group in saved]
    long = [replace(group, samples=[{**each, "n_sampled": 10**6} for each in group.samples]) for group in saved]
    cut = [replace(group, samples=[{**each, "finish_reason": "length"} for each in group.samples]) for group in saved]
    unknown = [replace(group, columns=without_logprobs(group.columns)) for group in saved]
    for given, offered in ((others, saved), (prompts, old), (prompts, long), (prompts, cut), (prompts, unknown)):
        parts = common(recipe, group, half_marks, given, replays)
        parts.sampler.load_state_dict(position)
        with parts.source(first_step=after + 1, saved=Saved(offered)) as source:
            assert answered(source) == set()
    # Steps of another number of prompts take over the same ones, if they are young enough for their new step.
    for batch in (BATCH // 2, BATCH + 1):
        other = recipe_of("rollout.max_head_offpolicyness=2", f"train_dataset.batch_size={batch}")
        parts = common(other, group, half_marks, prompts, replays)
        parts.sampler.load_state_dict(position)
        with parts.source(first_step=after + 1, saved=Saved(saved)) as source:
            groups = list(source._numbered().values())
            # The rows that an epoch leaves out depend on the batch size.
            same = [each for each in saved if each.prompt_index == groups[each.place].prompt.index]
            assert answered(source) == {each.place for each in same if each.oldest >= after + each.place // batch - 2}
            assert answered(source)


@pytest.mark.parametrize(
    ("n", "reason", "logprob", "wants_logprobs", "fits"),
    [
        (7, None, -1.0, True, True),
        (8, None, -1.0, True, False),
        (7, None, np.nan, True, False),
        (7, None, np.nan, False, True),
        (8, "stop", -1.0, True, True),
        (9, "stop", -1.0, True, False),
        (8, "length", -1.0, True, True),
        (7, "length", -1.0, True, False),  # cut off at a lower limit
    ],
)
def test_completions_that_had_begun_go_on_if_the_recipe_lets_them(
    n: int, reason: FinishReason | None, logprob: float, wants_logprobs: bool, fits: bool
) -> None:
    begun = Begun(np.full(n, 5, np.int32), np.full(n, logprob, np.float32), np.zeros(n, np.int32), reason)
    requests = [GenerationRequest((3, 4), seed, wants_logprobs) for seed in range(2)]
    sampling = replace(SamplingParams.for_training(recipe_of()), max_new_tokens=8)
    assert BegunGroup(0, (3, 4), [begun, None]).fits(Group(Prompt(0, "", (3, 4), ""), requests, sampling)) == fits


@pytest.mark.usefixtures("local_objects")
def test_training_does_not_wait_until_the_tokens_of_waiting_groups_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted(ScriptedWorker(), full_marks) as source:
        source.weights_sent(0)
        source.take(1)
        wait_until(source, lambda: len(answered(source)) == 2 * BATCH)
        [owner] = source.owners.values()
        with monkeypatch.context() as patched:
            patched.setattr(waiting, "read_columns", None)
            owner.snapshot(tmp_path)
        source.take(2)  # its groups are in the checkpoint nevertheless
        finish(tmp_path, owner.write_snapshot())
        assert owner.write_snapshot(), "an owner that fails behind this one has all of them write again"
    assert sorted(group.place for group in read_waiting(tmp_path).groups) == list(range(2 * BATCH))


def test_no_groups_wait_at_the_end(tmp_path: Path) -> None:
    owner = WaitingGroups(dict, dict)
    owner.snapshot(tmp_path)
    finish(tmp_path, owner.write_snapshot())
    saved = read_waiting(tmp_path)
    assert (saved.groups, saved.begun) == ([], [])


def test_weights_that_come_beside_a_step_let_prompts_begin_when_they_are_there() -> None:
    worker, may_give = ScriptedWorker(), threading.Event()

    def give() -> None:
        assert may_give.wait(PATIENCE_S)

    with scripted(worker, full_marks) as source:
        source.weights_sent(0)
        source.take(1)
        source.weights_follow(1, give)
        for step in (2, 3):  # samples of the weights before
            assert len(source.take(step).samples) == BATCH * SAMPLES
        assert worker.n_answered == 3 * BATCH
        may_give.set()
        source.stream.settle()
        assert len(source.take(4).samples) == BATCH * SAMPLES


def test_weights_that_fail_beside_a_step_end_it_and_name_the_failure() -> None:
    def give() -> None:
        raise OSError("the engine refuses the weights")

    with scripted(ScriptedWorker(), full_marks) as source:
        source.weights_sent(0)
        source.weights_follow(1, give)
        with pytest.raises(OSError, match="the engine refuses the weights"):
            source.stream.settle()
        with pytest.raises(OSError, match="the engine refuses the weights"):
            source.take(4)
