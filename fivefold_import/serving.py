"""Options that a source hands on to the rollout's engine, as arguments of the server's command line.

block_size: 16, compilation_config.cudagraph_mode: FULL
──> rollout.server_args: [--block-size=16, --compilation-config.cudagraph_mode=FULL]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fivefold_import import reasons
from fivefold_import.draft import Draft
from fivefold_import.models import is_moe
from fivefold_import.speculation import drafts_in_sglang, drafts_in_vllm

TO = "rollout.server_args"
SECTIONS = re.compile(r".*\b(?:strategy_config|engine_kwargs|rollout_model|rollout)\.")
"""What precedes the name of an option in a key, as the frameworks write it."""
REASONS: Mapping[str, str] = {
    **dict.fromkeys(("max_model_len", "context_length"), reasons.LENGTHS),
    **dict.fromkeys(("enable_log_requests", "disable_log_stats", "log_level", "enable_metrics"), reasons.METRICS),
    **dict.fromkeys(("seed", "random_seed"), reasons.ONE_SEED),
    **dict.fromkeys(("load_format", "distributed_executor_backend"), reasons.WEIGHTS_IN_BUCKETS),
    "skip_tokenizer_init": reasons.TOKEN_IDS,
    "use_v1": reasons.OWN_CODE,
}
"""Options that follow from other keys, or have no effect."""
OF_IMAGES = re.compile(r"mm_|.*_mm_|limit_mm|skip_mm|enable_multimodal|allowed_local_media_path|language_model_only")
FOLLOWS = re.compile(
    r".*parallel|dtype|model$|tokenizer|tp_size|pp_size|dp_size|ep_size|enable_sleep|enable_memory_saver|quant|"
    r"trust_remote_code|worker_|scheduler_cls|logprobs|kv_cache_dtype|host$|port$|nnodes|node_rank"
)
"""Options that other keys of the recipe decide, or that would change what Fivefold relies on."""
SPREAD = "--enable-expert-parallel"
SGLANG: Mapping[str, tuple[Any, str]] = {
    "enforce_eager": (True, "--disable-cuda-graph"),
    "enable_prefix_caching": (False, "--disable-radix-cache"),
    "enable_chunked_prefill": (False, "--chunked-prefill-size=-1"),
}
"""vLLM's names with which frameworks mean an argument of SGLang too: the value, and the argument."""
OF_VLLM = ("max_num_batched_tokens", "cudagraph_capture_sizes", "cuda_graph_sizes", "block_size", "optimization_level")
"""Options of vLLM alone."""


def engine_option(draft: Draft, source: str) -> None:
    """Convert an option of the engine; all of them are one list of arguments."""
    match = SECTIONS.match(source)
    name = source[match.end() :] if match else source
    plan = draft.plans.get("rollout")
    backend = plan.backend if plan is not None else str(draft.recipe.get("rollout.backend", "")).partition(":")[0]
    for engine in ("vllm", "sglang"):
        if name.startswith(f"{engine}."):
            if engine != backend:
                return draft.implied(source, f"the rollout's engine is {backend}")
            name = name.removeprefix(f"{engine}.")
    if backend not in ("vllm", "sglang"):
        return draft.implied(source, "the embedded engine has no such option")
    if name in REASONS:
        return draft.implied(source, REASONS[name])
    if OF_IMAGES.match(name):
        return draft.implied(source, reasons.NO_MULTIMODAL)
    if name.startswith("speculative_config."):
        return drafts_in_vllm(draft, source)
    if name.startswith("speculative_"):
        return drafts_in_sglang(draft, source)
    if name == "enable_expert_parallel" and backend == "vllm" and isinstance(draft.get(source), bool):
        return spread_over_all(draft, source)
    if name == "enable_dp_attention" and draft.get(source) is not True:
        return draft.implied(source, "a replica has no copies of the attention")
    if name == "enable_dp_attention" or FOLLOWS.match(name) or not re.fullmatch(r"[a-z][a-z0-9_]*(\.\w+)*", name):
        return draft.unsupported(source, reasons.NO_ENGINE_OPTIONS)
    argument = _of_sglang(name, draft.get(source)) if backend == "sglang" else of_vllm(name, draft.get(source))
    if argument is None:
        return draft.implied(source, f"{backend} does so without an argument")
    arguments = draft.recipe.setdefault(TO, [])
    if argument not in arguments:
        arguments.append(argument)
    return draft.mapped(source, TO, arguments)


def spread_over_all(draft: Draft, source: str) -> None:
    """Convert vLLM's switch that spreads experts over all ranks of a replica."""
    plan = draft.plans.get("rollout")
    if draft.get(source) is False or (plan is not None and plan.backend != "vllm"):
        return draft.implied(source, "experts are not spread over ranks, or not by vLLM")
    arguments = draft.recipe.setdefault(TO, [])
    if SPREAD not in arguments:
        arguments.append(SPREAD)
    return draft.mapped(source, TO, arguments, "the engine spreads experts over the ranks of a replica")


def quantized(draft: Draft, source: str) -> None:
    """Convert the number format of the rollout's weights, which the engine quantizes at each update."""
    plan, kind = draft.plans.get("rollout"), draft.get(source)
    if kind in (None, ""):
        draft.implied(source, "weights are not quantized")
    elif kind != "fp8" or plan is None or plan.backend != "vllm":
        draft.unsupported(source, "weights that arrive are quantized to FP8, and by vLLM alone")
    else:
        draft.mapped(source, "rollout.quantization", "fp8_per_block", "by blocks of 128 x 128, as there")


def copies_of_attention(draft: Draft, source: str, model: str, per_node: int) -> None:
    """Convert the copies that a replica has of all but its experts: here, all of it is split over the replica's ranks.

    Copies of a dense `model` share nothing: each is a replica. A replica that is split has the `per_node` GPUs of a
    node at most: over nodes, t would split the attention too.
    """
    plan, copies = draft.plans["rollout"], draft.get(source)
    if plan.backend not in ("vllm", "sglang") or not isinstance(copies, int) or copies < 2:
        return
    if not is_moe(model) and draft.get(source.replace("data_parallel", "expert_parallel"), 1) == 1:
        draft.implied(source, "copies of a dense model share nothing: each is a replica")
        return
    if plan.get("tp") * copies > per_node:
        draft.unsupported(
            source, "copies of the attention that share experts over nodes are not offered: t and p split a replica"
        )
        return
    plan.degrees["tp"] = plan.get("tp") * copies
    plan.keys[source] = "the copies share their experts: t splits the attention too, which they have whole"


SLICES = "moe_tensor_parallel_size"
"""TensorRT-LLM's slices of each expert, which verl hands on."""


def spread_experts(draft: Draft, source: str) -> None:
    """Convert the ranks over which an engine spreads experts: all of a replica, or one.

    Where TensorRT-LLM spreads slices of experts, vLLM in its place spreads whole ones over as many ranks.
    """
    plan, ranks = draft.plans.get("rollout"), draft.get(source)
    sliced = source.removesuffix("expert_parallel_size") + SLICES
    if isinstance(ranks, int) and isinstance(slices := draft.get(sliced, 1), int) and ranks > 1:
        ranks *= slices
    has_more = draft.get("sglang_dp_size", 1) != 1
    if ranks in (1, None):
        draft.implied(source, "experts are not spread over ranks")
    elif plan is None or plan.backend not in ("vllm", "sglang") or has_more or ranks != plan.get("tp"):
        draft.unsupported(source, f"experts are spread over the t ranks of a replica: {reasons.ROLLOUT_DEGREES}")
    else:
        arguments = draft.recipe.setdefault(TO, [])
        argument = SPREAD if plan.backend == "vllm" else f"--ep-size={ranks}"
        if argument not in arguments:
            arguments.append(argument)
        draft.mapped(source, TO, arguments, "the engine spreads experts over the ranks of a replica")


def slice_experts(draft: Draft, source: str) -> None:
    """Say what becomes of slices of experts in TensorRT-LLM: vLLM spreads whole ones over the same ranks."""
    slices, ranks = draft.get(source), draft.get(source.replace(SLICES, "expert_parallel_size"), 1)
    plan = draft.plans.get("rollout")
    if slices == 1 or (plan is not None and slices * ranks == plan.get("tp")):
        draft.implied(source, "experts stay whole: their number over the ranks is the same weight for each")
    draft.unsupported(source, reasons.ROLLOUT_DEGREES)


def of_vllm(name: str, value: Any) -> str | None:
    """Return an option as vLLM's command line has it; None: it is off without an argument."""
    section, dot, rest = name.partition(".")
    flag = f"--{section.replace('_', '-')}{dot}{rest}"
    if dot:
        return f"{flag}={value if isinstance(value, str) else json.dumps(value)}"
    if name == "enforce_eager":
        return "--enforce-eager" if value is True else None
    if isinstance(value, bool):
        return flag if value else f"--no-{section.replace('_', '-')}"
    return f"{flag}={value if isinstance(value, str | int | float) else json.dumps(value)}"


def _of_sglang(name: str, value: Any) -> str | None:
    """Return an option as SGLang's command line has it; None: it is off without an argument, or vLLM's."""
    if name in SGLANG:
        told, argument = SGLANG[name]
        return argument if value is told else None
    if name in OF_VLLM or value is False:
        return None
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag}={value if isinstance(value, str | int | float) else json.dumps(value)}"
