"""Patches that let Megatron-Core 0.16.1 run on stock PyTorch, with or without CUDA.

Importing this module patches nothing: `prepare()` is called once in a worker, before the model is built. Each patch
states its symptom, its cause and the condition for its removal.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.tensor_parallel import CheckpointWithoutOutput, layers
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlock
from torch.overrides import TorchFunctionMode

from fivefold.engine.main_grad import add_matmul

_CPU = torch.device("cpu")
_prepared = False


def prepare() -> None:
    """Patch Megatron-Core in this process. With CUDA the first five patches are needed, without it all of them."""
    global _prepared
    if _prepared:
        return
    _multiply_routers_without_transformer_engine()
    _accumulate_gradients_without_apex()
    _recompute_outputs_without_transformer_engine()
    _mask_filler_in_layers_that_are_not_recomputed()
    _keep_what_is_being_sent()
    if not torch.cuda.is_available():
        _redirect_cuda_runtime()
        _redirect_rng_tracker()
        _CudaToCpu().__enter__()
    _prepared = True


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

    Cause: `_checkpointed_forward` hands the mask of filler only to layers that it computes again. Remove when: it hands
    the mask to all.
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
    tensor is still under way. The send keeps a tensor of its own for as long as it needs the memory, if it is another
    one. Remove when: the schedule waits for the send before it frees the output.
    """
    operations = p2p_communication._p2p_ops

    def p2p_ops(*, tensor_send_prev: torch.Tensor | None, tensor_send_next: torch.Tensor | None, **options: Any) -> Any:
        prev, following = (
            None if tensor is None else tensor.detach() for tensor in (tensor_send_prev, tensor_send_next)
        )
        return operations(tensor_send_prev=prev, tensor_send_next=following, **options)

    p2p_communication._p2p_ops = p2p_ops


class _CudaToCpu(TorchFunctionMode):
    """Symptom: "Torch not compiled with CUDA enabled" all over Megatron-Core.

    Cause: `device="cuda"`, `.cuda()`, `.pin_memory()` and the type name `torch.cuda.FloatTensor` are written out in it.
    Remove when: Megatron-Core takes its device from one place.
    """

    _METHODS = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.to, torch.Tensor.type})

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs) if kwargs else {}
        if options:
            if _is_cuda(options.get("device")):
                options["device"] = _CPU
            options.pop("pin_memory", None)
        if func not in self._METHODS:
            return func(*args, **options)
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not options:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*(_CPU if _is_cuda(arg) else arg for arg in args), **options)


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.startswith("cuda")


class _Anything:
    """Stands in for a CUDA stream or event: every method exists, does nothing and returns the object itself."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Anything]:
        return lambda *args, **kwargs: self


def _redirect_cuda_runtime() -> None:
    """Symptom: calls of torch.cuda's runtime (streams, events, synchronize) raise without a driver.

    Cause: Megatron-Core calls them without asking whether CUDA is there. Remove when: it asks.
    """
    for module, names in (
        (torch.cuda, ("set_device", "synchronize", "empty_cache")),
        (torch.cuda.nvtx, ("range_push", "range_pop")),
    ):
        for name in names:
            # One function object for each name: torch.compile has a rule for each and refuses an object with two.
            setattr(module, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    for name in ("Stream", "Event"):
        # They stay types, because libraries that are imported later use them in annotations.
        setattr(torch.cuda, name, type(name, (_Anything,), {}))
    for name in ("current_stream", "default_stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: _Anything())
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value]


def _redirect_rng_tracker() -> None:
    """Symptom: Megatron's RNG tracker (activation recomputation, initialisation) asks for CUDA generators.

    Cause: it has no CPU generator. Remove when: it takes the device's.
    """
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)  # type: ignore[assignment]
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
