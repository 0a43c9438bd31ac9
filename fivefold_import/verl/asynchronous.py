"""verl's trainers whose rollout has its own devices: one step off the policy, and fully asynchronous.

The fully asynchronous trainer counts no step of so many prompts. It takes `require_batches` mini-batches at a time, and
after `trigger_parameter_sync_step` times the rollout gets its weights, which is a step of Fivefold's.
"""

from __future__ import annotations

from fivefold_import.draft import Draft
from fivefold_import.values import positive
from fivefold_import.verl.pools import ROLLOUTS, TRAINERS, one_cluster
from fivefold_import.verl.rules import ACTOR

BATCH, MINI_BATCH = "data.train_batch_size", f"{ACTOR}ppo_mini_batch_size"
AGE = "rollout.max_head_offpolicyness"
SECTION = "async_training."
REQUIRED, UPDATES = f"{SECTION}require_batches", f"{SECTION}trigger_parameter_sync_step"
DEFAULT_UPDATES = 4
"""verl's default of `trigger_parameter_sync_step`."""


def prompts_of_step(draft: Draft) -> object:
    """Return the prompts of a step, and convert the keys that say it if the source has no steps of so many prompts."""
    if not _is_streamed(draft):
        return draft.get(BATCH)
    mini = draft.read(MINI_BATCH, positive)
    n_minibatches = draft.read(REQUIRED, positive, 1) * steps_of_step(draft)
    batch = mini * n_minibatches
    draft.recipe["train_dataset.batch_size"] = batch
    note = f"{n_minibatches} mini-batches of {mini} prompts, those between two updates of the rollout's weights"
    for key in (BATCH, REQUIRED, UPDATES):
        draft.mapped(key, "train_dataset.batch_size", batch, note)
    draft.implied("data.gen_batch_size", "prompts begin one by one")
    if draft.writes(total := "rollout.total_rollout_steps"):
        steps = max(1, draft.read(total, positive) // batch)
        draft.mapped(total, "total_train_steps", steps, f"prompts, {batch} of them a step")
    return batch


def steps_of_step(draft: Draft) -> int:
    """Return how many steps of verl, whose schedules advance once a step, make one step of Fivefold."""
    return int(draft.read(UPDATES, positive, DEFAULT_UPDATES)) if _is_streamed(draft) else 1


def _is_streamed(draft: Draft) -> bool:
    """Return whether the source has no steps of so many prompts."""
    return bool(draft.keys(f"{SECTION}*")) and not (draft.writes(BATCH) and draft.get(BATCH) != 0)


def lay_out_apart(draft: Draft) -> int | None:
    """Convert the devices of a rollout that has its own; return their number, None if it shares the actor's."""
    if not all(draft.writes(key) for key in ROLLOUTS):
        return None
    nodes, gpus, others, their_gpus = (draft.read(key, positive) for key in (*TRAINERS, *ROLLOUTS))
    cluster = one_cluster((nodes, gpus), (others, their_gpus))
    if cluster is None:
        for key in ROLLOUTS:
            draft.unsupported(
                key, f"nodes of {gpus} GPUs that train and of {their_gpus} that generate are no one cluster"
            )
        return None
    for keys in (TRAINERS, ROLLOUTS):
        for key, to_, value in zip(keys, ("cluster.n_nodes", "cluster.n_gpus_per_node"), cluster, strict=True):
            draft.sets(key, to_, value, "trainer and rollout together")
    draft.is_shared = False
    draft.implied("actor_rollout_ref.hybrid_engine", "rollout and actor have their own devices")
    if not draft.keys(f"{SECTION}*"):
        draft.recipe.setdefault(AGE, 1)
        draft.notes.append(f"{AGE}=1: verl's rollout with its own devices is one step ahead of the trainer")
    return others * their_gpus
