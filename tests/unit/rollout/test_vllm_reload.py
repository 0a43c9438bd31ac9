"""vLLM's updates of weights, over a stand-in for the part of vLLM that loses some."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fivefold.rollout.servers import vllm_dialect


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(vllm_dialect.INSIDE)
    yield __import__("fivefold_reload")
    del sys.modules["fivefold_reload"]


class Info:
    """What vLLM 0.25 keeps of a layer while an update runs."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.load_numel, self.load_numel_total, self.kernel_tensors = 0, None, None

    def can_load(self) -> bool:
        return self.load_numel_total is not None


class Layerwise:
    """Puts parameters on the meta device for an update, as vLLM 0.25 does, and back at its end."""

    def __init__(self) -> None:
        self.infos: dict[nn.Module, Info] = {}

    def get_layerwise_info(self, layer: nn.Module) -> Any:
        return self.infos.setdefault(layer, Info())

    def _get_weight_loader(self, parameter: Any) -> Any:
        return getattr(parameter, "weight_loader", update)

    def _place_kernel_tensors(self, layer: nn.Module, info: Any) -> None:
        layer._parameters.update(info.kernel_tensors[0])

    def start(self, model: nn.Module) -> None:
        for layer in model.modules():
            info, own = self.get_layerwise_info(layer), dict(layer._parameters)
            info.load_numel_total, info.kernel_tensors = (
                sum(p.numel() for p in own.values() if p is not None),
                (own, {}),
            )
            for name, parameter in own.items():
                if parameter is not None:
                    assert self._get_weight_loader(parameter).__name__ != "online_process_loader"
                    layer._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    def load(self, layer: nn.Module, name: str, weight: torch.Tensor) -> None:
        """Do what the loader of a parameter does once it has all of it."""
        info = self.get_layerwise_info(layer)
        info.load_numel += weight.numel()
        info.kernel_tensors[0][name].data.copy_(weight)

    def finish(self, model: nn.Module) -> None:
        for layer in model.modules():
            info = self.get_layerwise_info(layer)
            if info.can_load():
                self._place_kernel_tensors(layer, info)
            info.reset()


class GptOssForCausalLM(nn.Module):
    """Two linear layers, one of which is the embedding's twin, experts, sinks and a rotation without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head, self.experts = nn.Linear(2, 3), nn.Linear(2, 3), nn.Module()
        self.lm_head._parameters.update(self.embed._parameters)
        self.experts.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.experts.quant_method = type("UnquantizedFusedMoEMethod", (), {})()  # type: ignore[assignment]
        self.attention, self.rotation = nn.Module(), nn.Module()
        self.attention.sinks = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.embed.bias.weight_loader = partial(update)  # as the norms of MiniMax-M2 have
        self.rotation.register_buffer("cache", torch.ones(2))


class OtherForCausalLM(GptOssForCausalLM):
    """The same layers, for which nothing is done."""


def update(engine: Any, layerwise: Layerwise, model: Any, value: float, *, embeds: bool = True) -> None:
    """Send a value for all weights, as a model that copies into some parameters loads them."""
    engine.start_weight_update()
    if embeds:
        layerwise.load(model.embed, "weight", torch.full((3, 2), value))
        layerwise.load(model.embed, "bias", torch.full((3,), value))
    model.experts.weight.copy_(torch.full((2,), value))
    model.attention.sinks.data.copy_(torch.full((2,), value))
    engine.finish_weight_update()


def guarded(inside: Any, model: nn.Module, *, is_random: bool = True) -> tuple[Any, Layerwise]:
    layerwise = Layerwise()
    engine = SimpleNamespace(
        start_weight_update=lambda: layerwise.start(model), finish_weight_update=lambda: layerwise.finish(model)
    )
    inside.guard_updates(engine, model, layerwise, is_random=is_random)
    inside.guard_updates(engine, model, layerwise, is_random=is_random)  # a second call adds nothing
    return engine, layerwise


def test_tensors_that_a_model_copies_into_parameters_arrive(inside: Any) -> None:
    model = GptOssForCausalLM()
    engine, layerwise = guarded(inside, model)
    places = [model.experts.weight.data_ptr(), model.attention.sinks.data_ptr()]
    for value in (1.0, 2.0):
        update(engine, layerwise, model, value)
        assert {name: set(p.flatten().tolist()) for name, p in model.named_parameters()} == {
            name: {value} for name in ("embed.weight", "embed.bias", "experts.weight", "attention.sinks")
        }
    # CUDA graphs have read these places.
    assert [model.experts.weight.data_ptr(), model.attention.sinks.data_ptr()] == places


def test_a_first_update_that_leaves_random_weights_is_an_error(inside: Any) -> None:
    model = OtherForCausalLM()
    engine, layerwise = guarded(inside, model)
    with pytest.raises(RuntimeError, match="took none of the weights of experts and 1 more layers, which stay random"):
        update(engine, layerwise, model, 1.0)


def test_later_updates_and_servers_with_files_may_get_some_weights_alone(inside: Any) -> None:
    model = GptOssForCausalLM()
    engine, layerwise = guarded(inside, model)
    with pytest.raises(RuntimeError, match="weights of embed"):
        update(engine, layerwise, model, 1.0, embeds=False)
    update(engine, layerwise, model, 1.0)
    update(engine, layerwise, model, 2.0, embeds=False)
    model = OtherForCausalLM()
    engine, layerwise = guarded(inside, model, is_random=False)
    update(engine, layerwise, model, 1.0)
    assert model.experts.weight.tolist() == [0.0, 0.0]
