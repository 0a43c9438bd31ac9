"""Supervised fine-tuning through the same engine: cross entropy on given responses."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from fivefold.algorithms.loss import SFTLoss
from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.cluster.session import Role, Session
from fivefold.config.load import resolved_yaml
from fivefold.config.paths import resolve_model_path
from fivefold.config.schema import SFTRecipe
from fivefold.data.sft import SFTDataset, load_sft, sft_batch
from fivefold.families.check import check_recipe, describe
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.placement import Placement, place
from fivefold.observe.console import RunConsole
from fivefold.observe.metrics import MetricsLog
from fivefold.observe.run_dir import RunDir
from fivefold.observe.table import SFT_COLUMNS
from fivefold.observe.timers import PhaseTimers
from fivefold.observe.versions import versions
from fivefold.roles.launch import Actor, check_engines, engine_config
from fivefold.roles.policy_update import SkipGuard, average_updates
from fivefold.roles.trainer import TrainerSpec, TrainerWorker
from fivefold.rollout.hf_model import load_tokenizer


@dataclass(frozen=True)
class Plan:
    """All that is known of a run before a process is started."""

    recipe: SFTRecipe
    shape: ModelShape
    placement: Placement
    spec: TrainerSpec
    data: SFTDataset
    valid: SFTDataset | None


def plan_run(recipe: SFTRecipe) -> Plan:
    """Check and load everything that needs no worker.

    Raises:
        ValueError: a recipe, a model or a data set that cannot work.
    """
    path = resolve_model_path(recipe.actor.path)
    shape = load_shape(resolve_model_folder(path))
    placement = place(recipe)
    check_engines(placement)
    check_recipe(recipe, shape)
    tokenizer = load_tokenizer(resolve_model_path(recipe.tokenizer_path or path))
    data = load_sft(recipe.train_dataset, tokenizer)
    valid = load_sft(recipe.valid_dataset, tokenizer) if recipe.valid_dataset else None
    _check_lengths(shape, "train_dataset", data)
    if valid is not None:
        _check_lengths(shape, "valid_dataset", valid)
    steps_per_epoch = data.sampler(recipe.train_dataset, recipe.seed).batches_per_epoch
    spec = TrainerSpec(
        model=engine_config(recipe.actor, path),
        layout=placement["actor"].layout,
        seed=recipe.seed,
        timeout_s=recipe.scheduler.timeout_s,
        tokenizer=resolve_model_path(recipe.tokenizer_path) if recipe.tokenizer_path else None,
        optimizer=recipe.actor.optimizer,
        total_steps=recipe.total_train_steps or recipe.total_train_epochs * steps_per_epoch,
    )
    return Plan(recipe, shape, placement, spec, data, valid)


def _check_lengths(shape: ModelShape, section: str, data: SFTDataset) -> None:
    longest = max(len(example.prompt_ids) + len(example.response_ids) for example in data.examples)
    if longest > shape.max_positions:
        raise ValueError(
            f"the longest example of {section} has {longest} tokens, but the model has {shape.max_positions} "
            f"positions: set {section}.max_length={shape.max_positions} to leave such examples out"
        )


def sft(recipe: SFTRecipe, *, overwrite: bool = False) -> dict[str, Any]:
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
        screen = stack.enter_context(RunConsole(SFT_COLUMNS))
        timers = PhaseTimers(on_change=screen.phase)
        screen.banner(f"{recipe.experiment_name} / {recipe.trial_name}", _banner(plan))
        session = stack.enter_context(Session.open(recipe.scheduler, recipe.cluster, run.logs, timers))
        role = Role("actor", plan.placement["actor"].devices, TrainerWorker, (plan.spec,), distributed=True)
        actor = Actor(session.launch(role)["actor"])
        run.started()
        before, after = _loop(plan, actor, run, screen, timers)
        summary = {
            "nll_before": before,
            "nll_after": after,
            "steps": plan.spec.total_steps,
            "seconds": round(time.perf_counter() - began, 1),
            "versions": versions(),
            "recipe": resolved_yaml(recipe),
        }
        run.write_summary(summary)
        screen.end(f"finished in {summary['seconds']:.0f} s", run.saved())
    return summary


def _banner(plan: Plan) -> dict[str, object]:
    recipe, shape = plan.recipe, plan.shape
    return {
        "model": f"{recipe.actor.path} ({shape.family}, {shape.n_parameters / 1e6:,.1f} M parameters)",
        "actor": describe(plan.spec.layout),
        "examples": plan.data.usage,
        **({"held out": plan.valid.usage} if plan.valid else {}),
        "steps": f"{plan.spec.total_steps} of {recipe.train_dataset.batch_size} examples",
    }


def _loop(
    plan: Plan, actor: Actor, run: RunDir, screen: RunConsole, timers: PhaseTimers
) -> tuple[float | None, float | None]:
    """The training loop; held-out loss before and after."""
    recipe, total_steps = plan.recipe, plan.spec.total_steps
    sampler = plan.data.sampler(recipe.train_dataset, recipe.seed)
    tensorboard = run.tensorboard if recipe.stats.tensorboard else None
    guard = SkipGuard()
    with MetricsLog(run.metrics, tensorboard) as log:
        screen.start(total_steps)
        before = _held_out_nll(actor, plan.valid, timers, screen, "before training")
        timers.take()
        for step in range(1, total_steps + 1):
            batch = sft_batch(sampler.next_batch())
            with timers.phase("train"):
                result = actor.update(batch, SFTLoss())
            guard.check(result, step)
            seconds = timers.take()
            metrics = average_updates([result]) | {"tokens_per_second": batch.n_tokens / seconds["train"]}
            try:
                if recipe.saver.is_due(step, total_steps):
                    with timers.phase("save"):
                        actor.save(run.weights)
            finally:
                seconds |= timers.take()
                log.write(step, metrics | {f"seconds/{phase}": value for phase, value in seconds.items()})
            screen.step(step, metrics, seconds)
        after = _held_out_nll(actor, plan.valid, timers, screen, "after training")
    return before, after


def _held_out_nll(
    actor: Actor, valid: SFTDataset | None, timers: PhaseTimers, screen: RunConsole, when: str
) -> float | None:
    """Mean negative log-likelihood of a held-out response token."""
    if valid is None:
        return None
    batch = sft_batch(valid.examples)
    with timers.phase("evaluation"):
        logprobs = actor.logprobs(batch, temperature=1.0)
    nll = float(-(logprobs * batch.mask_T).sum() / batch.mask_T.sum())
    screen.note(f"held-out loss {when}: {nll:.4f} a token on {len(valid)} examples", style="cyan")
    return nll
