"""Samples that are answered ahead of their step, over replicas in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.engine.state.dcp_files import finish
from fivefold.experience import waiting
from fivefold.experience.source import Experience
from fivefold.experience.step import StepSource
from fivefold.experience.stream import StreamSource
from fivefold.experience.waiting import BegunGroup, Saved, WaitingGroups, read_waiting
from fivefold.observe.errors import RunFailed
from fivefold.roles import remote_batch
from fivefold.roles.responses import Responses
from fivefold.roles.rollout_worker import Job
from fivefold.rollout.protocol import Begun, GenerationRequest, SamplingParams, group_requests
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.types import Columns, Completion, FinishReason, Prompt, Trajectory
from tests.unit.experience.local_replicas import EngineWorker, LocalGroup, LocalRollout, LocalWorker
from tests.unit.experience.streams import (
    BATCH,
    PATIENCE_S,
    SAMPLES,
    STEPS,
    ScriptedWorker,
    common,
    full_marks,
    never,
    recipe_of,
    scripted,
    wait_until,
)


def half_marks(response: str, ground_truth: Any, **_: Any) -> float:
    return float(len(response) % 2)


def arithmetic(n: int) -> list[Prompt]:
    tokenizer = load_tokenizer("fivefold/models/tiny-moe")
    texts = [f"{12 + i}+{37 + 2 * i}=" for i in range(n)]
    return [Prompt(i, text, tuple(tokenizer(text).input_ids), "") for i, text in enumerate(texts)]


def told(experience: Experience) -> list[tuple[int, str, int]]:
    return [(sample.prompt.index, sample.response_text, sample.n_sampled) for sample in experience.samples]


def without_logprobs(columns: Columns) -> Columns:
    unknown = np.full_like(columns.values["rollout_logprobs"], np.nan)
    return replace(columns, values={**columns.values, "rollout_logprobs": unknown})


@pytest.fixture(scope="module")
def workers() -> list[LocalWorker]:
    return [LocalWorker(max_batch_size=6) for _ in range(2)]


def test_a_replica_reports_groups_as_they_end_with_the_bits_of_a_whole_batch(workers: list[LocalWorker]) -> None:
    """The job has the last of three samples of a prompt, and whole groups of two others."""
    recipe, prompts, [worker, _] = recipe_of(), arithmetic(3), workers
    worker.set_version(0)
    sampling = SamplingParams.for_training(recipe)
    requests = group_requests([prompt.token_ids for prompt in prompts], 3, ("key",))[2:]
    job = Job(range(2, 9), [prompts[index // 3] for index in range(2, 9)], requests)
    reports = [(report.indices_N.tolist(), columns) for report, columns in worker.generate(iter([job]), sampling, 3)]
    assert len(reports) > 1, "all groups are reported at the end"
    assert sorted(index for indices, _ in reports for index in indices) == list(range(2, 9))
    for indices, _ in reports:
        assert all({i for i in range(2, 9) if i // 3 == index // 3} <= set(indices) for index in indices)
    expected = worker._engine.generate(requests, sampling)
    for indices, columns in reports:
        assert columns is not None
        ends = columns.lengths_N.cumsum()
        for index, end, length in zip(indices, ends, columns.lengths_N, strict=True):
            completion = expected[index - 2]
            own = columns.values["rollout_logprobs"][end - length : end][-len(completion.logprobs) :]
            assert own.tolist() == completion.logprobs.tolist()


@pytest.mark.parametrize("age", [0, 2])
def test_steps_have_the_samples_of_synchronous_training_if_the_weights_are_the_same(
    age: int, workers: list[LocalWorker]
) -> None:
    group, prompts = LocalGroup(workers), arithmetic(11)
    group.each("set_version", 0)
    synchronous = StepSource(*common(recipe_of(), group, full_marks, prompts), lambda: False)
    expected = [synchronous.take(step) for step in range(1, STEPS + 1)]
    recipe = recipe_of().model_copy(
        update={"rollout": recipe_of().rollout.model_copy(update={"max_head_offpolicyness": age})}
    )
    with StreamSource(
        *common(recipe, group, full_marks, prompts), first_step=1, last_step=STEPS, resend=never
    ) as source:
        source.weights_sent(0)
        for step in range(1, STEPS + 1):
            taken = source.take(step)
            assert told(taken) == told(expected[step - 1])
            assert taken.batch.lengths_N.tolist() == expected[step - 1].batch.lengths_N.tolist()
            source.weights_sent(step)
        assert source.sampler_state == synchronous.sampler_state


@pytest.mark.usefixtures("local_objects")
def test_a_stream_of_age_0_has_the_bits_of_synchronous_training() -> None:
    """One replica decodes the completions of a step together, with other weights in each step."""
    worker, prompts, recipe = LocalWorker(max_batch_size=BATCH * SAMPLES), arithmetic(11), recipe_of()
    group = LocalGroup([worker])

    def columns(source: StepSource | StreamSource) -> list[dict[str, list[float]]]:
        taken = []
        for step in range(1, STEPS + 1):
            worker.set_weights_of(step - 1)
            source.weights_sent(step - 1)
            batch = source.take(step).batch
            taken += [
                {name: values.tolist() for name, values in sequence.items()}
                for sequence in remote_batch.read_columns(batch, len(batch))
            ]
        return taken

    synchronous = columns(StepSource(*common(recipe, group, full_marks, prompts), lambda: False))
    with StreamSource(
        *common(recipe, group, full_marks, prompts), first_step=1, last_step=STEPS, resend=never
    ) as source:
        assert columns(source) == synchronous
    assert {version for each in synchronous for version in each["versions"]} == {-1, *range(STEPS)}
    of_each_step = [each["tokens"] for each in synchronous[:: BATCH * SAMPLES]]
    assert len({tuple(tokens) for tokens in of_each_step}) == STEPS, "weights differ"


@pytest.mark.parametrize("most", ["null", "3"])
def test_no_token_is_older_than_the_bound_and_weights_change_on_the_way(most: str, workers: list[LocalWorker]) -> None:
    group = LocalGroup(workers)
    recipe = recipe_of("rollout.max_head_offpolicyness=2", f"rollout.max_concurrent_rollouts={most}")
    group.each("set_version", 0)
    n_reported = n_taken = 0.0
    with StreamSource(
        *common(recipe, group, full_marks, arithmetic(40)), first_step=1, last_step=STEPS, resend=never
    ) as source:
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

    def advance(self, jobs: Sequence[Job], sampling: SamplingParams, seconds: float) -> tuple[Responses, Any]:
        self.begun += [job.prompts[0].index for job in jobs]
        self._waiting += jobs
        job = self._waiting.pop(0)
        completion = Completion.of([5] * (1 + job.prompts[0].index), [-1.0] * (1 + job.prompts[0].index), "stop", 0)
        trajectories = [Trajectory.single_turn(prompt, completion) for prompt in job.prompts]
        report = Responses.of(list(job.indices), trajectories, ["5"] * SAMPLES, 0.001)
        return replace(report, n_running=SAMPLES * len(self._waiting)), Columns.of(trajectories)


@pytest.mark.parametrize("is_server", [True, False])
def test_servers_get_the_prompts_of_each_step_with_the_longest_answers_first(is_server: bool) -> None:
    recipe = recipe_of("rollout.max_head_offpolicyness=1")
    prompts = [Prompt(i, str(i), (3, 4 + i), "") for i in range(2 * BATCH)]
    worker = NotingWorker()
    arguments = list(common(recipe, LocalGroup([worker]), full_marks, prompts))
    arguments[2] = LocalRollout(LocalGroup([worker]), is_server=is_server)
    taken: list[list[int]] = []
    with StreamSource(*arguments, first_step=1, last_step=4, resend=never) as source:
        for step in range(1, 5):
            source.weights_sent(step - 1)
            samples = source.take(step).samples
            taken.append([sample.prompt.index for sample in samples[::SAMPLES]])
            if step == 1:  # the next step's answers tell the lengths of the other half of the prompts
                wait_until(source, lambda: len(source._judged) == BATCH)
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


@pytest.mark.parametrize("others", [0, 1])
def test_prompts_of_a_server_that_dies_go_to_others_or_to_its_successor(others: int) -> None:
    deadly = ScriptedWorker(dies=frozenset({2, 5}))
    workers = [deadly, *(ScriptedWorker() for _ in range(others))]
    group = LocalGroup(workers)
    sent: list[int] = []

    def send(version: int) -> None:
        sent.append(version)
        group.each("take_version", version)

    prompts = [Prompt(i, str(i), (3, 4), "") for i in range(40)]
    arguments = common(recipe_of("rollout.max_head_offpolicyness=2"), group, full_marks, prompts)
    with StreamSource(*arguments, first_step=1, last_step=STEPS, resend=send) as source:
        source.weights_sent(0)
        for step in range(1, STEPS + 1):
            numbers = source.take(step).groups
            assert len(set(numbers)) == BATCH
            assert all(numbers.count(number) == SAMPLES for number in numbers)
            # No slice begins meanwhile, so that the replica does not die between the two.
            source._rollout.gate.close()
            group.each("take_version", step)
            source.weights_sent(step)
            source._rollout.gate.open()
    # One that is alone gets its weights while the trainer waits for it.
    assert sent or others
    assert sum(worker.n_gone_on for worker in workers) > 0, "jobs come back with the tokens that they have"


def test_a_checkpoint_has_the_tokens_of_jobs_that_wait_for_another_server(tmp_path: Path) -> None:
    worker = ScriptedWorker(dies=frozenset({1}))
    with scripted(worker, full_marks) as source:
        source.weights_sent(0)
        wait_until(source, lambda: source._stream.needs_weights)
        [owner] = source.owners.values()
        owner.snapshot(tmp_path)
        finish(tmp_path, owner.write_snapshot())
        saved = read_waiting(tmp_path).begun
        assert [group.number for group in saved] == list(range(3 * BATCH))
        assert all(begun is not None and len(begun.token_ids) == 1 for group in saved for begun in group.begun)
        assert source.take_news() == "servers have died or hung, and were started again: see logs/rollout-0.log"
        assert source.take_news() is None
        worker.has_weights = True
        source.weights_sent(0)
        source.take(1)
    assert source._so_far.keys().isdisjoint(range(BATCH))


class LosingEngine:
    """An engine whose server has died with a job; it has weights again."""

    n_running, has_weights = 0, True

    def __init__(self, lost: dict[int, list[GenerationRequest]]) -> None:
        self._lost = lost

    def unfinished(self) -> dict[int, list[GenerationRequest]]:
        return {}

    def take_lost(self) -> dict[int, list[GenerationRequest]]:
        lost, self._lost = self._lost, {}
        return lost

    def submit(self, number: int, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> None:
        """Take a job and do nothing with it."""

    def collect(self, seconds: float) -> list[tuple[int, list[Completion]]]:
        return []


def test_a_replica_knows_the_jobs_that_it_has_lost_until_its_report_was_read() -> None:
    request = GenerationRequest((3, 4), 0)
    worker = EngineWorker(LosingEngine({8: [request]}))
    sampling = SamplingParams.for_training(recipe_of())
    report, _ = worker.advance([Job(range(8, 9), [Prompt(0, "", (3, 4), "")], [request])], sampling, 0.0)
    assert report.lost == worker.unfinished() == {8: [request]}
    # The next call shows that the driver has read the report.
    worker.advance([], sampling, 0.0)
    assert worker.unfinished() == {}


def test_a_rollout_that_finishes_nothing_ends_the_run() -> None:
    with scripted(ScriptedWorker(), full_marks, "scheduler.timeout_s=1") as source:
        source._rollout.gate.close()
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
    group.each("hold", numbers.stop * SAMPLES)
    with StreamSource(
        *common(recipe, group, half_marks, prompts, replays), first_step=1, last_step=STEPS, resend=never
    ) as source:
        source.weights_sent(0)
        for step in steps:
            taken = source.take(step)
            expected[step] = told(taken)
            columns[step] = remote_batch.read_columns(taken.batch, len(taken.batch))
            group.each("set_version", step)
            source.weights_sent(step)
            if step == after:
                wait_until(source, lambda: len(source._groups) == len(numbers))
                position, [(folder, owner)] = source.sampler_state, source.owners.items()
                assert folder == "experience"
                owner.snapshot(tmp_path)
                finish(tmp_path, owner.write_snapshot())
                group.each("hold", None)
    saved = read_waiting(tmp_path).groups
    assert sorted(group.number for group in saved) == list(numbers)
    arguments = common(recipe, group, half_marks, prompts, replays)
    arguments[1].load_state_dict(json.loads(json.dumps(position)))
    with StreamSource(*arguments, first_step=after + 1, last_step=STEPS, resend=never, saved=Saved(saved)) as resumed:
        assert resumed._groups.keys() == set(numbers)
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
        arguments = common(recipe, group, half_marks, given, replays)
        arguments[1].load_state_dict(position)
        source = StreamSource(*arguments, first_step=after + 1, last_step=STEPS, resend=never, saved=Saved(offered))
        assert source._groups == {}


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
    assert BegunGroup(0, (3, 4), [begun, None]).fits(Prompt(0, "", (3, 4), ""), requests, 8) == fits


@pytest.mark.usefixtures("local_objects")
def test_training_does_not_wait_until_the_tokens_of_waiting_groups_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted(ScriptedWorker(), full_marks) as source:
        source.weights_sent(0)
        source.take(1)
        wait_until(source, lambda: len(source._groups) == 2 * BATCH)
        [owner] = source.owners.values()
        with monkeypatch.context() as patched:
            patched.setattr(waiting, "read_columns", None)
            owner.snapshot(tmp_path)
        source.take(2)  # its groups are in the checkpoint nevertheless
        finish(tmp_path, owner.write_snapshot())
        assert owner.write_snapshot(), "an owner that fails behind this one has all of them write again"
    assert sorted(group.number for group in read_waiting(tmp_path).groups) == list(range(BATCH, 3 * BATCH))


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
        source.settle()
        assert len(source.take(4).samples) == BATCH * SAMPLES


def test_weights_that_fail_beside_a_step_end_it_and_name_the_failure() -> None:
    def give() -> None:
        raise OSError("the engine refuses the weights")

    with scripted(ScriptedWorker(), full_marks) as source:
        source.weights_sent(0)
        source.weights_follow(1, give)
        with pytest.raises(OSError, match="the engine refuses the weights"):
            source.settle()
        with pytest.raises(OSError, match="the engine refuses the weights"):
            source.take(4)
