"""Reinforcement learning: the roles are started, then one loop runs.

prompts ─> rollout ─> rewards ─> (reference) ─> advantages ─> mini-batches ─> actor
   ^                                                                            │
next step <──────────────── rollout engines <──────────────── new weights <─────┘
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fivefold.config.load import resolved_yaml
from fivefold.config.schema import TrainRecipe
from fivefold.data.prompts import PromptDataset, load_prompts
from fivefold.evaluate import Evaluation, Evaluator, check_requests
from fivefold.experience.samples import as_record, extremes, sample_metrics
from fivefold.experience.step import StepSource
from fivefold.families.check import describe
from fivefold.families.flops import training_flops
from fivefold.observe.jsonl import JsonLines
from fivefold.observe.metrics import MetricsLog
from fivefold.observe.run_dir import RunDir
from fivefold.observe.table import TRAIN_COLUMNS
from fivefold.observe.versions import versions
from fivefold.rewards.compute import check_ground_truths
from fivefold.rewards.resolve import resolve_reward
from fivefold.rewards.reward import NamedReward
from fivefold.roles.launch import Roles, launch_roles, replica_spec
from fivefold.roles.opening import Groundwork, OpenRun, lay_groundwork, open_run
from fivefold.roles.policy_update import PolicyUpdate
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.rollout.engines import check_server
from fivefold.rollout.protocol import SamplingParams


@dataclass(frozen=True)
class TrainSetup:
    """A run as it is known before a process is started."""

    recipe: TrainRecipe
    ground: Groundwork
    reward: NamedReward
    data: PromptDataset
    evaluator: Evaluator | None
    sampling: SamplingParams
    total_steps: int
    n_left_over: int
    """Number of prompts that each epoch leaves out, because they do not fill a step."""


def set_up(recipe: TrainRecipe) -> TrainSetup:
    """Check and load everything that needs no worker.

    Raises:
        ValueError: a recipe, a model or a data set that cannot work.
    """
    ground = lay_groundwork(recipe)
    check_server(replica_spec(recipe, ground.placement, ground.path, load_weights=False))
    reward = resolve_reward(recipe.reward, recipe.scheduler.timeout_s)
    data = load_prompts(recipe.train_dataset, ground.tokenizer)
    check_ground_truths(reward, data.prompts)
    evaluator = Evaluator.of(recipe, ground.tokenizer, reward)
    sampling = SamplingParams.for_training(recipe.gconfig, recipe.rollout)
    check_requests(ground.shape, [*data.prompts, *(evaluator.data.prompts if evaluator else ())], sampling)
    sampler = data.sampler(recipe.train_dataset, recipe.seed)
    return TrainSetup(
        recipe=recipe,
        ground=ground,
        reward=reward,
        data=data,
        evaluator=evaluator,
        sampling=sampling,
        total_steps=recipe.total_train_steps or recipe.total_train_epochs * sampler.batches_per_epoch,
        n_left_over=sampler.n_dropped,
    )


def train(recipe: TrainRecipe, *, overwrite: bool = False) -> dict[str, Any]:
    """Run `recipe` from its first step to its last. Returns the content of `summary.json`.

    Raises:
        ValueError: a recipe, a data set or a machine with which the run cannot start; nothing was trained.
        RunFailed: a worker failed, died or hung.
    """
    began = time.perf_counter()
    RunDir.of(recipe).check_free(overwrite=overwrite)
    setup = set_up(recipe)
    with open_run(recipe, TRAIN_COLUMNS, _banner(setup), overwrite=overwrite) as run:
        updates = setup.total_steps * recipe.actor.ppo_epochs * recipe.actor.ppo_n_minibatches
        roles = launch_roles(run.session, recipe, setup.ground.placement, setup.ground.path, updates)
        run.folder.started()
        before, after = _loop(setup, roles, run)
        summary = _summary(setup, before, after, time.perf_counter() - began)
        run.folder.write_summary(summary)
        run.screen.end(_headline(before, after, summary["seconds"]), run.folder.saved())
    return summary


def _loop(setup: TrainSetup, roles: Roles, run: OpenRun) -> tuple[Evaluation | None, Evaluation | None]:
    """Run the training loop. Returns the evaluations before and after it."""
    recipe, actor, rollout, timers = setup.recipe, roles.actor, roles.rollout, run.timers
    sampler = setup.data.sampler(recipe.train_dataset, recipe.seed)
    source = StepSource(recipe, sampler, rollout, setup.sampling, setup.reward, timers)
    update = PolicyUpdate(recipe, actor, roles.reference, timers)
    tensorboard = run.folder.tensorboard if recipe.stats.tensorboard else None
    with MetricsLog(run.folder.metrics, tensorboard) as log, JsonLines(run.folder.samples) as generations:
        run.screen.start(setup.total_steps)
        with timers.phase("weight sync"):
            rollout.take_weights(actor.offer_weights(version=0))
        before = evaluation = _evaluate(setup, roles, run, step=0)
        timers.take()
        for step in range(1, setup.total_steps + 1):
            began = time.perf_counter()
            experience = source.take(step)
            # Written before the update: if it fails, its samples are where the search begins.
            for sample in experience.samples[: recipe.stats.n_logged_samples]:
                generations.write(as_record(sample, step=step))
            with roles.training(timers):
                batch, metrics = update.prepare(experience.samples, experience.batch)
                with timers.phase("train"):
                    metrics |= update.run(batch, experience.groups, step)
            with timers.phase("weight sync"):
                rollout.take_weights(actor.offer_weights(version=step))
            seconds = timers.take()
            metrics |= experience.metrics | sample_metrics(experience.samples)
            metrics |= _speed(setup, batch, seconds, time.perf_counter() - began)
            try:
                if recipe.saver.is_due(step, setup.total_steps):
                    with timers.phase("save"):
                        actor.save(run.folder.weights)
                if recipe.evaluator.is_due(step, setup.total_steps):
                    evaluation = _evaluate(setup, roles, run, step)
                    metrics |= _evaluation_metrics(evaluation)
            finally:
                metrics |= {f"seconds/{phase}": value for phase, value in timers.take().items()}
                log.write(step, metrics)
            run.screen.step(step, metrics, seconds)
            if recipe.stats.shows_samples(step):
                shown = [(s.reward, s.prompt.text, s.response_text) for s in extremes(experience.samples)]
                run.screen.samples(step, shown)
    return before, evaluation


def _evaluate(setup: TrainSetup, roles: Roles, run: OpenRun, step: int) -> Evaluation | None:
    if setup.evaluator is None:
        return None
    with run.timers.phase("evaluation"):
        evaluation = setup.evaluator.run(roles.rollout)
    when = f"after step {step}" if step else "before training"
    result = f"{evaluation.accuracy:.3f} on {evaluation.n_prompts} prompts"
    run.screen.note(f"held-out accuracy {when}: {result}", style="cyan")
    return evaluation


def _evaluation_metrics(evaluation: Evaluation | None) -> dict[str, float]:
    if evaluation is None:
        return {}
    return {
        "eval/accuracy": evaluation.accuracy,
        "eval/reward": evaluation.reward,
        "eval/response_length": evaluation.response_length,
    }


def _speed(setup: TrainSetup, batch: RemoteBatch, seconds: dict[str, float], step_seconds: float) -> dict[str, float]:
    """Return tokens per second of the whole step, seconds of its phases, and model TFLOP/s per device of the update."""
    world, epochs = setup.ground.placement["actor"].layout.world_size, setup.recipe.actor.ppo_epochs
    flops = training_flops(setup.ground.shape, batch.lengths_N.tolist(), int(batch.trained_N.sum())) * epochs
    return {
        "tokens_per_second": batch.n_tokens / step_seconds,
        "train/tokens_per_second_per_device": batch.n_tokens * epochs / seconds["train"] / world,
        "train/tflops_per_device": flops / seconds["train"] / world / 1e12,
        **{f"seconds/{phase}": value for phase, value in seconds.items()},
        "seconds/step": step_seconds,
    }


def _banner(setup: TrainSetup) -> dict[str, object]:
    recipe, placement, data = setup.recipe, setup.ground.placement, setup.data
    devices = (
        "CPU processes" if placement.is_cpu else f"{recipe.cluster.n_nodes} x {recipe.cluster.n_gpus_per_node} GPUs"
    )
    left_over = f"; {setup.n_left_over} prompts of each epoch fill no step" if setup.n_left_over else ""
    prompts, samples = recipe.train_dataset.batch_size, recipe.gconfig.n_samples
    return {
        "model": setup.ground.describe_model(recipe),
        **{placed.role: describe(placed.layout) for placed in placement.roles},
        "devices": devices,
        "prompts": data.usage,
        **({"held out": setup.evaluator.data.usage} if setup.evaluator else {}),
        "steps": f"{setup.total_steps} of {prompts} prompts x {samples} samples{left_over}",
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        **setup.ground.warnings(recipe),
    }


def _summary(setup: TrainSetup, before: Evaluation | None, after: Evaluation | None, seconds: float) -> dict[str, Any]:
    return {
        "accuracy_before": before.accuracy if before else None,
        "accuracy_after": after.accuracy if after else None,
        "held_out_prompts": before.n_prompts if before else 0,
        "steps": setup.total_steps,
        "seconds": round(seconds, 1),
        "versions": versions(),
        "recipe": resolved_yaml(setup.recipe),
    }


def _headline(before: Evaluation | None, after: Evaluation | None, seconds: float) -> str:
    took = f"finished in {seconds:.0f} s"
    if before is None or after is None:
        return took
    return f"{took}: held-out accuracy {before.accuracy:.3f} -> {after.accuracy:.3f}"
