"""Options of vLLM that NeMo-RL hands on, as arguments of the server's command line.

vllm_kwargs: {attention_backend: FLASH_ATTN, compilation_config: {backend: eager}}
──> rollout.server_args: [--attention-backend=FLASH_ATTN, '--compilation-config={"backend": "eager"}']
"""

from __future__ import annotations

from typing import Any

from fivefold_import.draft import Draft
from fivefold_import.serving import TO, of_vllm

CACHES = "policy.generation.vllm_cfg.enable_prefix_caching"
AT, EAGER = "policy.generation.vllm_kwargs.", "policy.generation.vllm_cfg.enforce_eager"
OWN = ("max_num_seqs", "tokenizer", "max_model_len", "seed", "speculative_config.")
"""Options that have a key of the recipe, or that follow from others."""
OF_IMAGES = ("mm_", "limit_mm_per_prompt", "skip_mm_profiling", "allowed_local_media_path", "language_model_only")


def convert_server_options(draft: Draft) -> None:
    """Convert the options that vLLM gets under its own names; its command line has them with dashes."""
    keys = [key for key in draft.keys(f"{AT}*") if not key.removeprefix(AT).startswith((*OWN, *OF_IMAGES))]
    options: dict[str, Any] = {}
    for key in keys:
        *sections, name = key.removeprefix(AT).split(".")
        node = options
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = draft.get(key)
    given = (of_vllm(name, value) for name, value in options.items() if value is not None)
    arguments = [argument for argument in given if argument is not None]
    if draft.get(CACHES) is not None:
        arguments.append("--enable-prefix-caching" if draft.get(CACHES) else "--no-enable-prefix-caching")
        keys.append(CACHES)
    if draft.get(EAGER) is True:
        arguments.append("--enforce-eager")
        keys.append(EAGER)
    for key in keys:
        if draft.get(key) is not None:
            draft.mapped(key, TO, arguments)
