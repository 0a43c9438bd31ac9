"""A transformers model over packed tokens, with a head, sharded by FSDP2.

    tokens [T] ─> transformers' decoder ─> last hidden states of the predicting tokens ─> head ─> predictions [N]
                  └ one FSDP unit a layer    └ embedding, last norm and output layer are the root unit

The model is built on `meta` in the shapes of this tensor-parallel rank, then sharded, then allocated: no rank ever
holds more of it than its shards and the unit in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel
from transformers.initialization import no_init_weights

from fivefold.bridge.mapping import WeightMapping
from fivefold.bridge.text_config import text_config
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.fsdp import FSDPConfig
from fivefold.engine.adapters import Switch
from fivefold.engine.context_parallel import copy_to_group
from fivefold.engine.embedding import embedding_scale
from fivefold.engine.heads import Asked, Head, OutputLayer, Predictions
from fivefold.engine.sequences import MicroBatch
from fivefold.families.shape import ModelShape
from fivefold.fsdp.adapters import install_adapters
from fivefold.fsdp.attention import ATTENTION_NAME, gather_latents, register_attention
from fivefold.fsdp.compat import sharing_between_passes
from fivefold.fsdp.delta_net import pack_delta_net
from fivefold.fsdp.experts import shard_by_rows
from fivefold.fsdp.groups import Groups
from fivefold.fsdp.tensor_parallel import VocabEmbedding, split_layer

if TYPE_CHECKING:
    from fivefold.fsdp.dropout import Streams
    from fivefold.vision.local import LocalImages
    from fivefold.vision.tower import VisionTower

_AUTO_MODEL: Any = AutoModel
"""The type is Any because transformers declares that its factories return a base class."""

_ONLY_LAST_STATES = {
    "return_dict": True,
    "output_hidden_states": False,
    "output_attentions": False,
    "output_router_logits": False,
}
"""Keys of a config.json that say what transformers' models return, and what they keep in memory for it."""
_ROW_BYTES = 16
"""The rows of the matrices that torch's grouped matmul takes begin at multiples of so many bytes."""


class Output(nn.Module):
    """The parameters of an output layer or a value head, which the model's head uses."""

    def __init__(self, rows: int, hidden: int, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden))
        self.bias = nn.Parameter(torch.empty(rows)) if has_bias else None


class PackedModel(nn.Module):
    """A decoder of transformers, and the head after it. The parameters have transformers' names."""

    def __init__(self, decoder: nn.Module, shape: ModelShape, head: Head, groups: Groups) -> None:
        super().__init__()
        self.model: Any = decoder
        if shape.value_head:
            self.score = Output(1, shape.hidden, has_bias=shape.value_bias)
        elif not shape.tied_embeddings:
            self.lm_head = Output(shape.vocab, shape.hidden, has_bias=False)
        self._head = head
        self._groups = groups
        self.tower: VisionTower | None = None
        """Sees the images; None: the model reads text alone."""

    def forward(self, micro_batch: MicroBatch, asked: Asked) -> Predictions:
        """Return the head's predictions of this rank's tokens."""
        local = micro_batch.local
        inputs: dict[str, Any] = {
            "input_ids": local.tokens_T.unsqueeze(0),
            "position_ids": local.positions_T.unsqueeze(0),
        }
        if local.images is not None:
            inputs = self._with_images(local.tokens_T, local.images)
        hidden_TH = self.model(
            **inputs,
            use_cache=False,
            packed=local.attention,
            cp_group=self._groups.cp,
        ).last_hidden_state[0]
        hidden_NH = copy_to_group(hidden_TH[local.rows_N], self._groups.tp)
        return dict(asked.predict(self._head, hidden_NH, self._output(), micro_batch))

    def _with_images(self, tokens_T: torch.Tensor, images: LocalImages) -> dict[str, Any]:
        """Return transformers' arguments for tokens among which there are images."""
        assert self.tower is not None, "this model sees no images"
        seen = images.seen(self.tower)
        embeddings_TH = self.model.embed_tokens(tokens_T.unsqueeze(0)).squeeze(0)
        embeddings_TH = embeddings_TH.index_copy(0, images.rows_I, seen.embeddings.to(embeddings_TH.dtype))
        inputs: dict[str, Any] = {
            "inputs_embeds": embeddings_TH.unsqueeze(0),
            "position_ids": images.positions_3T.unsqueeze(1),
        }
        if seen.deepstack:
            is_image_T = torch.zeros_like(tokens_T, dtype=torch.bool)
            is_image_T[images.rows_I] = True
            inputs |= {"visual_pos_masks": is_image_T.unsqueeze(0), "deepstack_visual_embeds": list(seen.deepstack)}
        return inputs

    def _output(self) -> OutputLayer:
        """Return this rank's part of the output layer. It is whole only inside `forward`."""
        modules: dict[str, Any] = dict(self.named_children())
        layer = modules.get("score") or modules.get("lm_head")
        if layer is None:
            return OutputLayer(self.model.embed_tokens.weight)
        return OutputLayer(layer.weight, layer.bias)


def build_model(
    folder: Path,
    config: EngineConfig,
    shape: ModelShape,
    mappings: Mapping[str, WeightMapping],
    trained: frozenset[str],
    head: Head,
    groups: Groups,
    device: torch.device,
    switch: Switch,
    streams: Streams | None,
) -> PackedModel:
    """Build the model, sharded and with uninitialised weights: float32 where trained, else in the config's dtype.

    Args:
        folder: folder of the model's config.
        config: options.
        shape: shape of the model.
        mappings: the mapping of each parameter, by its name in memory.
        trained: names of the parameters that are trained.
        head: the model's head.
        groups: the groups of this process.
        device: the device that it will be on.
        switch: switches the adapters of the layers, if the shape has some.
        streams: the random numbers that adapters draw; None: they draw none.
    """
    register_attention()
    hf_config = text_config(folder, **_ONLY_LAST_STATES)
    dtype = getattr(torch, config.dtype)
    with torch.device("meta"), no_init_weights():
        decoder = _AUTO_MODEL.from_config(hf_config, attn_implementation=ATTENTION_NAME)
        # Tokens for padding would get no gradient, and packed sequences have no padding.
        decoder.embed_tokens.padding_idx = None
        if groups.tp.size() > 1 or shape.scaled_embedding:
            # transformers keeps the scale in a buffer, which allocation would leave without content.
            scale = embedding_scale(shape.hidden, dtype) if shape.scaled_embedding else 1.0
            decoder.embed_tokens = VocabEmbedding(shape.vocab, shape.hidden, groups.tp, scale)
        model = PackedModel(decoder, shape, head, groups)
        if shape.adapters is not None:
            install_adapters(model, mappings, shape.adapters, switch)
        _take_local_shapes(model, mappings, trained, groups, dtype)
    if shape.is_moe:
        fits = _fits_grouped_matmul(model, dtype, device)
        decoder.set_experts_implementation("grouped_mm" if fits else "eager")
    for layer in decoder.layers:
        delta_net = getattr(layer, "linear_attn", None)
        if delta_net is not None and shape.delta is not None:
            pack_delta_net(delta_net, shape.delta, shape.rms_norm_eps)
        elif groups.cp.size() > 1:
            gather_latents(layer.self_attn, groups.cp)
        if groups.tp.size() > 1:
            split_layer(layer, groups.tp, wide_norms=shape.wide_qk_norm)
        if (experts := getattr(layer.mlp, "experts", None)) is not None:
            for module in experts.modules():
                shard_by_rows(module)
        if trained and config.fsdp.recompute == "full":
            # Inside FSDP's hooks, which gather the layer's weights before its second forward pass.
            options: dict[str, Any] = {} if streams is None else {"context_fn": streams.contexts}
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **options)
    _shard(model, config, groups, device, dtype if trained else None)
    model.to_empty(device=device)
    with torch.device(device):
        decoder.rotary_emb = type(decoder.rotary_emb)(config=hf_config)
    # Neither dropout nor a router's noise: every engine computes the same function, in training too.
    return model.eval()


def _take_local_shapes(
    model: PackedModel,
    mappings: Mapping[str, WeightMapping],
    trained: frozenset[str],
    groups: Groups,
    dtype: torch.dtype,
) -> None:
    """Give every parameter the shape that this tensor-parallel rank has of it, and what is trained float32."""
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full_name = f"{module_name}.{name}"
            mapping, is_trained = mappings.get(full_name), full_name in trained
            shape = parameter.shape if mapping is None else mapping.local_shape(groups.weights)
            empty = torch.empty(shape, dtype=torch.float32 if is_trained else dtype, device="meta")
            setattr(module, name, nn.Parameter(empty, requires_grad=is_trained))
        for name, buffer in list(module.named_buffers(recurse=False)):
            # transformers makes some in the dtype of the file's config.
            if f"{module_name}.{name}" in mappings:
                setattr(module, name, buffer.float())


def _fits_grouped_matmul(model: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch's grouped matmul takes all fused experts, [E, out, in] or transposed."""
    modules: list[Any] = [module for name, module in model.named_modules() if name.endswith(".experts")]
    # What the matrices multiply has rows of `in` elements.
    widths = {
        width
        for module in modules
        for each in module.parameters(recurse=False)
        if each.dim() == 3
        for width in (each.shape[1:] if getattr(module, "is_transposed", False) else each.shape[2:])
    }
    takes_dtype = device.type != "cuda" or dtype == torch.bfloat16
    return takes_dtype and all(width * dtype.itemsize % _ROW_BYTES == 0 for width in widths)


def _shard(
    model: PackedModel, config: EngineConfig, groups: Groups, device: torch.device, dtype: torch.dtype | None
) -> None:
    """Shard each layer, and everything else as one unit.

    Args:
        model: the model, on `meta`.
        config: options.
        groups: the groups of this process.
        device: the device that it will be on.
        dtype: dtype of the passes, for which float32 weights are gathered; None: as the weights are.
    """
    mesh = DeviceMesh.from_group(groups.shard, device.type)
    reduced = getattr(torch, config.fsdp.mp_policy.reduce_dtype) if dtype is not None else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    with sharing_between_passes(groups.shares):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=config.fsdp.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    _prefetch(list(model.model.layers), config.fsdp)
    for unit in units(model):
        # Losses are divided by global counts, so gradients are summed and never averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _prefetch(layers: list[Any], config: FSDPConfig) -> None:
    """Let each layer gather the weights of the layers that are computed next, as many as the recipe says."""
    for index, layer in enumerate(layers):
        if following := layers[index + 1 :][: config.forward_prefetch]:
            layer.set_modules_to_forward_prefetch(following)
        if before := layers[:index][::-1][: config.backward_prefetch]:
            layer.set_modules_to_backward_prefetch(before)


def units(model: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that FSDP gathers one at a time."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module
