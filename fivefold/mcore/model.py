"""A chunk of a decoder: the layers of one virtual stage, of Megatron-Core's embedding, block and output layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from fivefold.engine.heads import OutputLayer
from fivefold.engine.routes import MicroBatchRoutes
from fivefold.engine.sequences import LocalSequences
from fivefold.mcore.layers import PackedSequences
from fivefold.mcore.router import Noted, Router, note_micro_batch

if TYPE_CHECKING:
    from fivefold.vision.local import LocalImages
    from fivefold.vision.tower import VisionTower


class Decoder(LanguageModule):
    """From packed tokens, or the hidden states of the stage before, to hidden states, for a head.

    Parameters have the names that they have in Megatron-Core's `GPTModel`, which is deprecated.
    """

    model_type = ModelType.encoder_or_decoder
    """Megatron-Core's schedules ask for it."""
    routers: list[Router]
    """The routers of its layers."""
    embedding_scale = 1.0
    """What embeddings are multiplied by."""
    needs_gradient = False
    """Whether a backward pass reaches its layers, though the embedding before them may be frozen."""
    tower: VisionTower | None = None
    """Sees the images; only the decoder that embeds tokens has one."""

    def __init__(
        self,
        config: TransformerConfig,
        layers: TransformerBlockSubmodules,
        *,
        vocab: int,
        is_first: bool,
        is_last: bool,
        is_tied: bool,
        groups: ProcessGroupCollection,
        vp_stage: int | None,
    ) -> None:
        """Build the modules, with weights that nobody has set.

        Args:
            config: sizes and options of the model.
            layers: the layers of this chunk.
            vocab: rows of the embedding and of the output layer, padded so that tensor-parallel ranks divide them.
            is_first: whether it embeds tokens.
            is_last: whether it has the last norm and the output layer.
            is_tied: whether the output layer has the embedding's weight.
            groups: the process groups of the rank.
            vp_stage: index of the chunk among the rank's; None: it has one.
        """
        super().__init__(config=config, pg_collection=groups)
        self.pre_process, self.post_process, self.vp_stage = is_first, is_last, vp_stage
        self.share_embeddings_and_output_weights = is_tied
        if is_first:
            self.embedding = LanguageModelEmbedding(
                config=config,
                vocab_size=vocab,
                max_sequence_length=0,  # of learned positions, which there are none of
                position_embedding_type="none",
                tp_group=groups.tp,
            )
        self.decoder = TransformerBlock(
            config=config,
            spec=layers,
            pre_process=is_first,
            post_process=is_last,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        if is_last:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                vocab,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                skip_weight_param_allocation=is_first and is_tied,
                tp_group=groups.tp,
            )
        if is_first or is_last:
            self.setup_embeddings_and_output_layer()
        for name, module in self.named_modules():
            if hasattr(module, "finish_init"):  # TransformerEngine's layers
                module.finish_init(get_quant_config_or_none(name, config.quant_recipe))

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Take the hidden states of the stage before; Megatron-Core's schedules call it before each forward pass."""
        [hidden] = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        self.decoder.set_input_tensor(hidden)

    def forward(self, local: LocalSequences, packed: PackedSequences) -> torch.Tensor:
        """Return this stage's hidden states, [T / tp, 1, hidden]; on the last stage they are normalised."""
        hidden = None
        rank, size = 0, 1
        if self.config.sequence_parallel:
            rank, size = self.pg_collection.tp.rank(), self.config.tensor_model_parallel_size
        if self.pre_process:
            hidden = self.embedding(input_ids=local.tokens_T.unsqueeze(0), position_ids=None)
            if self.embedding_scale != 1:
                hidden = hidden * self.embedding_scale
            if local.images is not None:
                hidden, packed = self._with_images(hidden, local.images.part(rank, size), packed)
            if self.needs_gradient and torch.is_grad_enabled() and not hidden.requires_grad:
                # Reentrant checkpoints (recompute=full) give the weights inside them no gradient, without an error,
                # unless an input requires one; and a pipeline's schedule differentiates the output of every stage.
                hidden.requires_grad_()
        padding_T, sequences_T, routes = local.padding_T, local.sequences_T, local.routes
        if size > 1:
            padding_T, sequences_T = (tensor_T.chunk(size)[rank] for tensor_T in (padding_T, sequences_T))
            routes = None if routes is None else routes.part(rank, size)
        padding_1T = padding_T.unsqueeze(0)
        if self.training or routes is not None:
            noted = Noted(sequences_T, local.n_sequences, None if routes is None else MicroBatchRoutes(routes))
            note_micro_batch(self.routers, padding_1T, noted)
        return self.decoder(
            hidden_states=hidden, attention_mask=None, packed_seq_params=packed, padding_mask=padding_1T
        )

    def _with_images(
        self, hidden: torch.Tensor, images: LocalImages, packed: PackedSequences
    ) -> tuple[torch.Tensor, PackedSequences]:
        from fivefold.mcore.vision import with_images  # by batches that have images

        assert self.tower is not None, "this model sees no images"
        return with_images(hidden, images, packed, self.tower)

    def output(self) -> OutputLayer:
        """Return this rank's part of the output layer. Only the last stage has it."""
        if isinstance(self.output_layer, ValueLayer):
            return OutputLayer(self.output_layer.weight, self.output_layer.bias)
        if self.share_embeddings_and_output_weights:
            return OutputLayer(self.shared_embedding_or_output_weight())
        return OutputLayer(self.output_layer.weight)


class ValueLayer(torch.nn.Module):
    """The parameters of a value head, which every tensor-parallel rank has whole; the bridge fills them."""

    def __init__(self, hidden: int, dtype: torch.dtype, *, has_bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, hidden, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.empty(1, dtype=dtype)) if has_bias else None
