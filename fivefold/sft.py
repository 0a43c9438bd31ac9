"""Supervised fine-tuning with the same engine: cross entropy on given responses."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold.algorithms.loss import SFTLoss
from fivefold.cluster.group import put
from fivefold.config.load import resolved_yaml
from fivefold.config.schema import SFTRecipe
from fivefold.data.sft import SFTDataset, SFTExample, load_sft, sft_columns
from fivefold.families.check import describe
from fivefold.families.shape import ModelShape
from fivefold.observe.metrics import MetricsLog
from fivefold.observe.run_dir import RunDir
from fivefold.observe.table import SFT_COLUMNS
from fivefold.observe.versions import versions
from fivefold.roles.actor import Actor
from fivefold.roles.launch import launch_actor
from fivefold.roles.opening import Groundwork, OpenRun, lay_groundwork, open_run
from fivefold.roles.policy_update import SkipGuard, average_updates
from fivefold.roles.remote_batch import Piece, RemoteBatch


@dataclass(frozen=True)
class SFTSetup:
    """A run as it is known before a process is started."""

    recipe: SFTRecipe
    ground: Groundwork
    data: SFTDataset
    valid: SFTDataset | None
    total_steps: int


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
    steps_per_epoch = data.sampler(recipe.train_dataset, recipe.seed).batches_per_epoch
    total_steps = recipe.total_train_steps or recipe.total_train_epochs * steps_per_epoch
    return SFTSetup(recipe, ground, data, valid, total_steps)


def _check_lengths(shape: ModelShape, section: str, data: SFTDataset) -> None:
    longest = max(len(example.prompt_ids) + len(example.response_ids) for example in data.examples)
    if longest > shape.max_positions:
        raise ValueError(
            f"the longest example of {section} has {longest} tokens, but the model has {shape.max_positions} "
            f"positions: set {section}.max_length={shape.max_positions} to leave such examples out"
        )


def sft(recipe: SFTRecipe, *, overwrite: bool = False) -> dict[str, Any]:
    """Run `recipe` from its first step to its last. Returns the content of `summary.json`.

    Raises:
        ValueError: a recipe, a data set or a machine with which the run cannot start; nothing was trained.
        RunFailed: a worker failed, died or hung.
    """
    began = time.perf_counter()
    RunDir.of(recipe).check_free(overwrite=overwrite)
    setup = set_up(recipe)
    with open_run(recipe, SFT_COLUMNS, _banner(setup), overwrite=overwrite) as run:
        actor = launch_actor(run.session, recipe, setup.ground.placement, setup.ground.path, setup.total_steps)
        run.folder.started()
        before, after = _loop(setup, actor, run)
        summary = {
            "nll_before": before,
            "nll_after": after,
            "steps": setup.total_steps,
            "seconds": round(time.perf_counter() - began, 1),
            "versions": versions(),
            "recipe": resolved_yaml(recipe),
        }
        run.folder.write_summary(summary)
        run.screen.end(f"finished in {summary['seconds']:.0f} s", run.folder.saved())
    return summary


def _banner(setup: SFTSetup) -> dict[str, object]:
    recipe = setup.recipe
    return {
        "model": setup.ground.describe_model(recipe),
        "actor": describe(setup.ground.placement["actor"].layout),
        "examples": setup.data.usage,
        **({"held out": setup.valid.usage} if setup.valid else {}),
        "steps": f"{setup.total_steps} of {recipe.train_dataset.batch_size} examples",
        **setup.ground.warnings(recipe),
    }


def _loop(setup: SFTSetup, actor: Actor, run: OpenRun) -> tuple[float | None, float | None]:
    """Run the training loop. Returns the held-out losses before and after it, in nats per token."""
    recipe, timers = setup.recipe, run.timers
    sampler = setup.data.sampler(recipe.train_dataset, recipe.seed)
    tensorboard = run.folder.tensorboard if recipe.stats.tensorboard else None
    guard = SkipGuard()
    with MetricsLog(run.folder.metrics, tensorboard) as log:
        run.screen.start(setup.total_steps)
        before = _held_out_nll(actor, setup.valid, run, "before training")
        timers.take()
        for step in range(1, setup.total_steps + 1):
            batch = _remote(sampler.next_batch())
            with timers.phase("train"):
                result = actor.update(batch, SFTLoss())
            guard.check(result, step)
            seconds = timers.take()
            metrics = average_updates([result]) | {"tokens_per_second": batch.n_tokens / seconds["train"]}
            try:
                if recipe.saver.is_due(step, setup.total_steps):
                    with timers.phase("save"):
                        actor.save(run.folder.weights)
            finally:
                seconds |= timers.take()
                log.write(step, metrics | {f"seconds/{phase}": value for phase, value in seconds.items()})
            run.screen.step(step, metrics, seconds)
        after = _held_out_nll(actor, setup.valid, run, "after training")
    return before, after


def _remote(examples: list[SFTExample]) -> RemoteBatch:
    """Put examples into the object store; return them as a batch by reference."""
    columns = sft_columns(examples)
    return RemoteBatch(
        lengths_N=columns.lengths_N.astype(np.int64),
        trained_N=np.array([len(example.response_ids) for example in examples], dtype=np.int64),
        pieces=(Piece(put(columns), np.arange(len(examples))),),
    )


def _held_out_nll(actor: Actor, valid: SFTDataset | None, run: OpenRun, when: str) -> float | None:
    """Return the mean negative log-likelihood of a held-out response token, in nats; None without held-out data."""
    if valid is None:
        return None
    batch = _remote(list(valid.examples))
    with run.timers.phase("evaluation"):
        nll = -actor.sum_logprobs(batch) / batch.totals().n_trained_tokens
    run.screen.note(f"held-out loss {when}: {nll:.4f} a token on {len(valid)} examples", style="cyan")
    return nll
