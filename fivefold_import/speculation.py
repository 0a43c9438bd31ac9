"""Speculative decoding at rollout: what drafts tokens, and how many.

speculative_config: {method: deepseek_mtp, num_speculative_tokens: 1}          vLLM
speculative_algorithm: EAGLE, speculative_num_steps: 3, ...                    SGLang
──> rollout.speculative: {method: mtp, n_tokens: ...}
"""

from __future__ import annotations

from fivefold_import.draft import Draft
from fivefold_import.reasons import NOT_TRAINED
from fivefold_import.values import positive, whole

METHOD, N_TOKENS = "rollout.speculative.method", "rollout.speculative.n_tokens"
NOTHING_DRAFTED = "no tokens are drafted"
OTHER_DRAFTS = "tokens are drafted by the model's own layers (mtp) or by n-grams, and by no other model"
OWN_WAY = "the engine's own value holds: rollout.speculative says what drafts, and how many tokens"
_VLLM, _SGLANG = "speculative_config.", "speculative_"
_STEPS = 3
"""verl's number of steps for SGLang, unless it is written."""


def drafts_in_vllm(draft: Draft, source: str) -> None:
    """Convert a key of vLLM's `speculative_config`."""
    section = source[: source.index(_VLLM) + len(_VLLM)]
    method, n_tokens = str(draft.get(f"{section}method") or ""), draft.get(f"{section}num_speculative_tokens")
    if not n_tokens:
        return draft.implied(source, NOTHING_DRAFTED)
    known = "mtp" if method.endswith("mtp") else method
    if draft.get(f"{section}model") is not None or known not in ("mtp", "ngram"):
        return draft.unsupported(source, OTHER_DRAFTS)
    match source.removeprefix(section):
        case "method":
            draft.mapped(source, METHOD, known)
        case "num_speculative_tokens":
            draft.mapped(source, N_TOKENS, positive(n_tokens))
    return draft.unsupported(source, OWN_WAY)


def drafts_in_sglang(draft: Draft, source: str) -> None:
    """Convert one of SGLang's options of speculative decoding."""
    section = source[: source.index(_SGLANG)] + _SGLANG
    algorithm = str(draft.get(f"{section}algorithm") or "").upper()
    if not algorithm:
        return draft.implied(source, NOTHING_DRAFTED)
    if algorithm not in ("EAGLE", "NEXTN") or draft.get(f"{section}draft_model_path") is not None:
        return draft.unsupported(source, OTHER_DRAFTS)
    name, width = source.removeprefix(section), whole(draft.get(f"{section}eagle_topk", 1))
    if name == "algorithm":
        draft.mapped(source, METHOD, "mtp")
    elif name == "num_steps":
        draft.mapped(source, N_TOKENS, positive(draft.get(source)))
    elif name == "eagle_topk" and width > 1:
        draft.unsupported(source, "tokens are drafted one after the other, and not as a tree")
    elif name in ("eagle_topk", "num_draft_tokens"):
        draft.implied(source, "it follows from the number of drafted tokens")
    return draft.unsupported(source, OWN_WAY)


def further_layers(draft: Draft, source: str) -> None:
    """Convert verl's section `mtp`: whether layers for multi-token prediction are trained, and whether they draft."""
    section = source[: source.index("mtp.")] + "mtp."
    name = source.removeprefix(section)
    drafts = draft.get(f"{section}enable") is True and draft.get(f"{section}enable_rollout") is True
    plan = draft.plans.get("rollout")
    backend = "" if plan is None else plan.backend
    if drafts:
        steps = "num_speculative_tokens" if backend == "vllm" else "speculative_num_steps"
        default = 1 if backend == "vllm" else _STEPS
        draft.recipe |= {METHOD: "mtp", N_TOKENS: draft.get(f"{section}{steps}", default)}
    if name in ("enable", "enable_train", "enable_rollout") and draft.get(source) is not True:
        return draft.implied(source, "it is switched off")
    if name == "enable":
        return draft.implied(source, "the weights of these layers are written as they were read")
    if name == "enable_train" and draft.get(f"{section}enable") is True:
        return draft.unsupported(source, NOT_TRAINED)
    if drafts and name == "enable_rollout":
        return draft.mapped(source, METHOD, "mtp")
    if drafts and backend == "vllm" and name == "num_speculative_tokens":
        return draft.mapped(source, N_TOKENS, positive(draft.get(source)))
    if drafts and backend == "sglang" and name.startswith(_SGLANG):
        return drafts_in_sglang(draft, source)
    return draft.implied(source, "nothing that is switched on reads this")


def trained_drafts(draft: Draft, source: str) -> None:
    """Convert SkyRL's section `mtp`, whose layers are trained and draft tokens."""
    section = source[: source.index("mtp.")] + "mtp."
    if draft.get(f"{section}enabled") is not True:
        return draft.implied(source, "it is switched off")
    draft.recipe.setdefault(METHOD, "mtp")
    match source.removeprefix(section):
        case "enabled":
            draft.unsupported(source, NOT_TRAINED)
        case "num_speculative_tokens":
            draft.mapped(source, N_TOKENS, positive(draft.get(source)))
    return draft.implied(source, "only the training of these layers reads this")
