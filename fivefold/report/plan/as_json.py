"""A plan as JSON: the numbers of the tables, in bytes, seconds and FLOPs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import Gpu
from fivefold.planning.estimates import Estimate, ModelEstimate, RolloutEstimate
from fivefold.planning.plan import Plan
from fivefold.planning.search import Candidate, Found, reasons
from fivefold.planning.simulation.look_ahead import Choice, LookAhead
from fivefold.planning.stages import Stage, stages
from fivefold.planning.timing import StepTime
from fivefold.report.plan.ranks import RANK_COLUMNS, rank_rows


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan, with the outcome of its search if there was one, as values that `json.dumps` takes."""
    failed = {"fits": False, "notes": list(plan.inputs.notes)}
    values = failed if plan.estimate is None else _estimate(plan.estimate)
    return values if plan.found is None else {**values, "search": _found(plan.found)}


def look_ahead_as_json(result: LookAhead) -> dict[str, Any]:
    """Return a simulated look-ahead as values that `json.dumps` takes."""
    return {
        "length_mean": result.lengths.mean,
        "length_max": result.lengths.longest,
        "turns_mean": result.lengths.turns,
        "read_mean": result.lengths.read,
        "splits": result.n_splits,
        "choices": [_choice(choice) for choice in result.choices],
        "context_groups": None if result.context is None else asdict(result.context) | {"gain": result.context.gain},
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    inputs = estimate.inputs
    shape = inputs.actor.shape
    return {
        "model": {
            "name": shape.name,
            "family": shape.family,
            "parameters": shape.n_parameters,
            "active_parameters": shape.n_active_parameters,
        },
        "allocation": str(inputs.allocation),
        "devices": None if inputs.devices is None else {role: list(at) for role, at in inputs.devices.items()},
        "cluster": {"nodes": inputs.n_nodes, "gpus_per_node": inputs.gpus_per_node, "gpu": asdict(inputs.gpu)},
        "work": asdict(inputs.actor.work),
        "host_memory": [
            {"node": node, **asdict(memory), "total": memory.total}
            for node, memory in sorted(estimate.host_memory.items())
        ],
        "fits": estimate.fits,
        "problems": list(estimate.problems),
        "notes": list(estimate.notes),
        "roles": [
            *(_model(each, inputs.models[each.placed.role].shape, inputs.gpu) for each in estimate.models),
            *(_rollout(rollout) for rollout in estimate.rollouts),
        ],
    }


def _model(model: ModelEstimate, shape: ModelShape, gpu: Gpu) -> dict[str, Any]:
    placed = model.placed
    return {
        "role": placed.role,
        "layout": {name: value for name, value in asdict(placed.layout).items() if name != "split"},
        "stage_layers": [list(stage.spans) for stage in stages(placed.layout, shape)],
        "memory": [{**asdict(stage), "allocated": stage.allocated, "total": stage.total} for stage in model.memory],
        "waiting_roles": model.others,
        "memory_by_recompute": {mode: stage.total for mode, stage in model.modes.items()},
        "binding_rank": model.binding_rank,
        "binding_stage": model.binding.stage,
        "step": None if model.time is None else _step(model.time, gpu),
        "groups": [asdict(spread) for spread in model.spreads],
        "stages": [_stage(stage) for stage in stages(placed.layout, shape)],
        "ranks": [dict(zip(RANK_COLUMNS, row, strict=True)) for row in rank_rows(placed, shape)],
    }


def _stage(stage: Stage) -> dict[str, Any]:
    return {
        "stage": stage.index,
        "virtual_stages": [[chunk[0], chunk[-1]] for chunk in stage.chunks],
        "embedding": stage.has_embedding,
        "head": stage.has_head,
    }


def _step(time: StepTime, gpu: Gpu) -> dict[str, Any]:
    low, high = time.mfu_range
    traffic = [
        {**asdict(item), "crosses_nodes": item.crosses_nodes, "seconds": item.seconds(gpu)} for item in time.traffic
    ]
    return {
        **asdict(time),
        "seconds": time.total,
        "bubble_share": time.bubble_share,
        "mfu_range": [low, high],
        "traffic": traffic,
    }


def _rollout(rollout: RolloutEstimate) -> dict[str, Any]:
    memory = rollout.memory
    return {
        "role": rollout.placed.role,
        "layout": asdict(rollout.placed.layout),
        "memory": {
            **asdict(memory),
            "total": memory.total,
            "waiting_roles": rollout.others,
            "arriving": rollout.arriving,
        },
        "groups": [asdict(spread) for spread in rollout.spreads],
        "devices": [list(device) for device in rollout.placed.devices],
    }


def _found(found: Found) -> dict[str, Any]:
    return {
        "tried": found.n_tried,
        "fitting": found.n_fitting,
        "advice": list(found.advice),
        "best": [_candidate(candidate, found.best[0]) for candidate in found.best],
    }


def _candidate(candidate: Candidate, first: Candidate) -> dict[str, Any]:
    return {
        "backend": candidate.text,
        "recompute": candidate.recompute,
        "memory": candidate.binding.total,
        "seconds": candidate.time.total,
        "mfu": candidate.time.mfu,
        "tokens_per_second_per_gpu": candidate.time.tokens_per_second,
        "reasons": list(reasons(candidate, first)),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    split, outcome = choice.split, asdict(choice.outcome)
    del outcome["finished"]
    return {
        "max_head_offpolicyness": choice.max_age,
        "actor": str(replace(split.actor, name=None)),
        "rollout": str(replace(split.rollout, name=None)),
        "colocate": split.setting.shares_devices,
        "train_seconds": split.setting.train_seconds,
        "update_seconds": split.setting.update_seconds,
        "weights_overlap": asdict(overlapped) if (overlapped := choice.overlapped) else None,
        "gain": choice.gain,
        **outcome,
    }
