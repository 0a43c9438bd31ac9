"""Builds a model on Megatron-Core from a recipe.

checks ─> process groups ─> chunks of layers ─> named parameters ─> gradient buffers ─> weights ─> optimizer, state
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.specifiers import SpecifierSet

from fivefold.bridge.audit import check_model
from fivefold.bridge.bridge import Bridge
from fivefold.bridge.export import over_stages
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.bridge.parameters import Parameter, Parameters, trained_parameters
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.megatron import Kernels, MegatronConfig
from fivefold.engine.adapters import Switch
from fivefold.engine.contract import EngineOptions
from fivefold.engine.deterministic import make_deterministic
from fivefold.engine.kernels.rounding import GradientRounding
from fivefold.engine.state.optimizer_state import StateFormat, loss_scale_of
from fivefold.engine.state.training_state import TrainingState
from fivefold.families.megatron_release import installed_release
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import Trained
from fivefold.layout.grid import rank_grid
from fivefold.layout.parallel import ParallelLayout
from fivefold.mcore import compat, settings
from fivefold.mcore.adapters import install_adapters, tracked_dropout
from fivefold.mcore.buffers import free_weights
from fivefold.mcore.model import Decoder
from fivefold.mcore.optimizer import Optimizer
from fivefold.mcore.parallel import MegatronGenerators, initialize_parallel, shard_groups
from fivefold.mcore.releases import IS_0_16
from fivefold.mcore.specs import build_chunks, spec_provider
from fivefold.mcore.tensor_names import named_tensors
from fivefold.mcore.weight_source import WeightSource

TE_VERSIONS = SpecifierSet(">=2.11,<2.12")
"""Versions of TransformerEngine whose functions `te_layers` calls; Megatron-Core 0.16.1 asks for less than 2.12."""


@dataclass(frozen=True)
class BuiltModel:
    """A model on this rank."""

    folder: Path
    """Folder of the model's config and tokenizer."""
    stored: ModelShape
    """Shape of the model in the files, which need not be a critic."""
    shape: ModelShape
    groups: ProcessGroupCollection
    shards: ShardGroups
    megatron: TransformerConfig
    bridge: Bridge
    decoders: list[Decoder]
    chunks: list[Any]
    """The decoders, each inside Megatron-Core's DDP if the model is trained."""
    parameters: Parameters[Parameter]
    optimizer: Optimizer | None
    state: TrainingState | None
    effective: dict[str, Any]
    """Values of all fields of Megatron-Core's configuration, by class."""
    adapters: Switch | None
    """Switches the low-rank adapters of the layers; None: there are none."""
    roundings: list[GradientRounding]
    """What rounds gradients that are summed in bfloat16."""


def build(config: EngineConfig, layout: ParallelLayout, options: EngineOptions) -> BuiltModel:
    """Build the model of `config.path` with its weights.

    Raises:
        ValueError: a layout or an option that the model or Megatron-Core cannot take, or weights that do not fit.
    """
    compat.prepare()
    if config.megatron.use_deterministic_algorithms:
        make_deterministic()
    folder = resolve_model_folder(config.path)
    stored = load_shape(folder)
    shape, seed, hyperparameters = options.shape_of(stored), options.seed, options.optimizer
    _check(config)
    groups = initialize_parallel(layout, seed, options.timeout_s)
    shards = shard_groups(groups)
    megatron = settings.transformer_config(config, layout, shape)
    bridge = _bridge(config, shape, folder, megatron, seed)
    provider = spec_provider(config.megatron.kernels)
    decoders = build_chunks(megatron, layout, shape, provider, replays=options.replays)
    switch = None
    if shape.adapters is not None:
        rate = shape.adapters.dropout
        switch = Switch(tracked_dropout(rate, seed, shards) if hyperparameters is not None and rate > 0 else None)
        bridge.merging = install_adapters(decoders, bridge.mappings, shape.adapters, shards, switch)
    parameters = _name_parameters(decoders, bridge, layout, shards, options.learning)
    chunks: list[Any] = list(decoders)
    effective = {"TransformerConfig": settings.effective_values(megatron)}
    if hyperparameters is not None:
        ddp = settings.ddp_config(config.megatron, layout)
        free_weights(parameters.with_gradient)
        chunks = [
            DistributedDataParallel(megatron, ddp, decoder, disable_bucketing=index > 0)
            for index, decoder in enumerate(decoders)
        ]
        effective["DistributedDataParallelConfig"] = settings.effective_values(ddp)
    source = WeightSource(config, folder, stored)
    source.load(bridge, parameters.tensors, shards, seed, torch.device(torch.cuda.current_device()))
    optimizer = state = None
    roundings: list[GradientRounding] = []
    if hyperparameters is not None:
        if not config.megatron.ddp.grad_reduce_in_fp32:
            # Imported by those who round.
            from fivefold.mcore.rounded_sums import round_gradients

            roundings = round_gradients(parameters.with_gradient, rank_grid(layout)[dist.get_rank()])
        adam = settings.optimizer_config(config, hyperparameters)
        effective["OptimizerConfig"] = settings.effective_values(adam)
        form = StateFormat.of(config.megatron.optimizer, getattr(torch, config.dtype))
        scale = loss_scale_of(config.dtype)
        optimizer = Optimizer(hyperparameters, adam, form, chunks, parameters, options.total_steps, scale)
        source.refine(optimizer, parameters, shape)
        state = TrainingState(optimizer, parameters, layout, MegatronGenerators())
    return BuiltModel(
        folder,
        stored,
        shape,
        groups,
        shards,
        megatron,
        bridge,
        decoders,
        chunks,
        parameters,
        optimizer,
        state,
        effective,
        switch,
        roundings,
    )


def _name_parameters(
    decoders: list[Decoder], bridge: Bridge, layout: ParallelLayout, shards: ShardGroups, trained: Trained
) -> Parameters[Parameter]:
    """Return this rank's parameters; those that are not trained require no gradient from now on.

    Raises:
        WeightMismatchError: the mappings do not fit the model's parameters.
        ValueError: a parameter holds tensors that are trained and tensors that are not.
    """
    mappings, position = bridge.mappings, rank_grid(layout)[dist.get_rank()]
    tensors = dict(named_tensors(decoders))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_model(mappings, over_stages(shapes, shards), shards)
    learning = trained_parameters(mappings.values(), trained)
    held = []
    for name, tensor in tensors.items():
        mapping = mappings[name]
        is_first = position.edp == 0 if mapping.domain == "expert" else position.dp == position.cp == 0
        held.append(Parameter(mapping, tensor, name in learning, is_first))
        if isinstance(tensor, torch.nn.Parameter):
            tensor.requires_grad_(name in learning)
    for decoder in decoders:
        learns = any(parameter.requires_grad for parameter in decoder.decoder.parameters())
        decoder.needs_gradient = bool(learning) and (learns or layout.pp > 1)
    return Parameters(held, mappings, learning, shards)


def _bridge(config: EngineConfig, shape: ModelShape, folder: Path, megatron: TransformerConfig, seed: int) -> Bridge:
    """Return what turns Hugging Face's weights into Megatron-Core's: `actor.megatron.bridge_type`.

    Raises:
        ValueError: the bridge's package is not installed or cannot be imported, or has no such model.
    """
    # The packages, and what adapts them, are imported by who chooses them.
    match config.megatron.bridge_type:
        case "mbridge":
            from fivefold.mcore.mbridge import MBridge

            return MBridge(shape, folder, getattr(torch, config.dtype))
        case "megatron-bridge":
            from fivefold.mcore.megatron_bridge import MegatronBridge

            return MegatronBridge(shape, folder, megatron)
    return Bridge(shape, seed=seed)


def _check(config: EngineConfig) -> None:
    """Refuse what this machine cannot do; `rules/` has refused what the model or Megatron-Core cannot.

    Raises:
        ValueError: it says what to change.
    """
    _check_deepep(config.megatron)
    check_transformer_engine(config.megatron.kernels)


def _check_deepep(config: MegatronConfig) -> None:
    if config.token_dispatcher == "flex" and find_spec("deep_ep") is None:
        raise ValueError(
            "token_dispatcher=flex exchanges tokens by DeepEP, and the package deep_ep is not installed here: build it "
            "(https://github.com/deepseek-ai/DeepEP), or set token_dispatcher to alltoall"
        )


def check_transformer_engine(kernels: Kernels) -> None:
    """Refuse TransformerEngine's modules where they cannot be built.

    Raises:
        ValueError: `kernels` is te, and there is no GPU, another release of Megatron-Core than 0.16, or no
            TransformerEngine of a version that fits.
    """
    if kernels != "te":
        return
    if not torch.cuda.is_available():
        raise ValueError("kernels=te has kernels for NVIDIA GPUs, and there is none here: set kernels to fivefold")
    if not IS_0_16:
        raise ValueError(
            f"kernels=te is tried with Megatron-Core 0.16, and {installed_release().name} is installed: run pip "
            "install megatron-core==0.16.1, or set kernels to fivefold"
        )
    advice = "pip install --no-build-isolation 'transformer-engine[pytorch,core_cu13]==2.11.0' (core_cu12 for CUDA 12)"
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        raise ValueError(
            f"kernels=te builds layers of TransformerEngine, which is not installed here: run {advice}, or set kernels "
            "to fivefold, which does not need it"
        ) from None
    if found not in TE_VERSIONS:
        raise ValueError(
            f"kernels=te needs TransformerEngine {TE_VERSIONS}, and {found} is installed: run {advice}, or set kernels "
            "to fivefold"
        )
