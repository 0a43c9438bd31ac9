"""Trinity-RFT, key by key: what becomes of each key that no other key decides about."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import megatron, reasons
from fivefold_import.checkpoints import goes_on, kept, loaded_contents, save_weights
from fivefold_import.critic import only_with_critic
from fivefold_import.distillation import LAID_OUT, ONE_TEACHER, TEACHER_PATH
from fivefold_import.draft import Draft, Rule
from fivefold_import.rules import (
    checkpoint_every_steps,
    every_steps,
    for_each,
    implied,
    off,
    only,
    staleness,
    to,
    under,
    unknown,
    unsupported,
)
from fivefold_import.settings import trackers
from fivefold_import.trinity.algorithm_rules import ALGORITHM, TYPE
from fivefold_import.values import (
    DTYPE,
    number,
    one_of,
    run_name,
    text,
    top_k,
    whole,
)
from fivefold_import.verl.actor_rules import (
    ACTOR,
    ACTOR_OFFLOADING,
    ACTOR_RULES,
    MODEL,
    MODEL_RULES,
    OFFLOADING,
    REF,
    REFERENCE_RULES,
)
from fivefold_import.verl.critic_rules import CRITIC, CRITIC_RULES

TREE = "trainer.trainer_config."
"""The section that verl's key tree stands under."""
NO_STAGES = "a run has one stage"
NO_PIPELINE = "data are used as they are read: prepare the file"
IN_MEMORY = "samples go from rollout to trainer in memory"
EXPLORER_GENERATES = "the explorer generates, not the trainer"
EXPLORER_REWARDS = "the explorer computes rewards"
TRINITYS_TRAINER = "Fivefold trains in the place of verl's trainer"
EVERY_STEP = "weights are updated after every step"
ONE_TURN = only(
    "math_workflow",
    "simple_workflow",
    "on_policy_distill_workflow",
    "on_policy_distill_math_workflow",
    holds="a step is prompt, response and reward",
    otherwise=reasons.NO_AGENTS,
)
ADVANTAGE_FN = "algorithm.advantage_fn"
ON_POLICY = "on_policy_distill"
"""Trinity-RFT's name of on-policy distillation, as an algorithm and as an advantage."""
TEACHER = "explorer.auxiliary_models.0.model_path"
"""The first model beside the policy, which on-policy distillation takes for the teacher."""

OLD_NAMES: Mapping[str, str] = {
    "monitor.project": "project",
    "monitor.name": "name",
    "monitor.cache_root_dir": "monitor.cache_dir",
    "model.checkpoint_path": "checkpoint_root_dir",
    "model.max_token_len": "model.max_model_len",
    "trainer.algorithm_type": "algorithm.algorithm_type",
    "trainer.eval_interval": "explorer.eval_interval",
    "data.total_epochs": "buffer.total_epochs",
    "data.batch_size": "buffer.batch_size",
    "data.dataset_path": "buffer.explorer_input.taskset.path",
    "data.subset_name": "buffer.explorer_input.taskset.subset_name",
    "data.train_split": "buffer.explorer_input.taskset.split",
    "data.format": "buffer.explorer_input.taskset.format",
    "data.default_workflow_type": "buffer.explorer_input.default_workflow_type",
    "data.default_reward_fn_type": "buffer.explorer_input.default_reward_fn_type",
    "buffer.eval_tasksets": "buffer.explorer_input.eval_tasksets",
    "explorer.repeat_times": "algorithm.repeat_times",
    "explorer.temperature": "buffer.explorer_input.taskset.rollout_args.temperature",
    "explorer.logprobs": "buffer.explorer_input.taskset.rollout_args.logprobs",
    **{
        f"explorer.{name}": f"explorer.rollout_model.{name}"
        for name in (
            "engine_type",
            "engine_num",
            "tensor_parallel_size",
            "enable_prefix_caching",
            "enforce_eager",
            "enable_chunked_prefill",
            "gpu_memory_utilization",
            "dtype",
            "seed",
        )
    },
}
"""Keys of the first releases, each with the name that later releases give it."""


TASKSET: Mapping[str, Rule] = {
    "name": implied("a data set is known by its path"),
    "storage_type": only("file", holds="data are files, folders or hub names"),
    "subset_name": off("only a data set of the hub has subsets"),
    "format.chat_template": off(reasons.TEMPLATE),
    "format.system_prompt*": unsupported("write the system prompt into the prompt's chat messages"),
    "format.prompt_type": only("messages", "plaintext", holds="a prompt is a text or a list of messages"),
    "format.image_key": implied(reasons.NO_MULTIMODAL),
    "format.video_key": implied(reasons.NO_MULTIMODAL),
    "format.*": unsupported("a row has a prompt and an answer"),
    "rollout_args.logprobs": implied(reasons.KEPT_LOGPROBS),
    "rollout_args.n": implied("repeat_times is the number of responses"),
    "rollout_args.max_tokens": to("gconfig.max_new_tokens", whole),
    "workflow_args.*": unsupported(reasons.NO_AGENTS),
    "reward_fn_args.*": unsupported("give the reward function's arguments as reward.kwargs"),
    "total_epochs": implied("buffer.total_epochs is the number of epochs"),
    "task_selector.*": unsupported(reasons.SAMPLER),
    "data_selector.*": unsupported(reasons.SAMPLER),
    "index": implied("there is one task set"),
    "enable_progress_bar": implied("steps are shown on the console"),
    "default_*": unsupported(reasons.NO_AGENTS),
    "*": unknown("a task set"),
}


def _selector(draft: Draft, key: str) -> None:
    """Convert the order of tasks, as far as rewards have no influence on it."""
    match draft.get(key):
        case "sequential":
            draft.mapped(key, "train_dataset.shuffle", False)
        case "shuffle":
            draft.mapped(key, "train_dataset.shuffle", True)
    draft.unsupported(key, reasons.SAMPLER)


BUFFER: Mapping[str, Rule] = {
    "batch_size": to("train_dataset.batch_size", whole),
    "explore_batch_size": to("train_dataset.batch_size", whole),
    "total_epochs": to("total_train_epochs", whole),
    "total_steps": to("total_train_steps", whole),
    "tokenizer_path": to("tokenizer_path", text),
    "pad_token_id": implied("the tokenizer has a token for padding"),
    "cache_dir": implied(reasons.OWN_OUTPUTS),
    "max_retry_*": implied(reasons.NO_RETRY),
    **under("explorer_input.taskset.", TASKSET),
    "explorer_input.taskset.split": to("train_dataset.split", text),
    "explorer_input.taskset.task_selector.selector_type": _selector,
    "explorer_input.taskset.format.prompt_key": to("train_dataset.prompt_key", text),
    "explorer_input.taskset.format.response_key": to("train_dataset.answer_key", text),
    "explorer_input.taskset.rollout_args.temperature": to("gconfig.temperature", number),
    "explorer_input.taskset.rollout_args.top_p": to("gconfig.top_p", number),
    "explorer_input.taskset.rollout_args.top_k": to("gconfig.top_k", top_k),
    **under("explorer_input.eval_tasksets.0.", TASKSET),
    "explorer_input.eval_tasksets.0.split": to("valid_dataset.split", text),
    "explorer_input.eval_tasksets.0.format.prompt_key": to("valid_dataset.prompt_key", text),
    "explorer_input.eval_tasksets.0.format.response_key": to("valid_dataset.answer_key", text),
    "explorer_input.eval_tasksets.0.repeat_times": to("evaluator.n_samples", whole),
    "explorer_input.eval_tasksets": implied("the section is empty"),
    "explorer_input.tasksets": implied("the section is empty"),
    "explorer_input.tasksets.*": unsupported(reasons.ONE_FOLDER),
    "explorer_input.default_workflow_type": ONE_TURN,
    "explorer_input.default_eval_workflow_type": ONE_TURN,
    "explorer_input.default_reward_fn_type": to(
        "reward.fn", one_of(math_reward="math", math_boxed_reward="math", accuracy_reward="math")
    ),
    "trainer_input.experience_buffer.*": implied(IN_MEMORY),
    "trainer_input.sft_warmup*": off(NO_STAGES),
    "trainer_input.auxiliary_buffers.*": unsupported(NO_STAGES),
    "train_dataset.*": implied(IN_MEMORY),
    "*": unknown("the buffer"),
}


def is_on(draft: Draft) -> bool:
    """Return whether the source distils from a teacher on the student's own samples."""
    return ON_POLICY in (draft.get(TYPE), draft.get(ADVANTAGE_FN))


def _auxiliary_model(draft: Draft, source: str) -> None:
    """Convert a key of a model beside the policy: the teacher, or one that writes judgements."""
    if not is_on(draft):
        draft.unsupported(source, reasons.NO_REWARD_MODEL)
    elif source == TEACHER:
        draft.mapped(source, TEACHER_PATH, text(draft.get(source)))
    elif source.startswith(TEACHER.rpartition(".")[0]):
        draft.implied(source, LAID_OUT)
    draft.unsupported(source, ONE_TEACHER)


EXPLORER: Mapping[str, Rule] = {
    "eval_interval": every_steps("evaluator.freq_steps"),
    "eval_on_startup": only(True, holds=reasons.EVALUATES_FIRST),
    "runner_*": implied(reasons.ENGINE_SCHEDULES),
    "max_pending_requests": implied(reasons.ENGINE_SCHEDULES),
    "max_waiting_steps": implied(reasons.ENGINE_SCHEDULES),
    "max_timeout": to("scheduler.timeout_s", number),
    "max_retry_times": implied(reasons.NO_RETRY),
    "use_ray": implied("roles are Ray actors"),
    "backend": implied(reasons.WEIGHTS_IN_BUCKETS),
    "name": implied("the role is called rollout"),
    "rollout_model.dtype": to("rollout.dtype", DTYPE),
    "rollout_model.gpu_memory_utilization": to("rollout.memory_fraction", number),
    "rollout_model.seed": implied(reasons.ONE_SEED),
    "rollout_model.data_parallel_size": only(1, holds="replicas are independent: engine_num counts them"),
    "rollout_model.enable_expert_parallel": off(reasons.ROLLOUT_DEGREES),
    "rollout_model.max_model_len": implied(reasons.LENGTHS),
    "rollout_model.enable_openai_api": off(reasons.NO_AGENTS),
    "rollout_model.enable_auto_tool_choice": off(reasons.NO_AGENTS),
    "rollout_model.tool_call_parser": unsupported(reasons.NO_AGENTS),
    "rollout_model.enable_history": off(reasons.NO_AGENTS),
    "rollout_model.enable_thinking": unsupported(reasons.TEMPLATE),
    "rollout_model.ignore_eos": off(reasons.END_TOKEN),
    "rollout_model.*": unsupported(reasons.NO_ENGINE_OPTIONS),
    "auxiliary_models.*": _auxiliary_model,
    "over_rollout.*": off("each step waits for all of its samples"),
    "env_vars.*": unsupported(reasons.OWN_ENVIRONMENT),
    "*": unknown("the explorer"),
}


def _shortest_response(draft: Draft, source: str) -> None:
    """Convert the fewest tokens of a response; one, Trinity-RFT's default, is no limit where its end is a token."""
    if (fewest := whole(draft.get(source))) > 1:
        draft.mapped(source, "gconfig.min_new_tokens", fewest)
    draft.implied(source, "a response has at least one token, which may be its end")


def _saved_weights(draft: Draft, source: str) -> None:
    """Convert when checkpoints hold the weights in the Hugging Face format too: always, at the last step, or never."""
    match draft.get(source):
        case "always":
            save_weights(draft, source, "trainer.save_interval", "trainer.max_checkpoints_to_keep")
        case "last":
            draft.implied(source, reasons.LAST_WEIGHTS)
    draft.unsupported(source, reasons.LAST_WEIGHTS)


TRAINER: Mapping[str, Rule] = {
    "name": implied("the role is called actor"),
    "trainer_type": only("verl", holds=TRINITYS_TRAINER),
    "total_steps": to("total_train_steps", whole),
    "save_interval": checkpoint_every_steps(),
    "save_hf_checkpoint": _saved_weights,
    "save_strategy": implied("all ranks write their pieces of a checkpoint at once, in the background"),
    "max_checkpoints_to_keep": kept,
    "enable_preview": implied(reasons.SAMPLES_FILE),
    "grad_clip": to("actor.optimizer.gradient_clipping", number),
    "use_remove_padding": implied(reasons.ALWAYS_PACKED),
    "balance_batch": implied(reasons.BALANCED),
    "critic_warmup": only_with_critic("critic.warmup_steps", whole),
    "fix_actor_microbatch_loss_scale": implied(reasons.GLOBAL_COUNTS),
    "actor_grad_clip": to("actor.optimizer.gradient_clipping", number),
    "ulysses_sequence_parallel_size": only(1, holds="contexts are not split", otherwise=reasons.SPLIT_CONTEXTS),
    "megatron.sequence_parallel": megatron.TRANSFORMER["sequence_parallel"],
    "sft_warmup_steps": off(NO_STAGES),
    "trust_remote_code": off(reasons.NO_REMOTE_CODE),
    **OFFLOADING,
    **ACTOR_OFFLOADING,
    "*": unknown("the trainer"),
}

TREE_RULES: Mapping[str, Rule] = {
    **under(MODEL, {**MODEL_RULES, "path": implied("model.model_path overrides it")}),
    **under(ACTOR, {**ACTOR_RULES, "ppo_mini_batch_size": implied("buffer.train_batch_size overrides it")}),
    **under(ACTOR, dict.fromkeys(("use_kl_loss", "kl_loss_*", "clip_ratio*"), implied("`algorithm` overrides it"))),
    **under(
        ACTOR,
        dict.fromkeys(
            ("checkpoint.save_contents", "checkpoint.contents"), implied("trainer.save_hf_checkpoint overrides it")
        ),
    ),
    ACTOR + "checkpoint.load_contents": loaded_contents(TREE + ACTOR + "checkpoint.save_contents"),
    **under(ACTOR, dict.fromkeys(("alg_type", "tau", "opmd_baseline", "use_uid"), implied("only OPMD reads this"))),
    ACTOR + "clip_ratio_c": to("actor.c_clip", number),
    **under(ACTOR, dict.fromkeys(("policy_loss.*", "policy_drift_coeff"), implied("`algorithm` overrides it"))),
    **under(REF, REFERENCE_RULES),
    "actor_rollout_ref.rollout.*": implied(EXPLORER_GENERATES),
    "actor_rollout_ref.hybrid_engine": implied(EXPLORER_GENERATES),
    **under(CRITIC, {**CRITIC_RULES, "ppo_mini_batch_size": implied("buffer.train_batch_size overrides it")}),
    "data.*": implied("the buffer's data are read"),
    "algorithm.*": implied("Trinity-RFT's own algorithm section overrides it"),
    "reward_model.*": implied(EXPLORER_REWARDS),
    "custom_reward_function.*": implied(EXPLORER_REWARDS),
    "trainer.max_actor_ckpt_to_keep": kept,
    "trainer.*": implied("Trinity-RFT's own keys override it"),
    "*": unknown("the trainer"),
}

RULES: Mapping[str, Rule] = {
    "project": to("experiment_name", run_name),
    "name": to("trial_name", run_name),
    "group": off("a run has an experiment_name and a trial_name"),
    "mode": only("both", "colocate", holds="a run rolls out and trains, step by step"),
    "checkpoint_root_dir": to("cluster.fileroot", text, reasons.OWN_OUTPUTS),
    "continue_from_checkpoint": goes_on("trainer.save_interval"),
    "ray_namespace": implied("a run starts its own roles"),
    "ignore_validator_suggestions": implied("a recipe is checked as a whole"),
    **under("algorithm.", ALGORITHM),
    "model.model_path": to("actor.path", text),
    "model.critic_model_path": only_with_critic("critic.path", text),
    "model.max_prompt_tokens": to("train_dataset.max_length", whole),
    "model.max_response_tokens": to("gconfig.max_new_tokens", whole),
    "model.min_response_tokens": _shortest_response,
    "model.max_model_len": implied(reasons.LENGTHS),
    "model.temperature": to("gconfig.temperature", number),
    "model.top_p": to("gconfig.top_p", number),
    "model.top_k": to("gconfig.top_k", top_k),
    "model.logprobs": implied(reasons.KEPT_LOGPROBS),
    "model.enable_prompt_truncation": off(reasons.NOT_CUT),
    "model.repetition_penalty": only(1, holds=reasons.SAMPLING),
    "model.lora_configs*": unsupported(reasons.NO_LORA),
    "model.custom_chat_template": unsupported(reasons.TEMPLATE),
    "model.enable_thinking": unsupported(reasons.TEMPLATE),
    "model.trust_remote_code": off(reasons.NO_REMOTE_CODE),
    "model.*": unknown("the model"),
    "cluster.node_num": to("cluster.n_nodes", whole),
    "cluster.gpu_per_node": to("cluster.n_gpus_per_node", whole),
    "cluster.ray_address": to("scheduler.address", text),
    **under("buffer.", BUFFER),
    **under("explorer.", EXPLORER),
    "synchronizer.sync_method": implied(reasons.WEIGHTS_IN_BUCKETS),
    "synchronizer.sync_style": only("fixed", holds=EVERY_STEP, otherwise=reasons.SYNCHRONOUS),
    "synchronizer.sync_interval": only(1, holds=EVERY_STEP, otherwise=reasons.SYNCHRONOUS),
    "synchronizer.sync_iteration_interval": only(1, holds=EVERY_STEP, otherwise=reasons.SYNCHRONOUS),
    "synchronizer.sync_offset": staleness(),
    "synchronizer.sync_timeout": implied(reasons.TIMEOUT),
    "synchronizer.*": unsupported(reasons.SYNCHRONOUS),
    **under("trainer.", TRAINER),
    **under(TREE, TREE_RULES),
    "monitor.monitor_type": trackers,
    "monitor.*": implied(reasons.OWN_OUTPUTS),
    "log.*": implied(reasons.OWN_OUTPUTS),
    **for_each(("service.", "data_processor."), {"*": unsupported(NO_PIPELINE)}),
    "stages.*": unsupported(NO_STAGES),
    "data.eval_split": unsupported("name the held-out data set as valid_dataset.path"),
    "data.*": unsupported(NO_PIPELINE),
}
