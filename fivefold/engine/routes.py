"""The experts that each token of a micro-batch was sent to before, for router replay.

field `routes` of a share, int8 or int16 [T, MoE layers, top_k], on the host
    ──LocalRoutes.of──> this rank's tokens and layers, on the device
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.batch import Batch
from fivefold.families.shape import ModelShape
from fivefold.routes import route_dtype
from fivefold.types import ROUTES, UNKNOWN_EXPERT


@dataclass(frozen=True)
class LocalRoutes:
    """Routes of this rank's part of a micro-batch. T: its tokens. L: MoE layers on this rank. K: experts of a token."""

    rows_T: torch.Tensor
    """int64 [T], CPU: index of each token in the share's batch; -1: filler."""
    given_TLK: torch.Tensor | None
    """int8 or int16 [T, L, K], on the device; `UNKNOWN_EXPERT` where the router itself chooses. None: all routers
    choose, and their choices are recorded."""

    @staticmethod
    def of(batch: Batch, rows_T: torch.Tensor, layers: Sequence[int], device: torch.device) -> LocalRoutes:
        """Take the routes of tokens from a share's batch.

        Args:
            batch: the share's sequences; without the field `routes`, choices are recorded.
            rows_T: int64 [T], index of each token in the batch; -1: filler.
            layers: index of each MoE layer of this rank among all of the model.
            device: the model's device.
        """
        routes = batch.fields.get(ROUTES)
        if routes is None:
            return LocalRoutes(rows_T, None)
        own = routes[rows_T.clamp(min=0).unsqueeze(1), torch.tensor(list(layers), dtype=torch.int64)]
        own[rows_T < 0] = UNKNOWN_EXPERT
        return LocalRoutes(rows_T, own.to(device, non_blocking=True))

    def part(self, index: int, n_parts: int) -> LocalRoutes:
        """Return one of equal parts of the tokens."""
        given = None if self.given_TLK is None else self.given_TLK.chunk(n_parts)[index]
        return replace(self, rows_T=self.rows_T.chunk(n_parts)[index], given_TLK=given)


@dataclass(eq=False)
class MicroBatchRoutes:
    """The routes of one micro-batch in one chunk of the model, and how often each was asked for."""

    routes: LocalRoutes
    """The routes of this rank's tokens. Under sequence parallelism, this rank's part of them."""
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    """The choice of each router, [T, top_k], by its row, where routes are recorded."""
    uses: dict[int, list[int]] = field(default_factory=dict)
    """How often each router was computed, by its row: without a gradient or once more, and with a gradient."""

    def used(self, row: int, *, counts: bool) -> None:
        """Count a use by the router of a row, one that computes a gradient if it `counts`."""
        self.uses.setdefault(row, [0, 0])[counts] += 1

    def check(self, row: int, layer: int, *, with_gradient: bool) -> None:
        """Check that a router has used the routes as often as it must.

        With a gradient that is exactly once, and once without where the backward pass computes the layer again.

        Args:
            row: the router's row.
            layer: its layer, counted from 0, for the message.
            with_gradient: whether a gradient was computed.

        Raises:
            RuntimeError: naming the layer and the first token of the micro-batch.
        """
        uses = self.uses.get(row, [0, 0])
        if uses not in (([0, 1], [1, 1]) if with_gradient else ([1, 0],)):
            raise RuntimeError(
                f"router replay: layer {layer} has used the routes of the micro-batch whose first token is "
                f"{int(self.routes.rows_T[0])} of the share {uses[0]} times without and {uses[1]} times with a "
                "gradient, and must use them once: set actor.router_replay to none, and report this fault"
            )


def replayed(own_TK: torch.Tensor, given_TK: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the given experts of each token where they are known, and its router's own choice elsewhere.

    Args:
        own_TK: int64, the experts that the router chooses.
        given_TK: int8 or int16, the recorded experts; `UNKNOWN_EXPERT` where they are not known.
        n_experts: number of experts.

    Returns:
        int64 [T, K], and float64 [3]: replayed choices that the router would have made otherwise, replayed choices, and
        tokens whose recorded experts cannot be a choice, which are not replayed.
    """
    given_TK = given_TK.long()
    known_T = (given_TK >= 0).all(-1)
    is_distinct_T = (given_TK.unsqueeze(2) == given_TK.unsqueeze(1)).sum((1, 2)) == given_TK.shape[1]
    is_choice_T = known_T & is_distinct_T & (given_TK < n_experts).all(-1)
    chosen_TK = torch.where(is_choice_T.unsqueeze(1), given_TK, own_TK)
    same_TK = (own_TK.unsqueeze(2) == chosen_TK.unsqueeze(1)).any(2)
    n_replayed = is_choice_T.sum() * own_TK.shape[1]
    return chosen_TK, torch.stack([(~same_TK).sum(), n_replayed, (known_T & ~is_choice_T).sum()]).double()


def recorded_routes(
    micro_batches: Iterable[MicroBatchRoutes],
    layers: Sequence[int],
    n_tokens: int,
    shape: ModelShape,
    device: torch.device,
    groups: Iterable[dist.ProcessGroup],
) -> torch.Tensor:
    """Return the choices that routers have recorded over a share, on the CPU: int8 or int16 [T, MoE layers, top_k].

    Args:
        micro_batches: the routes of this rank, of all micro-batches and chunks.
        layers: index of each router's layer among all MoE layers of the model, by the router's row.
        n_tokens: tokens of the share.
        shape: the model's.
        device: the model's.
        groups: the groups whose ranks have different tokens or layers of the share.
    """
    routes_TLK = torch.zeros(n_tokens, shape.n_moe_layers, shape.top_k, dtype=torch.int32, device=device)
    for micro_batch in micro_batches:
        real = micro_batch.routes.rows_T >= 0
        rows_T, real = micro_batch.routes.rows_T[real].to(device), real.to(device)
        for row, chosen_TK in micro_batch.chosen.items():
            routes_TLK[rows_T, layers[row]] = chosen_TK[real].int()
    for group in groups:
        dist.all_reduce(routes_TLK, group=group)
    return routes_TLK.to(route_dtype(shape.n_experts)).cpu()


def require_routes(batch: Batch) -> None:
    """Refuse a mini-batch without routes.

    Raises:
        ValueError: the batch has none.
    """
    if ROUTES not in batch.fields:
        raise ValueError(
            "the batch has no routes to replay, because the rollout's engine has reported none: set "
            "actor.router_replay to old_logprobs or none"
        )


def replay_metrics(counts_L3: torch.Tensor, n_choices: float, moe_layers: Sequence[bool]) -> Metrics:
    """Return the share of choices that were replayed, and how many of these the routers would have made otherwise.

    Over all layers they are `replay/share` and `replay/differs`, of layer n `replay/differs/layer_<n>`.

    Args:
        counts_L3: for each layer, replayed choices that the router would have made otherwise, replayed choices, and
            tokens whose recorded experts cannot be a choice.
        n_choices: choices of all layers.
        moe_layers: which layers have experts.

    Raises:
        RuntimeError: recorded experts that cannot be a choice.
    """
    counts = counts_L3.tolist()
    layers = [layer for layer, is_moe in enumerate(moe_layers) if is_moe]
    for layer in layers:
        if counts[layer][2]:
            raise RuntimeError(
                f"router replay: {counts[layer][2]:.0f} tokens have recorded experts in layer {layer} that are no "
                "choice, because one comes twice or the model has no such expert: the rollout's server and the trainer "
                "must run the same model. Or set actor.router_replay to none"
            )
    n_differ, n_replayed = (sum(counts[layer][column] for layer in layers) for column in (0, 1))
    width = len(str(len(moe_layers) - 1))
    differs = {f"replay/differs/layer_{layer:0{width}}": Metric(*counts[layer][:2]) for layer in layers}
    return {
        "replay/share": Metric(n_replayed, n_choices),
        **({"replay/differs": Metric(n_differ, n_replayed), **differs} if n_replayed else {}),
    }
