"""A whole plan: every role on its devices, the problems that keep it from running, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fivefold.config.roles import ROLES
from fivefold.families.check import layout_problems, replica_problems
from fivefold.layout.backends import BACKENDS
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import Placement, RolePlacement
from fivefold.planning.copied_weights import copied_weights, overlapping_bytes
from fivefold.planning.host_memory import GIB, HostMemory, fullest, host_memory, host_problems
from fivefold.planning.memory import KINDS, Kind, RankMemory
from fivefold.planning.question import Question
from fivefold.planning.role_plans import RolloutPlan, TrainerPlan, gb, kept_bytes, plan_rollout, plan_trainer
from fivefold.planning.rollout_memory import asleep_bytes
from fivefold.planning.sending import kept_while_sending, sending_bytes
from fivefold.weights.table import pick

NAMES: Mapping[Kind, str] = {"params": "weights", "grads": "gradients", "optimizer": "optimizer state"}

HEADROOM = 0.05
"""Share of a GPU's memory that fragmentation and uneven experts may take: with less left, a plan is tight."""


@dataclass(frozen=True)
class Blueprint:
    """The answer to a question."""

    question: Question
    placement: Placement
    trainers: tuple[TrainerPlan, ...]
    rollouts: tuple[RolloutPlan, ...]
    offloaded: tuple[Kind, ...]
    """What the actor moves off its GPUs while a rollout generates there."""
    problems: tuple[str, ...]
    """Reasons why it cannot run, one a line."""
    notes: tuple[str, ...]
    """What is wasteful or uncertain though it runs, one a line."""

    @property
    def fits(self) -> bool:
        """Whether nothing keeps the plan from running."""
        return not self.problems

    @property
    def host_memory(self) -> dict[int, HostMemory]:
        """Host memory that the roles need, by node."""
        return self._host_memory(copies_state=self.copies_state)

    @property
    def copies_state(self) -> bool:
        """Whether trainers copy their state to host memory, to write checkpoints from there while training goes on."""
        question = self.question
        if not question.writes_checkpoints or question.snapshot == "blocking":
            return False
        if question.snapshot == "copy" or question.gpus_per_node == 0:
            return True
        return not any(host_problems(self._host_memory(copies_state=True), question.host_memory_gib))

    def _host_memory(self, *, copies_state: bool) -> dict[int, HostMemory]:
        return host_memory(
            self.trainers,
            self.rollouts,
            self.offloaded,
            copies_state=copies_state,
            copied_weights=copied_weights(self.question, self.placement),
        )


def draw_up(question: Question) -> Blueprint:
    """Place the roles of `question` and add up what they need.

    Raises:
        ValueError: roles that do not fit on the cluster, or a backend whose memory is not known.
    """
    placement = question.place()
    alone = [
        _with_sending(plan_alone(question, placement, placed), question, placement)
        for placed in placement.roles
        if placed.layout.is_training
    ]
    kept = {trainer.placed.role: kept_bytes(trainer, trainer.offloaded) for trainer in alone}
    generating = [placed for placed in placement.roles if not placed.layout.is_training]
    on_gpus = question.gpus_per_node > 0
    kept |= {placed.role: asleep_bytes(placed.layout) if on_gpus else 0 for placed in generating}

    def beside(role: str, kept: Mapping[str, int]) -> int:
        return sum(kept[other] for other in placement.sharers(role))

    offloaded: tuple[Kind, ...] = ()
    for offloaded in _offload_steps(question, placement, generating):
        waiting = {
            each.placed.role: kept_bytes(each, offloaded if each.placed.role == "actor" else each.offloaded)
            for each in alone
        } | {
            # A reward model works while the rollout is awake.
            each.placed.role: each.binding.total
            for each in alone
            if each.placed.role == "reward"
        }
        sending = {
            each.placed.role: max(kept_while_sending(stage, offloaded) for stage in each.memory)
            for each in alone
            if each.placed.role == "actor"
        }
        rollouts = tuple(
            replace(
                rollout,
                arriving=rollout.memory.weights
                + kept[rollout.placed.role]
                + beside(rollout.placed.role, kept | waiting | sending),
            )
            for placed in generating
            for rollout in [plan_rollout(question, placed, beside(placed.role, kept | waiting))]
        )
        if all(_has_room(rollout, question) for rollout in rollouts):
            break
    # While a critic works, the actor offloads what it does for a rollout, or what the recipe says.
    for_critic = {
        each.placed.role: kept_bytes(each, offloaded or question.offload.asked)
        for each in alone
        if each.placed.role == "actor"
    }
    # A reward model works while the actor waits for the rollout.
    for_reward = {each.placed.role: kept_bytes(each, offloaded) for each in alone if each.placed.role == "actor"}
    others = {"critic": for_critic, "reward": for_reward}
    trainers = tuple(
        replace(each, beside=beside(each.placed.role, kept | others.get(each.placed.role, {}))) for each in alone
    )
    blueprint = Blueprint(question, placement, trainers, rollouts, offloaded, (), ())
    problems = (*_model_problems(blueprint), *_memory_problems(blueprint))
    return replace(blueprint, problems=problems, notes=tuple(_notes(blueprint)))


def plan_alone(question: Question, placement: Placement, placed: RolePlacement) -> TrainerPlan:
    """Return what a role that trains, or a frozen model, needs if no role shares its devices, and what it offloads."""
    trainer = plan_trainer(question, placed)
    if placed.role == "ref":
        return replace(trainer, offloaded=("params",) if question.reference_is_offloaded else ())
    own = question.critic if placed.role == "critic" else question.frozen.get(placed.role)
    if own is None:
        return trainer
    shares = bool(placement.sharers(placed.role)) and question.gpus_per_node > 0
    return replace(trainer, offloaded=own.offloaded(shares=shares))


def _offload_steps(
    question: Question, placement: Placement, generating: Sequence[RolePlacement]
) -> Iterator[tuple[Kind, ...]]:
    """Yield what the actor could offload, from the least to the most; nothing if no rollout shares its GPUs."""
    if question.gpus_per_node > 0 and any("actor" in placement.sharers(placed.role) for placed in generating):
        yield from question.offload.steps()
    else:
        yield ()


def _with_sending(trainer: TrainerPlan, question: Question, placement: Placement) -> TrainerPlan:
    """Return the actor's plan with the buckets in which its weights go to the rollout."""
    if trainer.placed.role != "actor" or "rollout" not in placement:
        return trainer
    transport = pick(question.weight_transport, placement)
    sending = sending_bytes(trainer.placed.layout, question.shape, transport, element_bytes=question.work.element_bytes)
    overlapping = overlapping_bytes(question, placement)

    def sends(stage: RankMemory) -> RankMemory:
        return replace(stage, sending=sending, buffers=stage.buffers + overlapping)

    return replace(
        trainer,
        memory=tuple(sends(stage) for stage in trainer.memory),
        modes={mode: sends(stage) for mode, stage in trainer.modes.items()},
    )


def _has_room(rollout: RolloutPlan, question: Question) -> bool:
    """Return whether a rollout holds as many of the longest sequences as it decodes at one time."""
    if any(_rollout_problems(rollout, question)):
        return False
    wanted = min(question.generation_batch, -(-question.generated // rollout.placed.layout.dp))
    return rollout.memory.sequences >= wanted


def _model_problems(blueprint: Blueprint) -> Iterator[str]:
    for rollout in blueprint.rollouts:
        for line in layout_problems(rollout.placed.layout, blueprint.question.shape):
            yield f"{rollout.placed.role}: {line}"
    yield from replica_problems(blueprint.placement)
    for trainer in blueprint.trainers:
        sequences = blueprint.question.of(trainer.placed.role).work.sequences
        if trainer.time is not None and trainer.placed.layout.dp > sequences:
            yield (
                f"{trainer.placed.role}: d{trainer.placed.layout.dp} shares out {sequences} "
                "sequences of a step: some ranks would have none; use fewer replicas or more sequences"
            )


def _memory_problems(blueprint: Blueprint) -> Iterator[str]:
    question = blueprint.question
    if question.gpus_per_node == 0:
        return
    for trainer in blueprint.trainers:
        yield from _trainer_problems(trainer, question)
    for rollout in blueprint.rollouts:
        yield from _rollout_problems(rollout, question)
    yield from host_problems(blueprint.host_memory, question.host_memory_gib)


def _trainer_problems(trainer: TrainerPlan, question: Question) -> Iterator[str]:
    stage, room = trainer.binding, question.gpu.memory
    if stage.total + trainer.beside > room:
        yield (
            f"{trainer.placed.role}: rank {trainer.binding_rank} (stage {stage.stage}) needs {gb(stage.total)} GB"
            f"{_besides(trainer.beside)}, of the {gb(room)} GB of a {question.gpu.name}; {_relief(trainer, question)}"
        )


def _rollout_problems(rollout: RolloutPlan, question: Question) -> Iterator[str]:
    memory, room = rollout.memory, question.gpu.memory
    relief = ["split replicas further (t)", "give roles devices of their own"]
    if not rollout.placed.layout.is_server:
        relief.append("lower rollout.max_batch_size")
    elif question.memory_fraction is not None:
        relief.append("lower rollout.memory_fraction")
    besides = _besides(rollout.beside)
    if memory.total + rollout.beside > room:
        yield (
            f"{rollout.placed.role}: a rank needs {gb(memory.total)} GB{besides}, of the {gb(room)} GB of a "
            f"{question.gpu.name}; {', or '.join(relief)}"
        )
    elif rollout.arriving > room:
        yield (
            f"{rollout.placed.role}: while new weights arrive, a GPU has {gb(rollout.arriving)} GB on it, of the "
            f"{gb(room)} GB of a {question.gpu.name}: {gb(memory.weights)} GB of the rollout's weights, the actor's, "
            "the buckets between them, and what is not offloaded; split replicas further (t), or give the roles "
            "devices of their own"
        )
    elif memory.sequences == 0:
        yield (
            f"{rollout.placed.role}: {gb(memory.weights)} GB of weights leave no room for the keys and values of one "
            f"sequence of {question.work.sequence_length} tokens{besides}; split replicas further (t)"
        )


def _besides(beside: int) -> str:
    return f", besides the {gb(beside)} GB that the roles on the same devices keep" if beside else ""


def _relief(trainer: TrainerPlan, question: Question) -> str:
    """Return the first thing to try for a stage that is too large."""
    role, layout = trainer.placed.role, trainer.placed.layout
    if trainer.binding.resident > question.gpu.memory:
        is_trained = trainer.time is not None
        letters = _letters("pte" if question.of(role).shape.is_moe else "pt", layout)
        # Replicas of a frozen model on Megatron-Core are whole.
        replicas = ", or add replicas (d)" if is_trained or layout.backend == "fsdp" else ""
        alone = "weights and optimizer" if is_trained else "weights"
        return f"its {alone} alone are too large: split the model further ({letters}){replicas}"
    room = question.gpu.memory - trainer.beside
    if trainer.binding.resident > room:
        return "the other roles leave it too little: split or offload them further, or give roles devices of their own"
    for mode, memory in trainer.modes.items():
        if memory.total <= room:
            return f"with {ROLES[role].key}.{layout.backend}.recompute={mode} it needs {gb(memory.total)} GB"
    tried = "full recomputation is not enough either: " if trainer.modes else ""
    return f"{tried}lower {_micro_batches(role)}, or split further ({_letters('ctp', layout)})"


def _letters(letters: str, layout: ParallelLayout) -> str:
    """Return those of `letters` that a layout's engine takes, as a list."""
    return ", ".join(letter for letter in letters if letter in BACKENDS[layout.backend].letters)


def _micro_batches(role: str) -> str:
    """Return the key of the tokens of a role's micro-batches."""
    return f"{ROLES[role].key}.mb_spec.max_tokens_per_mb"


def _notes(blueprint: Blueprint) -> Iterator[str]:
    question = blueprint.question
    yield from question.notes
    yield from blueprint.placement.warnings()
    for trainer in blueprint.trainers:
        if question.gpus_per_node == 0:
            continue
        left = question.gpu.memory - trainer.binding.total - trainer.beside
        if 0 <= left < HEADROOM * question.gpu.memory:
            yield (
                f"{trainer.placed.role}: rank {trainer.binding_rank} (stage {trainer.binding.stage}) has {gb(left)} GB "
                "to spare, which uneven experts or fragmentation may take"
            )
        yield from _time_notes(trainer)
    for rollout in blueprint.rollouts:
        if (n_nodes := rollout.placed.nodes_per_replica) > 1:
            yield (
                f"{rollout.placed.role}: each replica is on {n_nodes} nodes, which has never been tried over a network "
                "(docs/rollout.md)"
            )
    yield from _turns(blueprint)
    yield from _host_notes(blueprint)


def _host_notes(blueprint: Blueprint) -> Iterator[str]:
    """Yield a line if state or a copy of it is in host memory."""
    _, most = fullest(blueprint.host_memory)
    if blueprint.question.gpus_per_node > 0 and most.total > most.processes:
        limit = blueprint.question.host_memory_gib
        of = "" if limit is None else f", of the {gb(limit * GIB)} GB of cluster.host_memory_gib"
        yield f"a node needs up to {gb(most.total)} GB of host memory{of}: {most.describe()}"
        if blueprint.question.writes_checkpoints and not blueprint.copies_state:
            yield "training waits while a checkpoint is written, because no copy of its state is in host memory"


def _turns(blueprint: Blueprint) -> Iterator[str]:
    """Yield one line for each pair of roles that take turns on the same devices."""
    question = blueprint.question
    for rollout in blueprint.rollouts:
        apart = {"critic", *question.frozen}
        if sharers := [name for name in blueprint.placement.sharers(rollout.placed.role) if name not in apart]:
            role, others = rollout.placed.role, " and ".join(sharers)
            waiting = {each.placed.role: each for each in blueprint.trainers if each.placed.role in sharers}
            gone = {name: each.offloaded for name, each in waiting.items()} | {"actor": blueprint.offloaded}
            kinds = {
                name: [NAMES[kind] for kind in KINDS if kind not in gone[name] and _has(each, kind)]
                for name, each in waiting.items()
            }
            staying = [f"the {' and '.join(names)} of {name}" for name, names in kinds.items() if names]
            moved = [NAMES[kind] for kind in blueprint.offloaded if "actor" in waiting and _has(waiting["actor"], kind)]
            stay = f"{' and '.join(staying)} stay on the devices" if staying else "nothing stays"
            go = f", and the {' and '.join(moved)} of actor are offloaded" if moved else ""
            yield (
                f"{role} and {others} take turns on the same devices: {role} sleeps while they train or score; while "
                f"it generates, {stay}{go}"
            )
    for trainer in blueprint.trainers:
        role = trainer.placed.role
        takes_turns = role == "critic" or role in question.frozen
        if takes_turns and (others := " and ".join(blueprint.placement.sharers(role))):
            moved = [NAMES[kind] for kind in trainer.offloaded]
            go = f"its {' and '.join(moved)} are offloaded" if moved else "nothing of it is offloaded"
            yield f"{role} and {others} take turns on the same devices: {go} while it does not work"
        elif trainer.time is None and "actor" in blueprint.placement.sharers(trainer.placed.role):
            stays = "the reference's are offloaded while it does not work" if trainer.offloaded else "both stay there"
            yield f"{trainer.placed.role} and actor take turns on the same devices; of their weights, {stays}"


def _has(trainer: TrainerPlan, kind: Kind) -> bool:
    """Return whether a trainer has anything of this kind on its GPUs."""
    sizes = {"params": "weights", "grads": "gradients", "optimizer": "optimizer"}
    return any(getattr(stage, sizes[kind]) for stage in trainer.memory)


def _time_notes(trainer: TrainerPlan) -> Iterator[str]:
    role, layout, time = trainer.placed.role, trainer.placed.layout, trainer.time
    if time is None:
        return
    if time.bubble_share > 0.15:
        fewer = "add v, " if layout.vpp == 1 else ""
        yield (
            f"{role}: {time.bubble_share:.0%} of a step waits for the pipeline: {time.micro_batches} micro-batches "
            f"over {layout.pp} stages; {fewer}take fewer stages or more sequences a step"
        )
    for item in time.traffic:
        if item.dimension in ("ep", "etp") and item.crosses_nodes:
            yield f"{role}: {item.dimension} groups cross nodes; their all-to-all takes the network at every MoE layer"
    if time.launching > 0.1 * time.total:
        busy = "launches kernels and starts the experts' exchanges" if layout.ep > 1 else "launches kernels"
        yield (
            f"{role}: {time.launching / time.total:.0%} of a step the GPU waits for the host, which {busy}; larger "
            f"micro-batches ({_micro_batches(role)}) wait less"
        )
