"""Questions from a recipe, and from a model's name with a number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fivefold.config.limits import MOST_DEVICES
from fivefold.config.paths import user_path
from fivefold.config.problems import COMMANDS, RecipeError
from fivefold.config.roles import ROLES, model_paths, roles_of
from fivefold.config.schema.engine import EngineConfig, FrozenModelConfig
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.roles import CriticConfig, FrozenReferenceConfig
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.families.shape import ModelShape
from fivefold.families.unused_keys import unused_keys
from fivefold.layout.allocation import Allocation, RoleAllocation
from fivefold.layout.backends import backend_names
from fivefold.layout.devices import parse_devices
from fivefold.layout.gpus import find_gpu
from fivefold.layout.parser import parse_role
from fivefold.layout.recipe import recipe_allocation, recipe_devices
from fivefold.planning.defaults import DEFAULT_MICRO_TOKENS, DEFAULT_SEQUENCE_LENGTH, DEFAULT_SEQUENCES
from fivefold.planning.offload_choice import OffloadChoice
from fivefold.planning.question import CriticQuestion, FrozenQuestion, Question
from fivefold.planning.workload import Recompute, StateBytes, Workload
from fivefold.preflight import recipe_problems

DEFAULT_GENERATION_BATCH = 256
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Changes:
    """What the command line says about the work; None keeps what the recipe says, or the default."""

    sequence_length: int | None = None
    sequences: int | None = None
    micro_tokens: int | None = None
    recompute: Recompute | None = None

    def applied(self, work: Workload) -> Workload:
        """Return `work` with these changes."""
        changes = {name: value for name, value in vars(self).items() if value is not None and name != "recompute"}
        changed = replace(work, **changes)
        return changed if self.recompute is None else changed.recomputing(self.recompute)


def question_of_model(
    model: str,
    n_gpus: int,
    *,
    gpus_per_node: int,
    gpu: str,
    actor: str | None,
    rollout: str | None,
    devices: Sequence[str],
    changes: Changes,
) -> Question:
    """Return the question about a model on a cluster; without a layout, the actor takes the GPUs that are left.

    Raises:
        ValueError: an unknown model or GPU, a layout or a list of devices that cannot be read.
    """
    if n_gpus < 1 or gpus_per_node < 1:
        raise ValueError(f"--gpus {n_gpus} --gpus-per-node {gpus_per_node}: both must be at least 1")
    if n_gpus > MOST_DEVICES:
        raise ValueError(f"--gpus {n_gpus}: at most {MOST_DEVICES:,} can be planned")
    per_node = min(gpus_per_node, n_gpus)
    if n_gpus % per_node:
        raise ValueError(f"--gpus {n_gpus} is not a whole number of nodes of {per_node}; give --gpus-per-node")
    default = Workload(DEFAULT_SEQUENCE_LENGTH, DEFAULT_SEQUENCES, DEFAULT_MICRO_TOKENS)
    work = changes.applied(default)
    trainer, generator = _trainer(actor), _generator(rollout)
    roles = (trainer,) if generator is None else (generator, trainer)
    lists = _device_lists(devices, {role.role for role in roles}) if devices else None
    return Question(
        shape=find_shape(model),
        gpu=find_gpu(gpu),
        allocation=_allocation(trainer, generator, n_gpus) if lists is None else _listed(roles, lists),
        n_nodes=n_gpus // per_node,
        gpus_per_node=per_node,
        work=work,
        generation_batch=DEFAULT_GENERATION_BATCH,
        generated=work.sequences,
        devices=lists,
        offload=OffloadChoice(),
    )


def _trainer(backend: str | None) -> RoleAllocation:
    """Return the actor; without a layout it takes the GPUs that are left."""
    role = RoleAllocation("megatron", dp=None) if backend is None else parse_role(backend)
    if not role.is_training:
        raise ValueError(f"--actor {backend}: {role.backend} only generates; train with {backend_names(trains=True)}")
    return replace(role, name="actor")


def _generator(backend: str | None) -> RoleAllocation | None:
    if backend is None:
        return None
    role = parse_role(backend)
    if role.is_training:
        raise ValueError(f"--rollout {backend}: {role.backend} trains; generate with {backend_names(trains=False)}")
    return replace(role, name="rollout")


def _allocation(trainer: RoleAllocation, generator: RoleAllocation | None, n_gpus: int) -> Allocation:
    """Return both roles, side by side if there are devices for both, else in turns on the same devices."""
    if generator is None:
        return Allocation(((trainer,),))
    least = [role.replica_size if role.n_devices is None else role.n_devices for role in (trainer, generator)]
    if sum(least) <= n_gpus and (trainer.dp is not None or generator.dp is not None):
        return Allocation(((generator,), (trainer,)))
    return Allocation(((generator, trainer),))


def _device_lists(options: Sequence[str], roles: set[str]) -> dict[str, tuple[int, ...]]:
    """Return the devices of each role, from one `--devices ROLE=LIST` each."""
    lists: dict[str, tuple[int, ...]] = {}
    for option in options:
        role, _, text = option.partition("=")
        if role not in roles or role in lists:
            raise ValueError(f"--devices {option}: write ROLE=LIST once for each of {', '.join(sorted(roles))}")
        lists[role] = parse_devices(text)
    if missing := roles - lists.keys():
        raise ValueError(f"--devices gives no list for {', '.join(sorted(missing))}; give every role one, or none")
    return lists


def _listed(roles: Sequence[RoleAllocation], lists: Mapping[str, tuple[int, ...]]) -> Allocation:
    """Return the roles with every `d*` filled from the role's list; the lists alone say who shares devices."""
    return Allocation(tuple((replace(role, dp=role.resolve(len(lists[role.role])).dp),) for role in roles))


def question_of_recipe(recipe: Recipe, gpu: str, changes: Changes) -> Question:
    """Return the question that a recipe poses: its roles on its cluster, every sequence at its longest.

    Raises:
        ValueError: roles that contradict one another, a model whose shape is not known, or a key that its model cannot
            take.
    """
    shape = _shape_at(recipe, "actor.path", recipe.actor.path)
    others = {role: _shape_at(recipe, f"{ROLES[role].key}.path", path) for role, path in model_paths(recipe).items()}
    reference = others.get("ref", shape)
    if problems := list(recipe_problems(recipe, shape, others)):
        raise RecipeError(recipe.experiment_name, problems)
    notes = (*unused_keys(recipe, shape), *_folder_notes(recipe))
    if not isinstance(recipe, TrainRecipe):
        if isinstance(recipe, RMRecipe):
            shape = shape.as_reward_model()
        question = _question(recipe, shape, gpu, changes, length=recipe.train_dataset.max_length, generated=0, batch=1)
        question = _with_reference(question, recipe, reference)
        return replace(question, notes=(*_kind_notes(recipe), *notes))
    generated = recipe.train_dataset.batch_size * recipe.gconfig.n_samples
    length = recipe.train_dataset.max_length + recipe.gconfig.max_new_tokens
    batch = recipe.rollout.max_batch_size
    question = _question(recipe, shape, gpu, changes, length=length, generated=generated, batch=batch)
    return replace(
        _with_reference(question, recipe, reference),
        critic=_critic(recipe, recipe.critic, others["critic"], changes) if recipe.critic else None,
        frozen={
            role: _frozen(recipe, role, section, others[role], changes)
            for role, row in roles_of(recipe).items()
            if isinstance(section := row.section, FrozenModelConfig)
        },
        offload=OffloadChoice(**recipe.actor.offload.model_dump()),
        reference_moves=recipe.ref.refresh_steps is not None,
        reference_is_average=recipe.ref.ema_decay is not None,
        rollout_bytes=ELEMENT_BYTES[recipe.rollout.dtype or recipe.actor.dtype],
        memory_fraction=recipe.rollout.memory_fraction,
        weight_transport=recipe.rollout.weight_transport,
        overlaps_weight_sync=recipe.rollout.overlap_weight_sync if recipe.rollout.max_head_offpolicyness else False,
        notes=(*notes, *_generation_notes(recipe)),
    )


def _with_reference(question: Question, recipe: Recipe, shape: ModelShape) -> Question:
    """Return the question with the recipe's reference, whose model has `shape`, if there is one."""
    row = roles_of(recipe).get("ref")
    if row is None:
        return question
    section = row.section
    assert isinstance(section, FrozenReferenceConfig)
    return replace(
        question,
        reference=shape,
        reference_bytes=None if section.dtype is None else ELEMENT_BYTES[section.dtype],
        reference_tokens=None if section.mb_spec is None else section.mb_spec.max_tokens_per_mb,
        reference_is_offloaded=section.offload,
    )


WAITING_BYTES = 13
"""Bytes of a token that waits for its step: its id, its mask, its log-prob and the version of its weights."""


def _generation_notes(recipe: TrainRecipe) -> Iterator[str]:
    """Yield a note for all that a step generates or trains on besides what is counted."""
    if recipe.actor.dynamic_sampling:
        yield (
            f"actor.dynamic_sampling generates up to {recipe.actor.dynamic_sampling_max_rounds} times as much as is "
            "planned here, as long as prompts have no signal"
        )
    if recipe.actor.advantage == "remax":
        yield "actor.advantage=remax generates a greedy completion of each prompt besides what is planned here"
    if (age := recipe.rollout.max_head_offpolicyness) > 0:
        prompts = (age + 1) * recipe.train_dataset.batch_size
        sequences = prompts * recipe.gconfig.n_samples
        most = sequences * (recipe.train_dataset.max_length + recipe.gconfig.max_new_tokens) * WAITING_BYTES
        yield (
            f"rollout.max_head_offpolicyness={age}: up to {prompts:,} prompts ({sequences:,} sequences) are answered "
            f"or wait for their step, with {most / 1e9:,.1f} GB of tokens and log-probs in host memory and in each "
            "checkpoint at most"
        )
        if recipe.reward.model is not None:
            yield (
                "reward.model scores samples while others are generated and trained on, which the time of a step does "
                "not count; on the actor's devices it does so in turn with training"
            )


def _kind_notes(recipe: SFTRecipe | DPORecipe | RMRecipe) -> Iterator[str]:
    """Yield a note about the command that a recipe is planned for, where another could read it as well."""
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


def _shape_at(recipe: Recipe, key: str, model: str) -> ModelShape:
    """Return the shape of the model that `key` names."""
    try:
        return find_shape(model)
    except ValueError as error:
        raise RecipeError(recipe.experiment_name, [f"{key}: {error}"]) from error


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


def _question(
    recipe: Recipe, shape: ModelShape, gpu: str, changes: Changes, *, length: int, generated: int, batch: int
) -> Question:
    """Return the question of either kind of recipe; `generated` is the sequences a step, 0 in fine-tuning."""
    n_minibatches = recipe.actor.ppo_n_minibatches if isinstance(recipe, TrainRecipe) else 1
    work = _work(recipe, "actor", length, (generated or _trained_sequences(recipe)) // n_minibatches)
    if isinstance(recipe, TrainRecipe) and (expert := recipe.expert_dataset) is not None:
        work = replace(work, given_sequences=expert.batch_size // n_minibatches, given_length=expert.max_length)
    return Question(
        shape=shape,
        gpu=find_gpu(gpu),
        allocation=recipe_allocation(recipe),
        n_nodes=recipe.cluster.n_nodes,
        gpus_per_node=recipe.cluster.n_gpus_per_node,
        work=changes.applied(work),
        generation_batch=batch,
        generated=generated,
        devices=recipe_devices(recipe),
        host_memory_gib=recipe.cluster.host_memory_gib,
        writes_checkpoints=recipe.recover.is_enabled,
        snapshot=recipe.recover.snapshot,
    )


def _trained_sequences(recipe: Recipe) -> int:
    """Return the sequences of one step that does not generate: two for each pair."""
    rows = recipe.train_dataset.batch_size
    is_paired = isinstance(recipe, RMRecipe) or (isinstance(recipe, DPORecipe) and recipe.actor.loss_type != "kto")
    return 2 * rows if is_paired else rows


def _work(recipe: Recipe, role: str, length: int, sequences: int) -> Workload:
    """Return the work of one optimizer step of a role's model, on `sequences` of `length` tokens."""
    config = roles_of(recipe)[role].section
    assert isinstance(config, EngineConfig)
    backend = next(placed.backend for placed in recipe_allocation(recipe).roles if placed.role == role)
    return engine_work(config, backend, length, sequences)


def _kept_gathered(reshard_after_forward: bool | int) -> float:
    """Return the share of gathered weights that FSDP keeps behind a layer's forward pass."""
    return float(not reshard_after_forward) if isinstance(reshard_after_forward, bool) else 1 / reshard_after_forward


def engine_work(config: EngineConfig, backend: str, length: int, sequences: int) -> Workload:
    """Return the work of one optimizer step on `sequences` of `length` tokens.

    Args:
        config: the model's section.
        backend: `megatron` or `fsdp`, of whose keys the work depends.
        length: tokens of a sequence.
        sequences: sequences of the step, over all ranks.
    """
    element = ELEMENT_BYTES[config.dtype]
    optimizer = config.fsdp.optimizer if backend == "fsdp" else config.megatron.optimizer
    state = StateBytes(
        exp_avg=ELEMENT_BYTES[optimizer.exp_avg_dtype],
        exp_avg_sq=ELEMENT_BYTES[optimizer.exp_avg_sq_dtype],
        on_host=optimizer.state_on == "host",
    )
    if backend == "fsdp":
        return Workload(
            sequence_length=length,
            sequences=sequences,
            micro_tokens=config.mb_spec.max_tokens_per_mb,
            infer_tokens=config.mb_spec.infer_tokens,
            recompute=config.fsdp.recompute,
            element_bytes=element,
            logprob_chunk=config.fsdp.logprob_chunk_size,
            logprob_recompute=config.fsdp.logprob_recompute,
            kept_gathered=_kept_gathered(config.fsdp.reshard_after_forward),
            prefetched=max(0, config.fsdp.forward_prefetch - 1, config.fsdp.backward_prefetch - 1),
            state=state,
        )
    return Workload(
        sequence_length=length,
        sequences=sequences,
        micro_tokens=config.mb_spec.max_tokens_per_mb,
        infer_tokens=config.mb_spec.infer_tokens,
        recompute=config.megatron.recompute_granularity,
        recompute_modules=config.megatron.recompute_modules(is_moe=True) or ("mlp", "moe"),
        recompute_layers=config.megatron.transformer.recompute_num_layers or 1,
        recompute_block=config.megatron.transformer.recompute_method == "block",
        micro_batch_group=config.megatron.transformer.microbatch_group_size_per_vp_stage,
        attn_impl=config.attn_impl,
        fused_activation=config.megatron.transformer.bias_activation_fusion,
        element_bytes=element,
        logprob_chunk=config.megatron.logprob_chunk_size,
        logprob_recompute=config.megatron.logprob_recompute,
        gradient_bytes=4 if config.megatron.ddp.grad_reduce_in_fp32 else element,
        state=replace(state, master=2 if config.megatron.optimizer.store_param_remainders else 4),
    )


def _frozen(
    recipe: TrainRecipe, role: str, config: FrozenModelConfig, shape: ModelShape, changes: Changes
) -> FrozenQuestion:
    """Return the question about a model that is not trained, on every sequence at its longest."""
    generated = recipe.train_dataset.batch_size * recipe.gconfig.n_samples
    length = recipe.train_dataset.max_length + recipe.gconfig.max_new_tokens
    shape = shape.as_reward_model() if role == "reward" else shape
    return FrozenQuestion(shape, changes.applied(_work(recipe, role, length, generated)), config.offload)


def _critic(recipe: TrainRecipe, config: CriticConfig, shape: ModelShape, changes: Changes) -> CriticQuestion:
    """Return the question about the critic, on every sequence at its longest."""
    generated = recipe.train_dataset.batch_size * recipe.gconfig.n_samples
    length = recipe.train_dataset.max_length + recipe.gconfig.max_new_tokens
    work = changes.applied(_work(recipe, "critic", length, generated // config.ppo_n_minibatches))
    return CriticQuestion(shape.as_critic(), work, OffloadChoice(**config.offload.model_dump()))
