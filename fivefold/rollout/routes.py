"""The experts to which the embedded engine sends tokens, for router replay.

prompts   p p p p       each distinct prompt once
sampled         r r r   as they are fed to the model; the last token never is
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fivefold.routes import padded_routes, route_dtype
from fivefold.types import UNKNOWN_EXPERT, Routes


class RouteRecorder:
    """Records what the gates of a model choose. L: MoE layers. K: experts of a token."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Watch the experts of all MoE layers.

        Raises:
            ValueError: the model has none.
        """
        layers = [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]
        if not layers:
            raise ValueError(
                "router_replay=rollout records the experts of tokens, and the rollout's model has none: set "
                "actor.router_replay to none"
            )
        self._chosen: list[Tensor] = []
        self._dtype = route_dtype(max(int(layer.experts.num_experts) for layer in layers))  # type: ignore[union-attr, arg-type]
        for layer in layers:
            experts: Any = layer.experts
            experts.register_forward_pre_hook(self._record)

    def take(self) -> Tensor:
        """Return the experts of the tokens of the last forward pass, int8 or int16 [tokens, L, K]."""
        taken, self._chosen = torch.stack(self._chosen, dim=1), []
        return taken

    def _record(self, _experts: nn.Module, args: tuple[Any, ...]) -> None:
        _, chosen_TK, _ = args
        self._chosen.append(chosen_TK.to(self._dtype))


class WaveRoutes:
    """The routes of requests that begin together, N of them."""

    def __init__(self, n: int, most: int) -> None:
        """Begin without any; a completion has at most `most` tokens."""
        self._n, self._most = n, most
        self._prompts: dict[int, Tensor] = {}
        self._sampled: Tensor | None = None

    @property
    def has_prompts(self) -> bool:
        """Whether the routes of all prompts are known."""
        return len(self._prompts) == self._n

    def add_prompts(self, first: int, routes_UPLK: Tensor, lengths: Sequence[int], source: Sequence[int]) -> None:
        """Add the routes of the prompts of several requests.

        Args:
            first: index of the first request.
            routes_UPLK: routes of U distinct prompts, padded at their left.
            lengths: tokens of each distinct prompt.
            source: index of each request's prompt among the distinct ones.
        """
        on_host = routes_UPLK.cpu()
        for index, prompt in enumerate(source):
            self._prompts[first + index] = on_host[prompt, on_host.shape[1] - lengths[prompt] :]

    def add_sampled(self, requests_B: Tensor, place: int, routes_BLK: Tensor) -> None:
        """Add the routes of one sampled token of requests, the same `place` in each completion."""
        if self._sampled is None:
            shape = (self._n, self._most, *routes_BLK.shape[1:])
            self._sampled = routes_BLK.new_full(shape, UNKNOWN_EXPERT)
        self._sampled[requests_B, place] = routes_BLK

    def of(self, request: int, n_sampled: int) -> Routes:
        """Return the routes of a request's prompt and of its completion of so many tokens."""
        prompt = self._prompts[request]
        known = [prompt.numpy()]
        if self._sampled is not None:
            # The last token may have been fed to the model only because its row had not left the batch yet.
            known.append(self._sampled[request, : n_sampled - 1].cpu().numpy())
        return padded_routes(known, len(prompt) + n_sampled, prompt.dtype)
