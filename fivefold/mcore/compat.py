"""Patches that let Megatron-Core run on stock PyTorch. What it needs without CUDA is in `without_cuda`.

Importing this module patches nothing: a worker calls `prepare` once, before it builds the model. Each patch states its
symptom, its cause and the condition for its removal.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.tensor_parallel import CheckpointWithoutOutput, layers
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlock

from fivefold.engine.kernels.matmul import add_matmul
from fivefold.mcore.releases import IS_0_16


@cache
def prepare() -> None:
    """Patch Megatron-Core in this process."""
    _multiply_routers_without_transformer_engine()
    _accumulate_gradients_without_apex()
    _recompute_outputs_without_transformer_engine()
    if IS_0_16:
        _mask_filler_in_layers_that_are_not_recomputed()
    _keep_what_is_being_sent()
    if not torch.cuda.is_available():
        # Imported here, because it is needed only without CUDA.
        from fivefold.mcore import without_cuda

        without_cuda.prepare()


def _multiply_routers_without_transformer_engine() -> None:
    """Symptom: NameError `te_general_gemm` in the router's forward pass with moe_router_dtype=fp32; where
    TransformerEngine is installed, gradients of float32 routers with the precision of TF32.

    Cause: moe_utils defines the name only where TransformerEngine imports, yet reads it always, and TransformerEngine
    multiplies float32 matrices by TF32. Remove when: moe_utils asks whether to use it.
    """
    moe_utils.te_general_gemm = None


def _accumulate_gradients_without_apex() -> None:
    """Symptom: `gradient_accumulation_fusion` raises and asks for Apex.

    Cause: the parallel linear layers use Apex's kernels to add a weight's gradient to its buffer within the matrix
    product, though PyTorch has one. Remove when: Megatron-Core uses `torch.addmm(..., out_dtype=)`.
    """
    kernel = types.ModuleType("fused_weight_gradient_mlp_cuda")
    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        vars(kernel)[name] = lambda inputs, grad, main_grad: add_matmul(main_grad, grad.t(), inputs)
    layers.fused_weight_gradient_mlp_cuda = kernel
    layers._grad_accum_fusion_available = True


def _recompute_outputs_without_transformer_engine() -> None:
    """Symptom: AttributeError `is_fp8_enabled` as soon as norms or activations of experts are recomputed.

    Cause: `CheckpointWithoutOutput(fp8=False)` asks TransformerEngine whether it uses fp8; only None does not.
    Remove when: its default asks nothing.
    """
    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def _mask_filler_in_layers_that_are_not_recomputed() -> None:
    """Symptom: with recompute_method=block, routers take filler for tokens in their losses and loads, and
    seq_aux_loss does not know the sequences.

    Cause: `_checkpointed_forward` hands the mask of filler only to layers that it computes again. Remove with the
    support of 0.16; 0.19 hands the mask to all.
    """
    with_recomputation = TransformerBlock._checkpointed_forward

    def checkpointed_forward(self: Any, *args: Any, padding_mask: torch.Tensor | None, **options: Any) -> Any:
        # On the object, it hides the method of this name as long as the pass takes.
        self._get_layer = lambda index: _masked(self.layers[index], padding_mask)
        try:
            return with_recomputation(self, *args, padding_mask=padding_mask, **options)
        finally:
            del self._get_layer

    TransformerBlock._checkpointed_forward = checkpointed_forward


def _masked(layer: torch.nn.Module, mask: torch.Tensor | None) -> Callable[..., Any]:
    """Return the layer as a function that has the mask of filler, whether it is handed over or not."""
    return lambda *args, **options: layer(*args, **{**options, "padding_mask": mask})


def _keep_what_is_being_sent() -> None:
    """Symptom: with virtual stages and deallocate_pipeline_outputs, other activations arrive than were sent, so that
    losses and gradients are wrong, and differ from run to run.

    Cause: the interleaved schedule frees an output's memory by exchanging the data of its tensor, while a send of this
    tensor is still under way. The send keeps its own tensor for as long as it needs the memory, if it is another
    one. Remove when: the schedule waits for the send before it frees the output.
    """
    operations = p2p_communication._p2p_ops

    def p2p_ops(*, tensor_send_prev: torch.Tensor | None, tensor_send_next: torch.Tensor | None, **options: Any) -> Any:
        prev, following = (
            None if tensor is None else tensor.detach() for tensor in (tensor_send_prev, tensor_send_next)
        )
        return operations(tensor_send_prev=prev, tensor_send_next=following, **options)

    p2p_communication._p2p_ops = p2p_ops
