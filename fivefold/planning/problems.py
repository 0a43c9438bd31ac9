"""The problems that keep an estimated run from starting, and notes on what is wasteful or uncertain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fivefold.config.roles import ROLES
from fivefold.config.schema.role import OFFLOADABLE, Offloadable
from fivefold.layout.backends import BACKENDS
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.estimates import Estimate, ModelEstimate, RolloutEstimate, gb
from fivefold.planning.host_memory import GIB, USABLE, HostMemory, exceeds_host, fullest
from fivefold.planning.inputs import Inputs
from fivefold.planning.memory import RankMemory
from fivefold.rules.layouts import layout_problems, replica_problems

NAMES: Mapping[Offloadable, str] = {"params": "weights", "grads": "gradients", "optimizer": "optimizer state"}
HEADROOM = 0.05
"""Share of a GPU's memory that fragmentation and uneven experts may take. With less left, a plan is tight."""


def problems_of(estimate: Estimate) -> Iterator[str]:
    """Yield a line for each reason why a run cannot start."""
    inputs = estimate.inputs
    for rollout in estimate.rollouts:
        for line in layout_problems(rollout.placed.layout, inputs.generated_with(rollout.placed.role)[0]):
            yield f"{rollout.placed.role}: {line}"
    yield from replica_problems(estimate.placement)
    for model in estimate.models:
        dp, sequences = model.placed.layout.dp, inputs.models[model.placed.role].work.sequences
        if model.time is not None and dp > sequences:
            yield (
                f"{model.placed.role}: d{dp} shares out {sequences} sequences of a step: some ranks would have none; "
                "use fewer replicas or more sequences"
            )
    if not inputs.on_gpus:
        return
    for model in estimate.models:
        yield from _model_problems(model, inputs)
    for rollout in estimate.rollouts:
        yield from rollout_problems(rollout, inputs)
    yield from _host_problems(estimate)


def _model_problems(model: ModelEstimate, inputs: Inputs) -> Iterator[str]:
    stage, room = model.binding, inputs.gpu.memory
    if stage.total + model.others > room:
        yield (
            f"{model.placed.role}: rank {model.binding_rank} (stage {stage.stage}) needs {gb(stage.total)} GB"
            f"{_besides(model.others)}, of the {gb(room)} GB of a {inputs.gpu.name}; {_relief(model, inputs)}"
        )


def rollout_problems(rollout: RolloutEstimate, inputs: Inputs) -> Iterator[str]:
    """Yield a line if a rollout lacks memory."""
    memory, room, key = rollout.memory, inputs.gpu.memory, ROLES[rollout.placed.role].key
    relief = ["split replicas further (t)", "give roles separate devices"]
    if not rollout.placed.layout.is_server:
        relief.append(f"lower {key}.max_batch_size")
    elif inputs.generator(rollout.placed.role).memory_fraction is not None:
        relief.append(f"lower {key}.memory_fraction")
    besides = _besides(rollout.others)
    if memory.total + rollout.others > room:
        yield (
            f"{rollout.placed.role}: a rank needs {gb(memory.total)} GB{besides}, of the {gb(room)} GB of a "
            f"{inputs.gpu.name}; {', or '.join(relief)}"
        )
    elif rollout.arriving > room:
        yield (
            f"{rollout.placed.role}: while new weights arrive, a GPU holds {gb(rollout.arriving)} GB, of the "
            f"{gb(room)} GB of a {inputs.gpu.name}: {gb(memory.weights)} GB of the rollout's weights, the actor's, "
            "the buckets between them, and what is not offloaded; split replicas further (t), or give the roles "
            "separate devices"
        )
    elif memory.sequences == 0:
        yield (
            f"{rollout.placed.role}: {gb(memory.weights)} GB of weights leave no room for the keys and values of one "
            f"sequence of {inputs.generated_with(rollout.placed.role)[1]} tokens{besides}; split replicas further (t)"
        )


def _besides(others: int) -> str:
    return f", besides the {gb(others)} GB that the roles on the same devices keep" if others else ""


def _relief(model: ModelEstimate, inputs: Inputs) -> str:
    """Return the first thing to try for a stage that is too large."""
    role, layout = model.placed.role, model.placed.layout
    if model.binding.resident > inputs.gpu.memory:
        is_trained = model.time is not None
        letters = _letters("pte" if inputs.models[role].shape.is_moe else "pt", layout)
        # Replicas of a frozen model on Megatron-Core are whole.
        replicas = ", or add replicas (d)" if is_trained or layout.backend == "fsdp" else ""
        alone = "weights and optimizer" if is_trained else "weights"
        return f"its {alone} alone are too large: split the model further ({letters}){replicas}"
    room = inputs.gpu.memory - model.others
    if model.binding.resident > room:
        return "the other roles leave it too little: split or offload them further, or give roles separate devices"
    for mode, memory in model.modes.items():
        if memory.total <= room:
            return f"with {ROLES[role].key}.{layout.backend}.recompute={mode} it needs {gb(memory.total)} GB"
    tried = "full recomputation is not enough either: " if model.modes else ""
    return f"{tried}lower {_micro_batches(role)}, or split further ({_letters('ctp', layout)})"


def _letters(letters: str, layout: ParallelLayout) -> str:
    """Return the `letters` that a layout's engine takes, as a list."""
    return ", ".join(letter for letter in letters if letter in BACKENDS[layout.backend].letters)


def _micro_batches(role: str) -> str:
    """Return the key of the tokens of a role's micro-batches."""
    return f"{ROLES[role].key}.mb_spec.max_tokens_per_mb"


def _host_problems(estimate: Estimate) -> Iterator[str]:
    limit = estimate.inputs.host_memory_gib
    if limit is None or not exceeds_host(estimate.host_memory, limit):
        return
    node, most = fullest(estimate.host_memory)
    relief = [
        "offload less (actor.offload)",
        "store less of the optimizer's state (exp_avg_dtype and exp_avg_sq_dtype of actor.megatron.optimizer or "
        "actor.fsdp.optimizer; on Megatron-Core also store_param_remainders)",
    ]
    if most.snapshots:
        relief.append("write checkpoints without a copy (recover.snapshot=blocking)")
    if most.weights:
        relief.append(
            "send weights from GPU to GPU while training waits (rollout.weight_transport=ipc or nccl, and "
            "rollout.overlap_weight_sync=false)"
        )
    yield (
        f"node {node}: its roles need {gb(most.total)} GB of host memory, of the {gb(limit * GIB)} GB of "
        f"cluster.host_memory_gib (Ray lets them take {USABLE:.0%} of it): {_described(most)}; {', or '.join(relief)}"
    )


def _described(memory: HostMemory) -> str:
    """Return the parts of a node's host memory as text."""
    parts = {
        "processes": memory.processes,
        "pinned weights and optimizer state": memory.state,
        "copies for checkpoints": memory.snapshots,
        "weights on their way to the rollout": memory.weights,
    }
    return ", ".join(f"{gb(size)} GB of {name}" for name, size in parts.items() if size)


def notes_of(estimate: Estimate) -> Iterator[str]:
    """Yield a line for everything that is wasteful or uncertain."""
    inputs = estimate.inputs
    yield from inputs.notes
    yield from estimate.placement.warnings()
    for model in estimate.models if inputs.on_gpus else ():
        left = inputs.gpu.memory - model.binding.total - model.others
        if 0 <= left < HEADROOM * inputs.gpu.memory:
            yield (
                f"{model.placed.role}: rank {model.binding_rank} (stage {model.binding.stage}) has {gb(left)} GB to "
                "spare, which uneven experts or fragmentation may take"
            )
        yield from _time_notes(model)
    for rollout in estimate.rollouts:
        if (n_nodes := rollout.placed.nodes_per_replica) > 1:
            yield (
                f"{rollout.placed.role}: each replica is on {n_nodes} nodes, which has never been tried over a network "
                "(docs/rollout.md)"
            )
        yield from _rollout_turns(estimate, rollout)
    for model in estimate.models:
        yield from _model_turns(estimate, model)
    yield from _host_notes(estimate)


def _host_notes(estimate: Estimate) -> Iterator[str]:
    """Yield a line if state or a copy of it is in host memory."""
    inputs, (_, most) = estimate.inputs, fullest(estimate.host_memory)
    if inputs.on_gpus and most.total > most.processes:
        limit = inputs.host_memory_gib
        of = "" if limit is None else f", of the {gb(limit * GIB)} GB of cluster.host_memory_gib"
        yield f"a node needs up to {gb(most.total)} GB of host memory{of}: {_described(most)}"
        if inputs.writes_checkpoints and not estimate.copies_state:
            yield "training waits while a checkpoint is written, because no copy of its state is in host memory"


def _rollout_turns(estimate: Estimate, rollout: RolloutEstimate) -> Iterator[str]:
    """Yield a line if the actor or its reference take turns with a rollout on the same devices."""
    role, models = rollout.placed.role, {model.placed.role: model for model in estimate.models}
    sharers = [name for name in estimate.placement.sharers(role) if name == "actor" or ROLES[name].host == "actor"]
    if not sharers:
        return
    gone = {name: models[name].offloaded for name in sharers} | {"actor": estimate.offloaded}
    kinds = {name: _parts(models[name], [part for part in OFFLOADABLE if part not in gone[name]]) for name in sharers}
    staying = [f"the {' and '.join(parts)} of {name}" for name, parts in kinds.items() if parts]
    moved = _parts(models["actor"], estimate.offloaded) if "actor" in sharers else []
    stay = f"{' and '.join(staying)} stay on the devices" if staying else "nothing stays"
    go = f", and the {' and '.join(moved)} of actor are offloaded" if moved else ""
    if estimate.streams_frozen:
        go += ", and frozen weights are sent from host memory"
    yield (
        f"{role} and {' and '.join(sharers)} take turns on the same devices: {role} sleeps while they train or score; "
        f"while it generates, {stay}{go}"
    )


def _model_turns(estimate: Estimate, model: ModelEstimate) -> Iterator[str]:
    """Yield a line if a model other than the actor takes turns with others on the same devices."""
    role, sharers = model.placed.role, estimate.placement.sharers(model.placed.role)
    if ROLES[role].host == "actor":
        if "actor" in sharers:
            stays = f"the {role}'s are offloaded while it does not work" if model.offloaded else "both stay there"
            yield f"{role} and actor take turns on the same devices; of their weights, {stays}"
    elif role != "actor" and sharers:
        moved = [NAMES[part] for part in model.offloaded]
        go = f"its {' and '.join(moved)} are offloaded" if moved else "nothing of it is offloaded"
        yield f"{role} and {' and '.join(sharers)} take turns on the same devices: {go} while it does not work"


def _parts(model: ModelEstimate, parts: tuple[Offloadable, ...] | list[Offloadable]) -> list[str]:
    """Return the names of parts that a model has on its GPUs."""
    return [NAMES[part] for part in parts if any(_size(stage, part) for stage in model.memory)]


def _size(stage: RankMemory, part: Offloadable) -> int:
    return {"params": stage.weights, "grads": stage.gradients, "optimizer": stage.optimizer}[part]


def _time_notes(model: ModelEstimate) -> Iterator[str]:
    role, layout, time = model.placed.role, model.placed.layout, model.time
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
            yield f"{role}: {item.dimension} groups cross nodes; their all-to-all uses the network in every MoE layer"
    if time.launching > 0.1 * time.total:
        busy = "launches kernels and starts the experts' exchanges" if layout.ep > 1 else "launches kernels"
        yield (
            f"{role}: {time.launching / time.total:.0%} of a step the GPU waits for the host, which {busy}; larger "
            f"micro-batches ({_micro_batches(role)}) wait less"
        )
