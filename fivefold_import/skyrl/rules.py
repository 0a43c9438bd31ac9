"""SkyRL's table, and the rules of single keys that take more than a lookup."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fivefold_import import agents, megatron, reasons
from fivefold_import.agents import MAX_LENGTH, MAX_TURNS, has_turns
from fivefold_import.critic import of_critic
from fivefold_import.draft import Draft
from fivefold_import.settings import MEAN_LEVEL, STD_LEVEL, warmup
from fivefold_import.tables import Table, read_tables
from fivefold_import.values import flag, positive, rounded_up, whole

TRAINER, POLICY, REF, CRITIC = "trainer.", "trainer.policy.", "trainer.ref.", "trainer.critic."
ALGORITHM, GENERATOR = "trainer.algorithm.", "generator."
ARGUMENTS = "rollout.server_args"
HANDED_ON = ("enforce_eager", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching")
"""Options of the engine that its command line has under the same names."""


def updates_of_run(draft: Draft) -> int | None:
    """Return the optimizer's updates of the whole run; None if its steps are not known."""
    steps = draft.get(f"{TRAINER}max_training_steps")
    passes = draft.get(f"{TRAINER}update_epochs_per_batch", 1)
    updates = draft.recipe.get("actor.ppo_n_minibatches", 1)
    return steps * updates * passes if isinstance(steps, int) and isinstance(passes, int) else None


# Weights


def _warmup(draft: Draft, source: str) -> None:
    warmup(draft, source, updates_of_run(draft))


def _optimizer_option(draft: Draft, source: str) -> None:
    """Convert options of Megatron-Core's optimizer under its own names."""
    name, value = source.rpartition(".")[2], draft.get(source)
    if name == "optimizer_cpu_offload":
        draft.mapped(source, "actor.megatron.optimizer.state_on", "host" if flag(value) else "device")
    elif name == "use_precision_aware_optimizer":
        draft.implied(source, reasons.EACH_STATE)
    elif name in ("overlap_cpu_optimizer_d2h_h2d", "optimizer_offload_fraction"):
        is_on = draft.get(source.replace(name, "optimizer_cpu_offload")) is True
        if name.endswith("fraction") and is_on and value != 1:
            draft.unsupported(source, "all of the optimizer's state is on one side")
        draft.implied(source, "only an optimizer in host memory reads this, which is streamed through the GPU")
    draft.unsupported(source, "this option of Megatron-Core's OptimizerConfig is not among those that are converted")


def _balancing(draft: Draft, source: str) -> None:
    kind = draft.get(source)
    if kind in ("none", "aux_loss"):
        draft.implied(source, "moe_aux_loss_coeff is the weight of the auxiliary loss")
    draft.mapped(source, "actor.megatron.transformer.moe_router_load_balancing_type", kind)


def _frozen(draft: Draft, source: str) -> None:
    if draft.get(source) is True:
        draft.unsupported(source, "name the routers' weights in actor.freeze (docs/lora.md#frozen-weights)")
    draft.implied(source, "routers are trained, as by default")


# Algorithm


def _whitens(draft: Draft, source: str) -> None:
    draft.mapped(source, "actor.whiten_advantages", flag(draft.get(source)))


def _divides(draft: Draft, source: str) -> None:
    if draft.get(f"{ALGORITHM}advantage_estimator", "grpo") == "grpo":
        draft.recipe.setdefault(MEAN_LEVEL, "group")
        draft.mapped(source, STD_LEVEL, "group" if flag(draft.get(source)) else "none")
    draft.implied(source, "only grpo reads this")


def _overlong(draft: Draft, source: str) -> None:
    """Convert the penalty of SkyRL's program for DAPO."""
    draft.recipe["actor.overlong_reward_penalty"] = True
    if source.endswith("len"):
        note = "a response that is cut off has reward 0 there, and the whole penalty here"
        draft.mapped(source, "actor.overlong_tokens", positive(draft.get(source)), note)
    draft.mapped(source, "actor.overlong_penalty_factor", draft.get(source))


def _dynamic(draft: Draft, source: str) -> None:
    kind = str(draft.get(source))
    if kind == "filter":
        draft.mapped(source, "actor.dynamic_sampling", True)
    elif kind in ("none", "null", "None", ""):
        draft.implied(source, "it is switched off")
    draft.unsupported(source, "groups of equal rewards are replaced by further prompts, and not by other groups")


def _rounds(draft: Draft, source: str) -> None:
    if draft.get(f"{ALGORITHM}dynamic_sampling.type") == "filter":
        most = whole(draft.get(source))
        draft.mapped(source, "actor.dynamic_sampling_max_rounds", most if most > 0 else 1000)
    draft.implied(source, "dynamic sampling is switched off")


def _length(draft: Draft, source: str) -> None:
    if draft.get(f"{ALGORITHM}loss_reduction") == "seq_mean_token_sum_norm":
        draft.mapped(source, "actor.loss_length", positive(draft.get(source)))
    draft.implied(source, "only seq_mean_token_sum_norm reads this")


# Rollout


def server_arguments(draft: Draft) -> None:
    """Collect the options of vLLM as arguments of its command line."""
    options: dict[str, Any] = {}
    for at in (GENERATOR, f"{GENERATOR}inference_engine."):
        for name in HANDED_ON:
            if draft.writes(at + name):
                options[name] = draft.get(at + name)
        for key in draft.keys(f"{at}engine_init_kwargs.*"):
            if ".speculative_config." in key:
                continue
            *sections, name = key.removeprefix(f"{at}engine_init_kwargs.").split(".")
            node = options
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = draft.get(key)
    # Chunked prefill and prefix caching are on by default in vLLM too, as far as the model allows.
    options = {name: value for name, value in options.items() if not (name in HANDED_ON[2:] and value is True)}
    options = {
        name: value
        for name, value in options.items()
        if name != "max_model_len" and (name, value) != (HANDED_ON[0], False)
    }
    if options:
        draft.recipe[ARGUMENTS] = [_argument(name, value) for name, value in options.items()]


def _argument(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option}={value if isinstance(value, str | int | float) else json.dumps(value)}"


def _server_option(draft: Draft, source: str) -> None:
    name = source.rpartition(".")[2]
    if name == "max_model_len":
        draft.implied(source, reasons.LENGTHS)
    elif draft.get(source) is (name != "enforce_eager") and name in HANDED_ON:
        draft.implied(source, "it is the engine's default")
    draft.mapped(source, ARGUMENTS, draft.recipe.get(ARGUMENTS, []))


def _held_out_samples(draft: Draft, source: str) -> None:
    """Map the responses of a held-out prompt, which are the same without a temperature."""
    if draft.recipe.get("evaluator.greedy") is False:
        draft.mapped(source, "evaluator.n_samples", positive(draft.get(source)))
    draft.implied(source, reasons.GREEDY)


def _turns(draft: Draft, source: str) -> None:
    if has_turns(draft):
        draft.mapped(source, MAX_TURNS, positive(draft.get(source)))
    draft.implied(source, reasons.ONE_COMPLETION)


def _episode(draft: Draft, source: str) -> None:
    if has_turns(draft):
        tokens = positive(draft.get(source)) + draft.read(
            f"{GENERATOR}sampling_params.max_generate_length", positive, 1024
        )
        draft.mapped(
            source, MAX_LENGTH, tokens, "and generator.sampling_params.max_generate_length: a turn begins below it"
        )
    draft.implied(source, reasons.LENGTHS)


# The run


def _resumes(draft: Draft, source: str) -> None:
    value = draft.get(source)
    if value == "latest":
        draft.mapped(source, "recover.mode", "auto")
    elif value == "from_path":
        draft.unsupported(source, reasons.OTHER_CHECKPOINTS)
    draft.implied(source, "a run starts from scratch in a free folder, and with --overwrite in any")


def _staleness(draft: Draft, source: str) -> None:
    if draft.get(f"{TRAINER}fully_async.enabled") is True or draft.get("program") in ASYNCHRONOUS:
        draft.mapped(source, "rollout.max_head_offpolicyness", rounded_up(draft.get(source)))
    draft.implied(source, reasons.SYNCHRONOUS)


def _cache(draft: Draft, source: str) -> None:
    draft.mapped(source, "rollout.recompute_kv_cache", flag(draft.get(source)))


def _environment(draft: Draft, source: str) -> None:
    """Report what judges or plays: a class of SkyRL's."""
    name = draft.get(source)
    if has_turns(draft):
        draft.unsupported(source, reasons.WRITE_GAME)
    elif name == "gsm8k":
        draft.mapped(source, "reward.fn", "math", "by math-verify, wherever the answer is; there, it follows ####")
    draft.unsupported(
        source, f"{name} judges by code of SkyRL's: write it as reward.fn=file.py:function (docs/rewards.md)"
    )


def _own_value(draft: Draft, source: str) -> None:
    draft.unsupported(source, reasons.OWN_VALUES)


ASYNCHRONOUS = ("main_fully_async", "main_dapo_fully_async")
"""Programs that train asynchronously."""
TABLES: Mapping[str, Table] = read_tables("skyrl", {**globals(), **vars(agents)}, {"megatron": megatron.TABLES})
RULES = TABLES["top"] | TABLES["critic"].wrapped(of_critic).under(CRITIC)
