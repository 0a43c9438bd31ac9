"""The inputs of a recipe's plan: its roles on its cluster, with every sequence at its longest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.config.paths import user_path
from fivefold.config.problems import COMMANDS, RecipeError
from fivefold.config.roles import ROLES, Role, is_base_of_host, model_paths, roles_of
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.fsdp import FSDPConfig
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.roles import ActorConfig, CriticConfig, FrozenReferenceConfig
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.delta_net import DeltaNet
from fivefold.families.read import find_shape, is_quantized
from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import find_gpu
from fivefold.layout.recipe import recipe_allocation, recipe_devices
from fivefold.planning.inputs import Inputs, JudgeInputs, ModelInputs, RolloutInputs
from fivefold.planning.workload import Recompute, StateBytes, Workload
from fivefold.rules.recipe import recipe_problems
from fivefold.rules.replay import with_replay
from fivefold.rules.unused import unused_keys
from fivefold.rules.unusual import unusual_values
from fivefold.rules.vision import image_keys

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
WAITING_BYTES = 13
"""Bytes of a token that waits for its step: its id, its mask, its log-prob and the version of its weights."""


@dataclass(frozen=True)
class Changes:
    """Changes of the work on the command line; None keeps the recipe's value, or the default."""

    sequence_length: int | None = None
    sequences: int | None = None
    micro_tokens: int | None = None
    recompute: Recompute | None = None

    def applied(self, work: Workload) -> Workload:
        """Return `work` with these changes."""
        changes = {name: value for name, value in vars(self).items() if value is not None and name != "recompute"}
        changed = replace(work, **changes)
        return changed if self.recompute is None else changed.recomputing(self.recompute)


def recipe_inputs(recipe: Recipe, gpu: str, changes: Changes) -> Inputs:
    """Return the inputs of a recipe's plan on GPUs of a kind.

    Raises:
        ValueError: roles that contradict one another, an unknown model, or a key that its model cannot take.
    """
    shape = _shape_at(recipe, "actor.path", recipe.actor.path)
    others = {role: _shape_at(recipe, f"{ROLES[role].key}.path", path) for role, path in model_paths(recipe).items()}
    if problems := list(recipe_problems(recipe, shape, others)):
        raise RecipeError(recipe.experiment_name, problems)
    if not image_keys(recipe):
        # No tower is loaded.
        shape, others = replace(shape, vision=None), {role: replace(each, vision=None) for role, each in others.items()}
    train = recipe if isinstance(recipe, TrainRecipe) else None
    roles = roles_of(recipe)
    actor = _model(recipe, roles["actor"], shape, changes)
    models = {
        name: _reference(role.section, actor.work, others.get(name, shape))
        if isinstance(role.section, FrozenReferenceConfig)
        else _model(recipe, role, others.get(name, shape), changes)
        for name, role in roles.items()
        if not role.spec.generates and not is_base_of_host(recipe, role)
    }
    return Inputs(
        gpu=find_gpu(gpu),
        allocation=recipe_allocation(recipe),
        n_nodes=recipe.cluster.n_nodes,
        gpus_per_node=recipe.cluster.n_gpus_per_node,
        models=models,
        rollout=RolloutInputs(batch=1, generated=0) if train is None else _rollout(train),
        judge=_judge(train, others["judge"]) if train is not None and "judge" in others else None,
        devices=recipe_devices(recipe),
        host_memory_gib=recipe.cluster.host_memory_gib,
        writes_checkpoints=recipe.recover.is_enabled,
        snapshot=recipe.recover.snapshot,
        notes=(
            *(() if isinstance(recipe, TrainRecipe) else _kind_notes(recipe)),
            *unused_keys(recipe, shape),
            *unusual_values(recipe),
            *_folder_notes(recipe),
            *_length_notes(recipe, shape),
            *(() if train is None else (*_generation_notes(train), *_replay_notes(train, shape))),
        ),
    )


def _shape_at(recipe: Recipe, key: str, model: str) -> ModelShape:
    """Return the shape of the model that `key` names."""
    try:
        return find_shape(model)
    except ValueError as error:
        raise RecipeError(recipe.experiment_name, [f"{key}: {error}"]) from error


def _rollout(recipe: TrainRecipe) -> RolloutInputs:
    rollout = recipe.rollout
    return RolloutInputs(
        batch=rollout.max_batch_size,
        generated=recipe.train_dataset.batch_size * recipe.gconfig.n_samples,
        element_bytes=ELEMENT_BYTES[rollout.dtype or recipe.actor.dtype],
        is_quantized=rollout.quantization is not None,
        drafts_by_layers=rollout.speculative is not None and rollout.speculative.method == "mtp",
        memory_fraction=rollout.memory_fraction,
        transport=rollout.weight_transport,
        overlaps_sync=rollout.overlap_weight_sync if rollout.max_head_offpolicyness else False,
    )


def _judge(recipe: TrainRecipe, shape: ModelShape) -> JudgeInputs:
    """Return the model that judges, asked once about each sample of a step."""
    judge = recipe.reward.judge
    assert judge is not None
    return JudgeInputs(
        batch=judge.max_batch_size,
        generated=recipe.train_dataset.batch_size * recipe.gconfig.n_samples,
        element_bytes=ELEMENT_BYTES[judge.dtype],
        is_quantized=is_quantized(user_path(judge.path)),
        memory_fraction=judge.memory_fraction,
        shape=shape,
        sequence_length=judge.max_length,
    )


def _model(recipe: Recipe, role: Role, shape: ModelShape, changes: Changes) -> ModelInputs:
    """Return the model of a role on an engine."""
    section = role.section
    assert isinstance(section, EngineConfig)
    length, sequences = _sequences(recipe)
    if isinstance(section, ActorConfig | CriticConfig):
        sequences //= section.ppo_n_minibatches
    backend = next(placed.backend for placed in recipe_allocation(recipe).roles if placed.role == role.name)
    work = engine_work(section, backend, length, sequences, shape.delta)
    if isinstance(section, ActorConfig) and isinstance(recipe, TrainRecipe) and recipe.expert_dataset is not None:
        expert = recipe.expert_dataset
        given = expert.batch_size // section.ppo_n_minibatches
        work = replace(work, given_sequences=given, given_length=expert.max_length)
    return ModelInputs(
        shape.with_head(section.head).trained_by(role.trained),
        changes.applied(work),
        trains=role.trained is not None,
        leaves=section.leaves_devices,
    )


def _sequences(recipe: Recipe) -> tuple[int, int]:
    """Return the tokens of the longest sequence, and the sequences of a step: two for each preference pair."""
    rows = recipe.train_dataset
    if isinstance(recipe, TrainRecipe):
        again = 0 if recipe.rollout.replay_buffer is None else recipe.rollout.replay_buffer.batch_size
        return recipe.most_tokens(rows), (rows.batch_size + again) * recipe.gconfig.n_samples
    is_paired = isinstance(recipe, RMRecipe) or (isinstance(recipe, DPORecipe) and recipe.actor.loss_type != "kto")
    return rows.max_length, 2 * rows.batch_size if is_paired else rows.batch_size


def _reference(section: FrozenReferenceConfig, actor: Workload, shape: ModelShape) -> ModelInputs:
    """Return a reference model, which scores the actor's sequences as the actor does unless its section differs."""
    tokens = actor.infer_tokens or actor.micro_tokens
    work = replace(
        actor,
        element_bytes=actor.element_bytes if section.dtype is None else ELEMENT_BYTES[section.dtype],
        micro_tokens=tokens if section.mb_spec is None else section.mb_spec.max_tokens_per_mb,
        given_sequences=0,
        given_length=0,
    )
    return ModelInputs(shape, work, trains=False, leaves=section.leaves_devices, follows=section.follows)


def engine_work(
    config: EngineConfig, backend: str, length: int, sequences: int, delta: DeltaNet | None = None
) -> Workload:
    """Return the work of one optimizer step on `sequences` of `length` tokens.

    Args:
        config: the model's section.
        backend: `megatron` or `fsdp`, whose keys are read.
        length: tokens of a sequence.
        sequences: sequences of the step, over all ranks.
        delta: sizes of the model's gated delta nets, which the package fla-core computes if it is installed here.
    """
    element = ELEMENT_BYTES[config.dtype]
    optimizer = config.fsdp.optimizer if backend == "fsdp" else config.megatron.optimizer
    work = Workload(
        sequence_length=length,
        sequences=sequences,
        micro_tokens=config.mb_spec.max_tokens_per_mb,
        infer_tokens=config.mb_spec.infer_tokens,
        element_bytes=element,
        fla=delta is not None and _has_fla(config, delta),
        state=StateBytes(
            exp_avg=ELEMENT_BYTES[optimizer.exp_avg_dtype],
            exp_avg_sq=ELEMENT_BYTES[optimizer.exp_avg_sq_dtype],
            on_host=optimizer.state_on == "host",
        ),
    )
    return _fsdp_work(config.fsdp, work) if backend == "fsdp" else _megatron_work(config, work)


def _has_fla(config: EngineConfig, delta: DeltaNet) -> bool:
    """Return whether the package fla-core computes a model's gated delta nets, if it is installed as here."""
    # Imported here, because other models do not need it.
    from fivefold.families.fla_core import obstacle

    return obstacle(config.dtype, (delta.key_dim, delta.value_dim), deterministic=config.is_deterministic) is None


def _fsdp_work(section: FSDPConfig, work: Workload) -> Workload:
    kept = section.reshard_after_forward
    return replace(
        work,
        recompute=section.recompute,
        logprob_chunk=section.logprob_chunk_size,
        logprob_recompute=section.logprob_recompute,
        kept_gathered=float(not kept) if isinstance(kept, bool) else 1 / kept,
        prefetched=max(0, section.forward_prefetch - 1, section.backward_prefetch - 1),
    )


def _megatron_work(config: EngineConfig, work: Workload) -> Workload:
    section, fields = config.megatron, config.megatron.transformer
    return replace(
        work,
        recompute=section.recompute_granularity,
        recompute_modules=section.recompute_modules(is_moe=True) or ("mlp", "moe"),
        recompute_layers=fields.recompute_num_layers or 1,
        recompute_block=fields.recompute_method == "block",
        micro_batch_group=fields.microbatch_group_size_per_vp_stage,
        attn_impl=config.attn_impl,
        fused_activation=fields.bias_activation_fusion,
        logprob_chunk=section.logprob_chunk_size,
        logprob_recompute=section.logprob_recompute,
        gradient_bytes=4 if section.ddp.grad_reduce_in_fp32 else work.element_bytes,
        state=replace(work.state, master=2 if section.optimizer.store_param_remainders else 4),
        sends_parts=section.bridge_type == "fivefold",
    )


def _kind_notes(recipe: SFTRecipe | DPORecipe | RMRecipe) -> Iterator[str]:
    """Yield a note about the command that a recipe is planned for, if another one could read it as well."""
    if not isinstance(recipe, SFTRecipe):
        command = COMMANDS[type(recipe)]
        yield f"planned for `{command}`; each step also computes the scores of its sequences without gradient first"
        return
    datasets = (recipe.train_dataset, recipe.valid_dataset)
    own = {"response_key", "messages_key"}
    if not any(rows is not None and own & rows.model_fields_set for rows in datasets):
        yield (
            "planned for `fivefold sft`, because the recipe has no key that only `fivefold train` reads; to plan that, "
            "give one, such as rollout.backend"
        )


def _folder_notes(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each kind of file that training needs and that the folder of the actor's model lacks."""
    folder = user_path(recipe.actor.path)
    if not folder.is_dir():
        return
    has_own_weights = not (recipe.actor.init_from_scratch or recipe.actor.megatron.use_dist_checkpointing)
    if has_own_weights and not any(folder.glob("*.safetensors")):
        yield f"{folder} has no weights (*.safetensors), which training needs unless actor.init_from_scratch is true"
    if recipe.tokenizer_path is None and not any(folder.glob("*token*")):
        yield f"{folder} has no tokenizer, which training needs: put its files there, or set tokenizer_path"


def _replay_notes(recipe: TrainRecipe, shape: ModelShape) -> Iterator[str]:
    """Yield a note about the routes that a step keeps for router replay."""
    replay = with_replay(recipe, shape).actor.router_replay
    if replay != "none":
        steps = 1 + (recipe.rollout.max_head_offpolicyness if replay == "rollout" else 0)
        sequences = steps * recipe.train_dataset.batch_size * recipe.gconfig.n_samples
        most = sequences * recipe.most_tokens(recipe.train_dataset) * shape.route_bytes
        yield (
            f"actor.router_replay={replay}: the experts of a token take {shape.route_bytes:,} bytes, and "
            f"{sequences:,} sequences at most {most / 1e9:,.1f} GB of host memory"
        )


def _length_notes(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield a note if the data may have sequences for which attention is sparse, which a run refuses."""
    longest, _ = _sequences(recipe)
    if shape.indexer is not None and longest > shape.most_tokens:
        yield (
            f"sequences may have {longest:,} tokens by the keys, but the model {shape.limit}: a run is refused if the "
            "data has such sequences"
        )


def _generation_notes(recipe: TrainRecipe) -> Iterator[str]:
    """Yield a note for everything that a step generates or trains on in addition to what is counted."""
    if recipe.actor.dynamic_sampling:
        yield (
            f"actor.dynamic_sampling generates up to {recipe.actor.dynamic_sampling_max_rounds} times as much as is "
            "planned here while prompts have no signal"
        )
    environment = recipe.environment
    if environment is not None and environment.memory is not None:
        yield (
            f"an episode is planned as one sequence of environment.max_length={environment.max_length:,} tokens: with "
            f"environment.memory, it has one for each of its turns, up to {environment.max_turns}"
        )
    elif environment is not None:
        sampled = environment.max_turns * recipe.gconfig.max_new_tokens
        left = environment.max_length - sampled
        yield (
            f"an episode is planned with environment.max_length={environment.max_length:,} tokens: "
            f"{environment.max_turns} turns sample at most {sampled:,}, "
            + (f"which leaves {left:,} for the prompt and what is read" if left > 0 else "which it has no room for")
        )
        if not environment.keep_thinking and environment.game is None:
            yield (
                "a chat template that rewrites the past, as one that drops thoughts, makes several sequences of an "
                "episode, whose time is not planned here (environment.keep_thinking)"
            )
    if recipe.reward.judge is not None:
        yield (
            "reward.judge answers a question about each sample, which the time of a step does not count: on devices of "
            "its own while others are generated, and on shared ones after all of them"
        )
    if recipe.actor.advantage == "remax":
        yield "actor.advantage=remax also generates a greedy completion of each prompt, which is not planned here"
    if (age := recipe.rollout.max_head_offpolicyness) > 0:
        prompts = (age + 1) * recipe.train_dataset.batch_size
        sequences = prompts * recipe.gconfig.n_samples
        most = sequences * recipe.most_tokens(recipe.train_dataset) * WAITING_BYTES
        yield (
            f"rollout.max_head_offpolicyness={age}: up to {prompts:,} prompts ({sequences:,} sequences) are answered "
            f"or wait for their step, with at most {most / 1e9:,.1f} GB of tokens and log-probs in host memory and in "
            "each checkpoint"
        )
        if (buffer := recipe.rollout.replay_buffer) is not None:
            kept = (buffer.max_age + 1) * recipe.train_dataset.batch_size * recipe.gconfig.n_samples
            most = kept * recipe.most_tokens(recipe.train_dataset) * WAITING_BYTES
            yield (
                f"rollout.replay_buffer keeps up to {kept:,} sequences that were trained, with at most "
                f"{most / 1e9:,.1f} GB of tokens and log-probs in host memory and in each checkpoint"
            )
        if recipe.reward.model is not None:
            yield (
                "reward.model scores samples while others are generated and trained on, which the time of a step does "
                "not count; on the actor's devices it takes turns with training"
            )
