"""Supervised fine-tuning with the same engine: cross entropy on given responses."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fivefold.algorithms.loss import SFTLoss
from fivefold.checkpoints.recovery import find_start
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.schedule import Schedule
from fivefold.checkpoints.start import Anew, Finished, Resume
from fivefold.checkpoints.store import TRAINER
from fivefold.checkpoints.weights import WeightSaver
from fivefold.cluster.group import put
from fivefold.config.load import resolved_yaml
from fivefold.config.schema import PeriodicConfig, SFTRecipe
from fivefold.data.sampler import EpochSampler
from fivefold.data.sft import SFTDataset, SFTExample, load_sft, sft_columns
from fivefold.families.check import describe
from fivefold.families.shape import ModelShape
from fivefold.observe.table import SFT_COLUMNS
from fivefold.observe.versions import versions
from fivefold.roles.actor import Actor
from fivefold.roles.keeping import keep
from fivefold.roles.launch import launch_actor
from fivefold.roles.opening import Groundwork, OpenRun, lay_groundwork, open_run
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.resuming import load_state, start_facts, state_at_start
from fivefold.roles.updates import SkipGuard, average_updates


@dataclass(frozen=True)
class SFTSetup:
    """A run as it is known before a process is started."""

    recipe: SFTRecipe
    ground: Groundwork
    data: SFTDataset
    valid: SFTDataset | None
    sampler: EpochSampler[SFTExample]
    """Reads the training examples, step by step."""
    total_steps: int

    def schedule(self, section: PeriodicConfig) -> Schedule:
        """Return when an action of the recipe is due; its time is measured from now on."""
        return Schedule(section, total_steps=self.total_steps, steps_per_epoch=self.sampler.batches_per_epoch)


def set_up(recipe: SFTRecipe) -> SFTSetup:
    """Check and load everything that needs no worker.

    Raises:
        ValueError: a recipe, a model or a data set that cannot work.
    """
    ground = lay_groundwork(recipe)
    data = load_sft(recipe.train_dataset, ground.tokenizer)
    valid = load_sft(recipe.valid_dataset, ground.tokenizer) if recipe.valid_dataset else None
    _check_lengths(ground.shape, "train_dataset", data)
    if valid is not None:
        _check_lengths(ground.shape, "valid_dataset", valid)
    sampler = data.sampler(recipe.train_dataset, recipe.seed)
    return SFTSetup(recipe, ground, data, valid, sampler, recipe.n_steps(sampler.batches_per_epoch))


def _check_lengths(shape: ModelShape, section: str, data: SFTDataset) -> None:
    longest = max(len(example.prompt_ids) + len(example.response_ids) for example in data.examples)
    if longest > shape.max_positions:
        raise ValueError(
            f"the longest example of {section} has {longest} tokens, but the model has {shape.max_positions} "
            f"positions: set {section}.max_length={shape.max_positions} to leave such examples out"
        )


def sft(recipe: SFTRecipe, *, overwrite: bool = False) -> dict[str, Any]:
    """Run `recipe` to its last step, from its first one or from a checkpoint. Returns the content of `summary.json`.

    Raises:
        ValueError: a recipe, a data set or a machine with which the run cannot start; nothing was trained.
        RunFailed: a worker failed, died or hung, or a checkpoint could not be written.
        RunStopped: the run was asked to end, and ended after a step.
    """
    began = time.perf_counter()
    start = find_start(recipe, overwrite=overwrite)
    if isinstance(start, Finished):
        print(start.reason)
        return start.summary
    setup = set_up(recipe)
    state, note = state_at_start(recipe, start, setup.sampler, setup.ground, setup.total_steps)
    with open_run(recipe, start, SFT_COLUMNS, _banner(setup, start, note)) as run:
        actor = launch_actor(run.session, recipe, setup.ground.placement, setup.ground.path, setup.total_steps)
        load_state(start, TRAINER, actor)
        run.folder.started()
        state = _loop(setup, actor, run, state, began)
        before, after = state.evaluation_before, state.evaluation_last
        summary = {
            "nll_before": before["nll"] if before else None,
            "nll_after": after["nll"] if after else None,
            "steps": setup.total_steps,
            "seconds": round(state.seconds, 1),
            "versions": versions(),
            "recipe": resolved_yaml(recipe),
        }
        run.folder.write_summary(summary)
        run.screen.end(f"finished in {summary['seconds']:.0f} s", run.folder.saved())
    return summary


def _banner(setup: SFTSetup, start: Anew | Resume, note: str | None) -> dict[str, object]:
    recipe = setup.recipe
    return {
        "model": setup.ground.describe_model(recipe),
        "actor": describe(setup.ground.placement["actor"].layout),
        "examples": setup.data.usage,
        **({"held out": setup.valid.usage} if setup.valid else {}),
        "steps": f"{setup.total_steps} of {recipe.train_dataset.batch_size} examples",
        **start_facts(start, note),
        **setup.ground.warnings(recipe),
    }


def _loop(setup: SFTSetup, actor: Actor, run: OpenRun, state: RunState, began: float) -> RunState:
    """Run the training loop from `state` on. Returns the state after its last step."""
    recipe, timers = setup.recipe, run.timers
    saver, weights = setup.schedule(recipe.saver), WeightSaver(recipe.saver, run.folder.weights, actor.save)
    guard = SkipGuard()
    guard.in_a_row = state.skips_in_a_row
    with keep(run, recipe, {TRAINER: actor}, state, setup.schedule(recipe.recover), began) as keeper:
        run.screen.start(setup.total_steps, state.step)
        if state.step == 0:
            state = replace(state, evaluation_before=_held_out(actor, setup.valid, run, "before training"))
        timers.take()
        for step in range(state.step + 1, setup.total_steps + 1):
            batch = _remote(setup.sampler.next_batch())
            with timers.phase("train"):
                result = actor.update(batch, SFTLoss())
            guard.check(result, step)
            seconds = timers.take()
            metrics = average_updates([result]) | {"tokens_per_second": batch.n_tokens / seconds["train"]}
            state = replace(
                state, step=step, sampler=setup.sampler.state_dict(), weight_version=step, skips_in_a_row=guard.in_a_row
            )
            try:
                if saver.is_due(step):
                    with timers.phase("save"):
                        weights.save(step)
                    saver.done()
                if step == setup.total_steps:
                    state = replace(state, evaluation_last=_held_out(actor, setup.valid, run, "after training"))
                state = keeper.after_step(state, metrics)
            finally:
                seconds |= timers.take()
                keeper.metrics.write(step, metrics | {f"seconds/{phase}": value for phase, value in seconds.items()})
            run.screen.step(step, metrics, seconds)
            keeper.step_logged(state)
    return state


def _remote(examples: list[SFTExample]) -> RemoteBatch:
    """Put examples into the object store; return them as a batch by reference."""
    columns = sft_columns(examples)
    return RemoteBatch(
        lengths_N=columns.lengths_N.astype(np.int64),
        trained_N=np.array([len(example.response_ids) for example in examples], dtype=np.int64),
        pieces=(Piece(put(columns), np.arange(len(examples))),),
    )


def _held_out(actor: Actor, valid: SFTDataset | None, run: OpenRun, when: str) -> dict[str, float] | None:
    """Return the mean negative log-likelihood of a held-out response token, in nats; None without held-out data."""
    if valid is None:
        return None
    batch = _remote(list(valid.examples))
    with run.timers.phase("evaluation"):
        nll = -actor.sum_logprobs(batch) / batch.totals().n_trained_tokens
    run.screen.note(f"held-out loss {when}: {nll:.4f} a token on {len(valid)} examples", style="cyan")
    return {"nll": nll}
