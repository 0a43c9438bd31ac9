"""Router replay on a decoder of transformers.

gate ──> (logits, weights, experts) ──hook──> (logits, weights of the given experts, the given experts)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fivefold.algorithms.metrics import Metrics
from fivefold.engine.routes import LocalRoutes, MicroBatchRoutes, recorded_routes, replay_metrics, replayed
from fivefold.families.registry import find_family
from fivefold.families.shape import ModelShape
from fivefold.routes import route_dtype


class Replay:
    """The gates of a decoder, whose choices are recorded and replayed."""

    def __init__(self, layers: nn.ModuleList, shape: ModelShape, device: torch.device) -> None:
        """Take the gates of a decoder's layers; `device` is the model's."""
        self._shape, self._device = shape, device
        self._layers = [number for number, is_moe in enumerate(shape.moe_layers) if is_moe]
        self.layers = tuple(range(len(self._layers)))
        """Index of each MoE layer of this rank among all of the model."""
        self._micro_batch: MicroBatchRoutes | None = None
        self._noted: list[MicroBatchRoutes] = []
        self._counts_L3 = torch.zeros(shape.n_layers, 3, dtype=torch.float64, device=device)
        moe = find_family(shape.family).moe
        assert moe is not None, "routes are of models with experts"
        for row, layer in enumerate(self._layers):
            decoder_layer: Any = layers[layer]
            decoder_layer.get_submodule(moe.router_in_memory).register_forward_hook(partial(self._choose, row))

    def start(self) -> None:
        """Forget what was counted and recorded."""
        self._noted = []
        self._counts_L3.zero_()

    @contextmanager
    def working(self, routes: LocalRoutes | None) -> Iterator[None]:
        """Record or replay the routes of one micro-batch inside the block, in its backward pass too."""
        assert routes is not None, "the micro-batch was built without routes"
        self._micro_batch = MicroBatchRoutes(routes)
        self._noted.append(self._micro_batch)
        yield
        self._micro_batch = None

    def check(self, *, with_gradient: bool) -> None:
        """Check that each gate has used the routes of each micro-batch as often as it must.

        Raises:
            RuntimeError: see `MicroBatchRoutes.check`.
        """
        for micro_batch in self._noted:
            for row, layer in enumerate(self._layers):
                micro_batch.check(row, layer, with_gradient=with_gradient)

    def metrics(self, n_choices: float, group: dist.ProcessGroup) -> Metrics:
        """Return how far replayed choices differ from the gates' own, and forget the routes; see `replay_metrics`.

        Args:
            n_choices: choices of all layers, of all ranks' tokens.
            group: the ranks that have different tokens.
        """
        total_L3 = self._counts_L3.clone()
        dist.all_reduce(total_L3, group=group)
        self._noted = []
        return replay_metrics(total_L3, n_choices, self._shape.moe_layers)

    def recorded(self, n_tokens: int, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the choices of the last pass over a share, and forget them: int8 or int16 [T, MoE layers, top_k].

        They are on the CPU.

        Args:
            n_tokens: tokens of the share.
            group: the ranks that split its sequences.
        """
        routes_TLK = recorded_routes(self._noted, self.layers, n_tokens, self._shape, self._device, [group])
        self._noted = []
        return routes_TLK

    def _choose(self, row: int, _gate: nn.Module, _args: Any, output: tuple[torch.Tensor, ...]) -> Any:
        logits_TE, weights_TK, own_TK = output
        assert self._micro_batch is not None, "a gate works outside of `working`"
        # A layer that is computed again in the backward pass has a gradient both times.
        counts = torch.is_grad_enabled() and not self._micro_batch.uses.get(row, [0, 0])[1]
        self._micro_batch.used(row, counts=counts)
        given_TLK = self._micro_batch.routes.given_TLK
        if given_TLK is None:
            self._micro_batch.chosen[row] = own_TK.to(route_dtype(self._shape.n_experts))
            return output
        chosen_TK, counts_3 = replayed(own_TK, given_TLK[:, row], self._shape.n_experts)
        if counts:
            self._counts_L3[self._layers[row]] += counts_3
        return logits_TE, self._weights(logits_TE, chosen_TK).to(weights_TK.dtype), chosen_TK

    def _weights(self, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
        """Return the weights that a gate gives to experts, float32 [T, K]."""
        is_sigmoid = self._shape.router_scores == "sigmoid"
        scores_TE = logits_TE.float().sigmoid() if is_sigmoid else logits_TE.float().softmax(-1)
        weights_TK = scores_TE.gather(1, chosen_TK)
        if self._shape.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + (1e-20 if is_sigmoid else 0.0))
        return weights_TK * self._shape.router_scale
