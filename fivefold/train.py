"""Reinforcement learning: the roles are built, then one loop.

prompts ─> rollout ─> rewards ─> (reference) ─> advantages ─> mini-batches ─> actor
   ^                                                                            │
next step <──────────────── rollout engines <──────────────── new weights <─────┘
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.cluster.session import Session
from fivefold.config.load import resolved_yaml
from fivefold.config.paths import resolve_model_path
from fivefold.config.schema import TrainRecipe
from fivefold.data.batches import group_ids
from fivefold.data.prompts import PromptDataset, load_prompts
from fivefold.evaluate import Evaluation, Evaluator, check_requests
from fivefold.experience.samples import as_record, make_samples, sample_metrics
from fivefold.families.check import check_recipe, describe
from fivefold.families.flops import training_flops
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.placement import Placement, place
from fivefold.observe.console import RunConsole
from fivefold.observe.jsonl import JsonLines
from fivefold.observe.metrics import MetricsLog
from fivefold.observe.run_dir import RunDir
from fivefold.observe.table import TRAIN_COLUMNS
from fivefold.observe.timers import PhaseTimers
from fivefold.observe.versions import versions
from fivefold.rewards import NamedReward, check_ground_truths, resolve_reward
from fivefold.roles.launch import Roles, check_engines, launch_roles, replica_spec
from fivefold.roles.policy_update import PolicyUpdate
from fivefold.rollout.engines import check_server
from fivefold.rollout.hf_model import load_tokenizer
from fivefold.rollout.protocol import SamplingParams
from fivefold.types import Batch


@dataclass(frozen=True)
class Plan:
    """All that is known of a run before a process is started."""

    recipe: TrainRecipe
    path: str
    shape: ModelShape
    placement: Placement
    tokenizer: PreTrainedTokenizerBase
    reward: NamedReward
    data: PromptDataset
    evaluator: Evaluator | None
    sampling: SamplingParams
    total_steps: int
    n_left_over: int
    """Prompts that each epoch leaves out, because they do not fill a step."""


def plan_run(recipe: TrainRecipe) -> Plan:
    """Check and load everything that needs no worker.

    Raises:
        ValueError: a recipe, a model or a data set that cannot work.
    """
    path = resolve_model_path(recipe.actor.path)
    shape = load_shape(resolve_model_folder(path))
    placement = place(recipe)
    check_engines(placement)
    check_recipe(recipe, shape, _reference_shape(recipe, shape))
    check_server(replica_spec(recipe, placement, path, load_weights=False))
    tokenizer = load_tokenizer(resolve_model_path(recipe.tokenizer_path or path))
    reward = resolve_reward(recipe.reward, recipe.scheduler.timeout_s)
    data = load_prompts(recipe.train_dataset, tokenizer)
    check_ground_truths(reward, data.prompts)
    evaluator = Evaluator.of(recipe, tokenizer, reward)
    sampling = SamplingParams.from_config(recipe.gconfig)
    check_requests(shape, [*data.prompts, *(evaluator.data.prompts if evaluator else ())], sampling)
    sampler = data.sampler(recipe.train_dataset, recipe.seed)
    return Plan(
        recipe=recipe,
        path=path,
        shape=shape,
        placement=placement,
        tokenizer=tokenizer,
        reward=reward,
        data=data,
        evaluator=evaluator,
        sampling=sampling,
        total_steps=recipe.total_train_steps or recipe.total_train_epochs * sampler.batches_per_epoch,
        n_left_over=sampler.n_dropped,
    )


def _reference_shape(recipe: TrainRecipe, shape: ModelShape) -> ModelShape | None:
    """Shape of a reference model that is not the actor's."""
    if recipe.ref.path is None:
        return None
    reference = load_shape(resolve_model_folder(recipe.ref.path))
    if reference.vocab != shape.vocab:
        raise ValueError(
            f"ref.path={recipe.ref.path} has {reference.vocab} tokens in its vocabulary, the actor {shape.vocab}: "
            "a KL divergence needs the same ones"
        )
    return reference


def train(recipe: TrainRecipe, *, overwrite: bool = False) -> dict[str, Any]:
    """Run `recipe` from its first step to its last. Returns what `summary.json` holds.

    Raises:
        ValueError: a recipe, a data set or a machine that cannot do it; nothing was trained.
        RunFailed: a worker failed, died or hung.
    """
    began = time.perf_counter()
    RunDir.of(recipe).check_free(overwrite=overwrite)
    plan = plan_run(recipe)
    with ExitStack() as stack:
        run = stack.enter_context(RunDir.create(recipe, overwrite=overwrite))
        screen = stack.enter_context(RunConsole(TRAIN_COLUMNS))
        timers = PhaseTimers(on_change=screen.phase)
        screen.banner(f"{recipe.experiment_name} / {recipe.trial_name}", _banner(plan))
        session = stack.enter_context(Session.open(recipe.scheduler, recipe.cluster, run.logs, timers))
        updates = plan.total_steps * recipe.actor.ppo_epochs * recipe.actor.ppo_n_minibatches
        roles = launch_roles(session, recipe, plan.placement, plan.path, updates)
        run.started()
        before, after = _loop(plan, roles, run, screen, timers)
        summary = _summary(plan, before, after, time.perf_counter() - began)
        run.write_summary(summary)
        screen.end(_headline(before, after, summary["seconds"]), run.saved())
    return summary


def _loop(
    plan: Plan, roles: Roles, run: RunDir, screen: RunConsole, timers: PhaseTimers
) -> tuple[Evaluation | None, Evaluation | None]:
    """The training loop, with an evaluation before and after."""
    recipe, actor, rollout = plan.recipe, roles.actor, roles.rollout
    sampler = plan.data.sampler(recipe.train_dataset, recipe.seed)
    update = PolicyUpdate(recipe, actor, roles.reference, timers)
    tensorboard = run.tensorboard if recipe.stats.tensorboard else None
    with MetricsLog(run.metrics, tensorboard) as log, JsonLines(run.samples) as generations:
        screen.start(plan.total_steps)
        with timers.phase("weight sync"):
            actor.send_weights(rollout, version=0)
        before = evaluation = _evaluate(plan, roles, timers, screen, step=0)
        timers.take()
        for step in range(1, plan.total_steps + 1):
            began = time.perf_counter()
            prompts = sampler.next_batch()
            with timers.phase("rollout"):
                completions = rollout.generate(
                    prompts, recipe.gconfig.n_samples, plan.sampling, (recipe.seed, "train", step)
                )
            with timers.phase("rewards"):
                samples = make_samples(prompts, completions, plan.tokenizer, plan.reward)
            # Before the update: whatever ends the run there, these are looked for.
            for sample in samples[: recipe.stats.n_logged_samples]:
                generations.write(as_record(sample, step=step))
            with roles.training(timers):
                batch, metrics = update.prepare(samples)
                with timers.phase("train"):
                    metrics |= update.run(batch, group_ids(samples), step)
            with timers.phase("weight sync"):
                actor.send_weights(rollout, version=step)
            seconds = timers.take()
            metrics |= sample_metrics(samples) | _speed(plan, batch, seconds, time.perf_counter() - began)
            try:
                if recipe.saver.is_due(step, plan.total_steps):
                    with timers.phase("save"):
                        actor.save(run.weights)
                if recipe.evaluator.is_due(step, plan.total_steps):
                    evaluation = _evaluate(plan, roles, timers, screen, step)
                    metrics |= _evaluation_metrics(evaluation)
            finally:
                metrics |= {f"seconds/{phase}": value for phase, value in timers.take().items()}
                log.write(step, metrics)
            screen.step(step, metrics, seconds)
    return before, evaluation


def _evaluate(plan: Plan, roles: Roles, timers: PhaseTimers, screen: RunConsole, step: int) -> Evaluation | None:
    if plan.evaluator is None:
        return None
    with timers.phase("evaluation"):
        evaluation = plan.evaluator.run(roles.rollout)
    when = f"after step {step}" if step else "before training"
    screen.note(f"held-out accuracy {when}: {evaluation.accuracy:.3f} on {evaluation.n_prompts} prompts", style="cyan")
    return evaluation


def _evaluation_metrics(evaluation: Evaluation | None) -> dict[str, float]:
    if evaluation is None:
        return {}
    return {
        "eval/accuracy": evaluation.accuracy,
        "eval/reward": evaluation.reward,
        "eval/response_length": evaluation.response_length,
    }


def _speed(plan: Plan, batch: Batch, seconds: dict[str, float], step_seconds: float) -> dict[str, float]:
    """Tokens a second over the whole step, seconds of its phases, and model TFLOP/s of the update on each device."""
    world = plan.placement["actor"].layout.world_size
    flops = training_flops(plan.shape, batch.lengths, int(batch.mask_T.sum())) * plan.recipe.actor.ppo_epochs
    return {
        "tokens_per_second": batch.n_tokens / step_seconds,
        "train/tokens_per_second_per_device": batch.n_tokens * plan.recipe.actor.ppo_epochs / seconds["train"] / world,
        "train/tflops_per_device": flops / seconds["train"] / world / 1e12,
        **{f"seconds/{phase}": value for phase, value in seconds.items()},
        "seconds/step": step_seconds,
    }


def _banner(plan: Plan) -> dict[str, object]:
    recipe, placement, data = plan.recipe, plan.placement, plan.data
    devices = (
        "CPU processes" if placement.is_cpu else f"{recipe.cluster.n_nodes} x {recipe.cluster.n_gpus_per_node} GPUs"
    )
    left_over = f"; {plan.n_left_over} prompts of each epoch fill no step" if plan.n_left_over else ""
    prompts, samples = recipe.train_dataset.batch_size, recipe.gconfig.n_samples
    return {
        "model": f"{recipe.actor.path} ({plan.shape.family}, {plan.shape.n_parameters / 1e6:,.1f} M parameters)",
        **{placed.role: describe(placed.layout) for placed in placement.roles},
        "devices": devices,
        "prompts": data.usage,
        **({"held out": plan.evaluator.data.usage} if plan.evaluator else {}),
        "steps": f"{plan.total_steps} of {prompts} prompts x {samples} samples{left_over}",
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
        **({"warnings": "\n".join(placement.warnings())} if placement.warnings() else {}),
    }


def _summary(plan: Plan, before: Evaluation | None, after: Evaluation | None, seconds: float) -> dict[str, Any]:
    return {
        "accuracy_before": before.accuracy if before else None,
        "accuracy_after": after.accuracy if after else None,
        "held_out_prompts": before.n_prompts if before else 0,
        "steps": plan.total_steps,
        "seconds": round(seconds, 1),
        "versions": versions(),
        "recipe": resolved_yaml(plan.recipe),
    }


def _headline(before: Evaluation | None, after: Evaluation | None, seconds: float) -> str:
    took = f"finished in {seconds:.0f} s"
    if before is None or after is None:
        return took
    return f"{took}: held-out accuracy {before.accuracy:.3f} -> {after.accuracy:.3f}"
