"""What starts the processes of a model, whichever role it has: options of its engine, its role, the driver's handle."""

from __future__ import annotations

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.role import Role
from fivefold.config.schema.engine import EngineConfig
from fivefold.engine.sharing import BatchPlanner
from fivefold.families.read import load_shape
from fivefold.families.torch_dist import find_torch_dist
from fivefold.layout.placement import Placement
from fivefold.roles.trainer import Trainer
from fivefold.roles.trainer_worker import TrainerSpec, TrainerWorker


def trainer_role(name: str, placement: Placement, spec: TrainerSpec) -> Role:
    """Return the role of a model's processes on its devices."""
    trains = spec.optimizer is not None
    return Role(name, placement[name].devices, TrainerWorker, (spec,), distributed=True, writes_run=trains)


def trainer_of(group: WorkerGroup, spec: TrainerSpec) -> Trainer:
    """Return the driver's handle of processes that were started with `spec`."""
    shape = load_shape(resolve_model_folder(spec.model.path))
    planner = BatchPlanner.of(spec.model, spec.layout, shape)
    if spec.reference is None:
        return Trainer(group, planner)
    reference = load_shape(resolve_model_folder(spec.reference.path))
    return Trainer(group, planner, BatchPlanner.of(spec.reference, spec.layout, reference))


def engine_config(config: EngineConfig, path: str) -> EngineConfig:
    """Return the engine's options of a role's section, with `path` as its model and the checkpoint's full path."""
    fields = {name: getattr(config, name) for name in EngineConfig.model_fields}
    if (checkpoint := config.megatron.dist_checkpointing_path) is not None:
        # Resolved once: workers have other working folders, and a newer checkpoint may be written meanwhile.
        place = {"dist_checkpointing_path": str(find_torch_dist(checkpoint).resolve())}
        fields["megatron"] = config.megatron.model_copy(update=place)
    return EngineConfig(**{**fields, "path": path})
