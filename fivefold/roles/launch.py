"""The two sides of the loop as the driver sees them: verbs over groups of worker processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch

from fivefold.algorithms.loss import Loss
from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.session import Role, Session
from fivefold.config.paths import resolve_model_path
from fivefold.config.schema import EngineConfig, TrainRecipe
from fivefold.layout.backends import BACKENDS, example_layout
from fivefold.layout.placement import Placement
from fivefold.observe.timers import PhaseTimers
from fivefold.planning.blueprint import draw_up
from fivefold.planning.question_sources import Changes, question_of_recipe
from fivefold.roles.rollout import RolloutWorker
from fivefold.roles.trainer import TrainerSpec, TrainerWorker
from fivefold.rollout.protocol import SamplingParams, group_requests
from fivefold.rollout.replica import ReplicaSpec
from fivefold.types import Batch, Completion, Prompt

ANY_GPU = "h100-80g"
"""What a role keeps on its GPU does not depend on the GPU."""


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step did, and the metrics of its loss."""

    metrics: dict[str, float]
    skipped: bool
    non_finite: tuple[str, ...]
    """Of a skipped step: parameters whose gradient was not finite."""


class Actor:
    """The model that is trained."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """float32 [T]: log-probs of the trained tokens."""
        result: torch.Tensor = self._group.call_first("compute_logprobs", batch, temperature)
        return result

    def update(self, batch: Batch, loss: Loss) -> UpdateResult:
        """One optimizer step on a mini-batch."""
        result = self._group.call_first("update", batch, loss)
        step = result["step"]
        metrics = {**result["metrics"], "grad_norm": step.grad_norm, "lr": step.learning_rate}
        return UpdateResult(metrics, step.skipped, step.non_finite)

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        self._group.call_first("save", folder)

    def release(self) -> None:
        """Give unused device memory back, for an engine that shares the devices."""
        self._group.call("release_cache")

    def send_weights(self, rollout: Rollout, version: int) -> None:
        """Bring every rollout replica to the weights of now."""
        rollout.receive_weights(self._group, version)


class Reference:
    """The frozen model that the KL divergence is measured against, in the actor's processes or in its own."""

    def __init__(self, group: WorkerGroup, *, beside_actor: bool, actor_on_devices: Actor | None = None) -> None:
        """`actor_on_devices`: the actor, if it has processes of its own on devices of the reference."""
        self._group = group
        self._beside_actor = beside_actor
        self._actor_on_devices = actor_on_devices

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """float32 [T]: log-probs of the trained tokens."""
        if self._beside_actor:
            return self._call("compute_reference_logprobs", batch, temperature)
        if self._actor_on_devices is not None:
            self._actor_on_devices.release()
        result = self._call("compute_logprobs", batch, temperature)
        self._group.call("release_cache")  # for whoever else is on its devices
        return result

    def _call(self, method: str, batch: Batch, temperature: float) -> torch.Tensor:
        result: torch.Tensor = self._group.call_first(method, batch, temperature)
        return result


class Rollout:
    """The replicas that generate."""

    def __init__(self, group: WorkerGroup, shares_devices: bool) -> None:
        self._group = group
        self.shares_devices = shares_devices

    def generate(
        self, prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, key: tuple[int | str, ...]
    ) -> list[Completion]:
        """`n_samples` completions of each prompt, the group of a prompt side by side.

        Args:
            key: decides the random choices, together with a prompt's place and the sample's place in its group.
        """
        requests = group_requests([prompt.token_ids for prompt in prompts], n_samples, key)
        share = math.ceil(len(requests) / len(self._group))
        shares = [requests[start : start + share] for start in range(0, share * len(self._group), share)]
        answers = self._group.call_each("generate", shares, sampling=sampling)
        return [completion for answer in answers for completion in answer]

    def receive_weights(self, source: WorkerGroup, version: int) -> None:
        """Take over the weights that the ranks of `source` export, piece by piece."""
        self._group.feed("update_weights", source.stream("weight_buckets"), version)

    def sleep(self) -> None:
        """Forget the weights and leave the devices to the actor."""
        self._group.call("sleep")

    def wake(self) -> None:
        """Take the devices back; the next thing must be new weights."""
        self._group.call("wake")


@dataclass(frozen=True)
class Roles:
    """All roles of a run. There is a reference only where the recipe has a KL term."""

    actor: Actor
    rollout: Rollout
    reference: Reference | None

    @contextmanager
    def training(self, timers: PhaseTimers) -> Iterator[None]:
        """Inside, devices that the rollout shares with the actor belong to the actor."""
        if not self.rollout.shares_devices:
            yield
            return
        with timers.phase("hand-over"):
            self.rollout.sleep()
        yield
        with timers.phase("hand-over"):
            self.actor.release()
            self.rollout.wake()


def launch_roles(session: Session, recipe: TrainRecipe, placement: Placement, path: str, total_steps: int) -> Roles:
    """Start the processes of all roles of `recipe`; `path` is the actor's model, folder or hub name."""
    model = engine_config(recipe.actor, path)
    needs_reference = recipe.actor.kl_ctl > 0
    reference = _reference_config(recipe, model) if needs_reference else None
    beside_actor = "ref" not in placement
    spec = TrainerSpec(
        model=model,
        layout=placement["actor"].layout,
        seed=recipe.seed,
        timeout_s=recipe.scheduler.timeout_s,
        tokenizer=resolve_model_path(recipe.tokenizer_path) if recipe.tokenizer_path else None,
        optimizer=recipe.actor.optimizer,
        total_steps=total_steps,
        reference=reference if beside_actor else None,
    )
    trainers = [Role("actor", placement["actor"].devices, TrainerWorker, (spec,), distributed=True)]
    if reference is not None and not beside_actor:
        own = TrainerSpec(reference, placement["ref"].layout, recipe.seed, recipe.scheduler.timeout_s)
        trainers.append(Role("ref", placement["ref"].devices, TrainerWorker, (own,), distributed=True))
    groups = _launch(session, rollout_role(recipe, placement, path, load_weights=False), trainers, placement)
    actor = Actor(groups["actor"])
    return Roles(
        actor=actor,
        rollout=Rollout(groups["rollout"], shares_devices=bool(placement.sharers("rollout"))),
        reference=_reference(groups, actor, placement) if needs_reference else None,
    )


def _launch(session: Session, rollout: Role, trainers: Sequence[Role], placement: Placement) -> dict[str, WorkerGroup]:
    """All roles side by side, unless a server shares devices: it measures what is free when it starts."""
    if not (placement["rollout"].layout.is_server and placement.sharers("rollout")):
        return session.launch(rollout, *trainers)
    groups = session.launch(rollout)
    groups["rollout"].call("sleep")
    groups |= session.launch(*trainers)
    groups["actor"].call("release_cache")
    groups["rollout"].call("wake")
    return groups


def _reference(groups: Mapping[str, WorkerGroup], actor: Actor, placement: Placement) -> Reference:
    if "ref" not in placement:
        return Reference(groups["actor"], beside_actor=True)
    shares = "actor" in placement.sharers("ref")
    return Reference(groups["ref"], beside_actor=False, actor_on_devices=actor if shares else None)


def rollout_role(recipe: TrainRecipe, placement: Placement, path: str, *, load_weights: bool) -> Role:
    """The rollout replicas of a recipe over the model at `path`."""
    placed = placement["rollout"]
    spec = replica_spec(recipe, placement, path, load_weights=load_weights)
    return Role(
        "rollout", placed.devices, RolloutWorker, (spec,), devices_per_process=placed.layout.tp * placed.layout.pp
    )


def replica_spec(recipe: TrainRecipe, placement: Placement, path: str, *, load_weights: bool) -> ReplicaSpec:
    """What each replica of the rollout is made of."""
    layout, config = placement["rollout"].layout, recipe.rollout
    is_shared = bool(placement.sharers("rollout")) and not placement.is_cpu
    return ReplicaSpec(
        backend=layout.backend,
        path=path,
        tokenizer_path=recipe.tokenizer_path or path,
        dtype=config.dtype or recipe.actor.dtype,
        max_batch_size=config.max_batch_size,
        load_weights=load_weights,
        run=uuid4().hex[:8],
        tp=layout.tp,
        pp=layout.pp,
        max_length=_longest(recipe),
        seed=recipe.seed,
        can_sleep=is_shared,
        reserved=_kept_beside_rollout(recipe, path) if is_shared and layout.is_server else 0,
        memory_fraction=config.memory_fraction,
        python=config.server_python,
        arguments=tuple(map(str, config.server_args)),
    )


def _longest(recipe: TrainRecipe) -> int:
    """Tokens of the longest prompt and completion that a replica may be asked for."""
    rows = [recipe.train_dataset, *([recipe.valid_dataset] if recipe.valid_dataset else [])]
    return max(data.max_length for data in rows) + recipe.gconfig.max_new_tokens


def check_engines(placement: Placement) -> None:
    """Refuse a role whose backend can be written in a layout, but has no engine yet.

    Raises:
        ValueError: naming the role.
    """
    for placed in placement.roles:
        if not BACKENDS[placed.layout.backend].runs:
            example = example_layout(trains=placed.layout.is_training)
            raise ValueError(
                f"{placed.role}.backend is {placed.layout.backend}, which does not run yet: "
                f"use {example.partition(':')[0]}, for example {placed.role}.backend={example}"
            )


def _kept_beside_rollout(recipe: TrainRecipe, path: str) -> int:
    """Bytes of each device that other roles keep while the rollout is awake, as `fivefold plan` counts them."""
    actor = recipe.actor.model_copy(update={"path": str(resolve_model_folder(path))})
    ref = recipe.ref
    if ref.path is not None:
        ref = ref.model_copy(update={"path": str(resolve_model_folder(ref.path))})
    local = recipe.model_copy(update={"actor": actor, "ref": ref})
    return draw_up(question_of_recipe(local, ANY_GPU, Changes())).rollouts[0].beside


def _reference_config(recipe: TrainRecipe, model: EngineConfig) -> EngineConfig:
    """The actor as it begins, or the model of `ref.path`, whose weights are always read."""
    if recipe.ref.path is None:
        return model
    return model.model_copy(update={"path": resolve_model_path(recipe.ref.path), "init_from_scratch": False})


def engine_config(config: EngineConfig, path: str) -> EngineConfig:
    """The engine's part of an actor's section, with its model found."""
    fields = {name: getattr(config, name) for name in EngineConfig.model_fields}
    return EngineConfig(**{**fields, "path": path})
