"""How a run begins where its checkpoint ended: the driver's state, the data's position and the actor's weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.start import FromScratch, Item, Resume
from fivefold.config.schema.recipe import Recipe
from fivefold.data.sampler import EpochSampler
from fivefold.layout.parallel import describe
from fivefold.observe.machine import versions
from fivefold.run.setup import Groundwork


def state_at_start(
    recipe: Recipe,
    start: FromScratch | Resume,
    sampler: EpochSampler[Item],
    ground: Groundwork,
    total_steps: int,
    experts: EpochSampler[Any] | None = None,
) -> tuple[RunState, str | None]:
    """Return the state of the run before its next step, with `sampler` moved to it, and a text for the user.

    Args:
        recipe: the recipe of the run.
        start: where the run starts.
        sampler: reads the training data; it is at its beginning.
        ground: model and layouts of the run.
        total_steps: the last step.
        experts: reads an expert's examples; None: there are none.

    Raises:
        ValueError: the model, the tokenizer or the data differ from the checkpoint's, and the change was not accepted.
    """
    fingerprints = ground.fingerprints(recipe)
    layout = ground.placement["actor"].layout
    note = None
    if isinstance(start, Resume):
        start.check_contents(recipe, fingerprints)
        note = start.restore_order(recipe, sampler)
        if experts is not None and start.state.expert_sampler is not None:
            note = start.restore_order(recipe, experts, start.state.expert_sampler) or note
    state = RunState(
        step=start.step,
        total_steps=total_steps,
        sampler=sampler.state_dict(),
        expert_sampler=None if experts is None else experts.state_dict(),
        weight_version=start.step,
        skips_in_a_row=0,
        seconds=0.0,
        began=start.began.isoformat(timespec="seconds"),
        versions=versions(),
        backend=describe(layout),
        world_size=layout.world_size,
        fingerprints=fingerprints,
        started_from=start.started_from,
    )
    if not isinstance(start, Resume):
        return state, note
    earlier = start.state
    changed = earlier.sampler["batches"][-1][0] != recipe.train_dataset.batch_size
    kept = replace(
        state,
        earlier_steps=earlier.steps_by_size if changed else earlier.earlier_steps,
        skips_in_a_row=earlier.skips_in_a_row,
        algorithm=earlier.algorithm,
        critic_skips_in_a_row=earlier.critic_skips_in_a_row,
        seconds=earlier.seconds,
        evaluation_before=earlier.evaluation_before,
        evaluation_last=earlier.evaluation_last,
        kept_metric=earlier.kept_metric,
        best_evaluation=earlier.best_evaluation,
        stopped_early=earlier.stopped_early if earlier.has_stopped(recipe.evaluator.early_stopping) else None,
    )
    return kept, note


def start_facts(start: FromScratch | Resume, note: str | None) -> dict[str, object]:
    """Return what the banner says about the start; `note` is the text of `state_at_start`."""
    return start.facts() | ({"data": note} if note else {})
