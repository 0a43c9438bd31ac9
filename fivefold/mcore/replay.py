"""Router replay on Megatron-Core: what all routers of a rank have recorded and replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from fivefold.algorithms.metrics import Metrics
from fivefold.engine.routes import MicroBatchRoutes, recorded_routes, replay_metrics
from fivefold.families.shape import ModelShape
from fivefold.mcore.router import Router, forget_micro_batches


class Replay:
    """The routers of this rank, whose choices are recorded and replayed."""

    def __init__(self, routers: Sequence[Router], shape: ModelShape) -> None:
        """Take the routers; the `Choice` of each must have the row of its place in the list."""
        self._routers, self._shape = routers, shape
        self.layers = tuple(sum(shape.moe_layers[: router.layer_number - 1]) for router in routers)
        """Index of each router's layer among all MoE layers of the model."""

    def check(self, *, with_gradient: bool) -> None:
        """Check that each router has used the routes of each micro-batch as often as it must.

        Raises:
            RuntimeError: see `MicroBatchRoutes.check`.
        """
        for row, router in enumerate(self._routers):
            for micro_batch in _noted(router):
                micro_batch.check(row, router.layer_number - 1, with_gradient=with_gradient)

    def metrics(self, n_choices: float) -> Metrics:
        """Return how far replayed choices differ from the routers' own, and forget the routes; see `replay_metrics`.

        Args:
            n_choices: choices of all layers, of all ranks' tokens.
        """
        counted_L3 = torch.zeros(
            self._shape.n_layers, 3, dtype=torch.float64, device=torch.device(torch.cuda.current_device())
        )
        for router in self._routers:
            if router.choice is not None and router.choice.counts_3 is not None:
                counted_L3[router.layer_number - 1] = router.choice.counts_3
        # Each token is on one rank of a stage, and each layer on one stage.
        dist.all_reduce(counted_L3)
        forget_micro_batches(self._routers)
        return replay_metrics(counted_L3, n_choices, self._shape.moe_layers)

    def recorded(self, n_tokens: int, groups: ProcessGroupCollection, *, sequence_parallel: bool) -> torch.Tensor:
        """Return the choices of the last pass over a share, and forget them: int8 or int16 [T, MoE layers, top_k].

        They are on the CPU.

        Args:
            n_tokens: tokens of the share.
            groups: the groups of this process.
            sequence_parallel: whether tensor-parallel ranks have different tokens.
        """
        # The routers of a chunk share a micro-batch's routes.
        noted = {id(each): each for router in self._routers for each in _noted(router)}
        split = (groups.pp, groups.cp, *((groups.tp,) if sequence_parallel else ()))
        device = torch.device(torch.cuda.current_device())
        routes_TLK = recorded_routes(noted.values(), self.layers, n_tokens, self._shape, device, split)
        forget_micro_batches(self._routers)
        return routes_TLK


def _noted(router: Router) -> list[MicroBatchRoutes]:
    return [noted.routes for noted in router.noted.values() if noted.routes is not None]
