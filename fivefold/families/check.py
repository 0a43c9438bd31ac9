"""Checks that a model can be split as a layout asks, and that it can do what a recipe asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from pydantic import BaseModel

from fivefold.config.roles import ROLES, roles_of
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.rollout import RolloutConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.shape import ModelShape
from fivefold.layout.backends import BACKENDS, server_titles
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import Placement, RolePlacement
from fivefold.layout.recipe import recipe_allocation
from fivefold.layout.stages import chunk_sizes

RoleShapes = Mapping[str, ModelShape]
"""Shapes of the models that roles other than the actor have, by role."""
_READS = {
    "ref": "a KL divergence needs the same tokens",
    "critic": "the critic reads the actor's tokens",
    "reward": "the reward model reads the actor's tokens",
    "teacher": "the teacher tells probabilities of the actor's tokens",
}
"""Why each role must have the actor's tokens."""

_ENGINE_SECTIONS = ("megatron", "fsdp")
"""Sections of a role that only one engine reads, which has their name."""

_FLASH_ATTENTION_4_HEADS = ((64, 64), (128, 128), (192, 128))
"""Widths of query and value heads of which FlashAttention 4's results were compared with a softmax in double precision.
Its kernels for a Hopper GPU take more, and compute wrong gradients for some: 80."""


def check_attention(config: EngineConfig, shape: ModelShape) -> None:
    """Refuse kernels of attention that the model's heads cannot have.

    Raises:
        ValueError: the kernels, the widths of the heads, and what to choose.
    """
    for problem in attention_problems("actor", config, shape):
        raise ValueError(problem)


def attention_problems(role: str, config: EngineConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a line if the model of a role cannot have the kernels of attention that its section asks for."""
    if config.attn_impl == "flash_attention_4" and shape.head_widths not in _FLASH_ATTENTION_4_HEADS:
        query, value = shape.head_widths
        proven = ", ".join(f"{query}/{value}" for query, value in _FLASH_ATTENTION_4_HEADS)
        yield (
            f"{role}.attn_impl=flash_attention_4 has been proven right for query and value heads of {proven} channels, "
            f"got {query}/{value}: set it to flash_attention_2"
        )


def check_layout(layout: ParallelLayout, shape: ModelShape) -> None:
    """Refuse a layout whose degrees do not divide the model's sizes.

    The vocabulary may have any size, because its rows are padded to a multiple of the tensor parallel degree.

    Raises:
        ValueError: a line for each problem, with the size, the degree that does not divide it, and what to change.
    """
    problems = list(layout_problems(layout, shape))
    if problems:
        raise ValueError(
            f"{shape.family} cannot be laid out as {describe(layout)}:\n" + "\n".join(f"- {line}" for line in problems)
        )


def check_tokens(shape: ModelShape, data: str, largest: int) -> None:
    """Refuse tokens outside the model's vocabulary, which slices of an embedding would take for tokens of others.

    Args:
        shape: the model.
        data: what errors call the data.
        largest: the largest token of the data.

    Raises:
        ValueError: there is such a token.
    """
    if largest >= shape.vocab:
        raise ValueError(
            f"{data} has token {largest}, but the model's vocabulary has {shape.vocab:,} tokens: tokenizer and model "
            "do not belong together, so name the model's own tokenizer in tokenizer_path, or another model"
        )


def check_examples(shape: ModelShape, section: str, longest: int, largest_token: int, n_appended: int = 0) -> None:
    """Refuse examples of which the model's positions hold not all tokens, or whose tokens the model does not have.

    Args:
        shape: the model.
        section: the recipe's section of the data set.
        longest: tokens of the longest example.
        largest_token: the largest token of all examples.
        n_appended: tokens that are appended to every example.

    Raises:
        ValueError: the longest example is longer than the model's positions, or a token is not in its vocabulary.
    """
    check_tokens(shape, section, largest_token)
    if longest + n_appended > shape.max_positions:
        most = shape.max_positions - n_appended
        last = " and one behind each example" if n_appended else ""
        raise ValueError(
            f"the longest example of {section} has {longest} tokens, but the model has {shape.max_positions} "
            f"positions{last}: set {section}.max_length={most} to leave such examples out"
        )


def describe(layout: ParallelLayout) -> str:
    """Return the backend, the degrees that are not 1, and the number of ranks: `megatron tp2 ep4 (8 ranks)`."""
    names = ["tp", "pp", "vpp", "cp", "dp"]
    if BACKENDS[layout.backend].folds_experts:
        names += ["ep", "etp", "edp"]
    degrees = [f"{name}{value}" for name in names if (value := getattr(layout, name)) > 1]
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    return f"{' '.join([layout.backend, *degrees])} ({ranks})"


def layout_problems(layout: ParallelLayout, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each rule that the layout breaks."""
    yield from _tensor_problems(layout, shape)
    yield from _pipeline_problems(layout, shape)
    if BACKENDS[layout.backend].folds_experts:
        yield from _expert_problems(layout, shape)


def engine_problems(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each key of a role's section that is for another engine, or another device, than its own."""
    rows = roles_of(recipe)
    for role in recipe_allocation(recipe).roles:
        section = rows[role.role].section
        if not isinstance(section, EngineConfig):
            continue
        if section.attn_impl == "flash_attention_4" and recipe.cluster.n_gpus_per_node == 0:
            yield (
                f"{ROLES[role.role].key}.attn_impl=flash_attention_4 runs on GPUs, and cluster.n_gpus_per_node is "
                "0: set attn_impl to flash_attention_2, or name the GPUs"
            )
        if section.megatron.kernels == "te" and recipe.cluster.n_gpus_per_node == 0:
            yield (
                f"{ROLES[role.role].key}.megatron.kernels=te runs on GPUs, and cluster.n_gpus_per_node is 0: set "
                "it to fivefold, or name the GPUs"
            )
        for name in _ENGINE_SECTIONS:
            if name != role.backend:
                for key, value in _changed(getattr(section, name)):
                    path, engine = ROLES[role.role].key, BACKENDS[role.backend].title
                    own = getattr(section, role.backend)
                    fix = f"set {path}.{role.backend}.{key} in its place" if _has_key(own, key) else "drop it"
                    yield (
                        f"{path}.{name}.{key}={value} is for {BACKENDS[name].title}, and the {role.role} runs on "
                        f"{engine}: {fix}"
                    )


def _has_key(section: BaseModel, key: str) -> bool:
    """Return whether a section has a dotted key."""
    name, _, rest = key.partition(".")
    return name in type(section).model_fields and (not rest or _has_key(getattr(section, name), rest))


def _changed(section: BaseModel) -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of each field that differs from its default."""
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from ((f"{name}.{key}", inner) for key, inner in _changed(value))
        elif value != type(section).model_fields[name].default:
            yield name, value


def vocabulary_problems(recipe: Recipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each role whose model needs the actor's vocabulary, of which `shape` is, and has another."""
    for role, other in others.items():
        if other.vocab != shape.vocab and not reads_tokens_alone(recipe, role):
            path = roles_of(recipe)[role].path
            sampled = " or set actor.distill.over=sampled" if role == "teacher" else ""
            yield (
                f"{ROLES[role].key}.path={path} has {other.vocab} tokens in its vocabulary, the actor "
                f"{shape.vocab}: {_READS[role]}, so name a model with the actor's vocabulary{sampled}"
            )


def reads_tokens_alone(recipe: Recipe, role: str) -> bool:
    """Return whether a role reads the actor's tokens and tells nothing of other tokens.

    Its vocabulary may then be padded to another size than the actor's, if the tokenizers agree.
    """
    is_sampled = isinstance(recipe, TrainRecipe) and recipe.actor.distill.over == "sampled"
    return role == "reward" or (role == "teacher" and is_sampled)


def reference_problems(recipe: Recipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line if a reference is to follow an actor whose model has another shape."""
    if not isinstance(recipe, TrainRecipe) or recipe.ref.refresh_steps is None:
        return
    key = "refresh_every" if recipe.ref.refresh_every is not None else "ema_decay"
    if others.get("ref", shape) != shape:
        yield (
            f"ref.{key}={getattr(recipe.ref, key)} takes the actor's weights, but ref.path={recipe.ref.path} is a "
            f"model of another shape: name one with the actor's shape, or drop ref.{key}"
        )


MOST_FULL = 16_384
"""Largest vocabulary over which a teacher tells all log-probs: they are 8 bytes a token and place in host memory."""


def distillation_problems(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield a line if a teacher would have to tell more log-probs than host memory holds."""
    if isinstance(recipe, TrainRecipe) and recipe.actor.distill.over == "full" and shape.vocab > MOST_FULL:
        yield (
            f"actor.distill.over=full keeps all {shape.vocab:,} log-probs of each token, which is for vocabularies of "
            f"up to {MOST_FULL:,}: set over=top_k, which counts all other tokens as one"
        )


def replica_problems(placement: Placement) -> Iterator[str]:
    """Yield a line for each role with a replica of a server that spans nodes in another way than servers can.

    A replica that fits on a node is on one. A larger one has all devices of its nodes, because the servers start as
    many processes on each node, and number their ranks in the order of the nodes.
    """
    per_node = placement.n_devices_per_node
    for placed in placement.roles:
        layout, size = placed.layout, placed.layout.tp * placed.layout.pp
        spans = [_span(placed, group) for group in placed.straddling_groups("tp", "pp")] if layout.is_server else []
        uneven = next((span for span in spans if any(count != per_node for _, count in span)), None)
        if uneven is not None:
            nodes = ", ".join(map(str, sorted({node for node, _ in uneven})))
            rule = (
                f"it fits on one, so t x p = {size} must divide the GPUs that the role has on each"
                if size <= per_node
                else f"one that is larger than a node takes whole nodes, so t x p = {size} must be a multiple of "
                f"{per_node}, and the role begin with a node (or list whole nodes in its device_mapping)"
            )
            yield f"{placed.role}: a replica of {layout.backend} would span nodes {nodes}: {rule}"
        elif spans and layout.backend == "sglang" and layout.pp % len(spans[0]) and len(spans[0]) % layout.pp:
            yield (
                f"{placed.role}: SGLang puts whole pipeline stages on a node, or a stage on whole nodes: p{layout.pp} "
                f"and the {len(spans[0])} nodes of a replica must divide one another; change p and t"
            )


def _span(placed: RolePlacement, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the nodes of ranks in their order, each with the number of ranks that are on it side by side."""
    return [(node, len(list(own))) for node, own in groupby(placed.devices[rank].node for rank in ranks)]


def server_problems(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each key of the recipe that the rollout's backend cannot take.

    These are keys for servers, if the rollout is none, and temperatures that the engine does not sample with.
    """
    if not isinstance(recipe, TrainRecipe):
        return
    backend = next(BACKENDS[role.backend] for role in recipe_allocation(recipe).roles if role.role == "rollout")
    if not backend.is_server:
        of_processes = ("server_python", "server_args", "server_timeout_s", "max_server_restarts")
        for name in ("memory_fraction", *of_processes, "new_tokens_per_chunk"):
            if (value := getattr(recipe.rollout, name)) != RolloutConfig.model_fields[name].default:
                yield (
                    f"rollout.{name}={value} is for servers ({server_titles()}), and the rollout runs {backend.name}: "
                    "drop it"
                )
        for name in ("seeded", "logprob_share"):
            if (value := getattr(recipe.rollout, name)) != RolloutConfig.model_fields[name].default:
                yield (
                    f"rollout.{name}={str(value).lower()} is for servers ({server_titles()}): "
                    f"{backend.name} always has a seed for each request, and gives every log-prob; drop it"
                )
    elif recipe.rollout.recompute_kv_cache is False and not backend.can_hold:
        yield (
            f"rollout.recompute_kv_cache=false is for vLLM and the embedded engine: {backend.title} reads the tokens "
            "so far anew when weights change; drop it"
        )
    if backend.temperatures is not None:
        low, high = backend.temperatures
        for section, value in (("gconfig", recipe.gconfig), ("evaluator", recipe.evaluator)):
            if not value.greedy and not low <= value.temperature <= high:
                yield (
                    f"{section}.temperature={value.temperature}: {backend.title} samples with {low} to {high}; "
                    "choose a temperature in this range"
                )


def cache_problems(recipe: Recipe, placement: Placement) -> Iterator[str]:
    """Yield a line if a server shall keep keys and values of running completions on devices that it gives away."""
    if not isinstance(recipe, TrainRecipe) or recipe.rollout.recompute_kv_cache is not False:
        return
    others = placement.sharers("rollout")
    if placement["rollout"].layout.is_server and others:
        yield (
            f"rollout.recompute_kv_cache=false needs devices for the rollout alone, and {' and '.join(others)} "
            "works on them in turn with it, for which a server gives its cache back: drop it, or set "
            "rollout.colocate=false"
        )


def graph_problems(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield a line if vLLM's CUDA graphs would compute with the weights of an earlier version.

    vLLM makes two matrices of the projection that makes keys and values of latents. They are views of its weight, whose
    memory stays the same, unless it is quantized: then each update makes them elsewhere, and graphs read the old ones.
    """
    if not isinstance(recipe, TrainRecipe) or shape.latent is None:
        return
    backend = next(role.backend for role in recipe_allocation(recipe).roles if role.role == "rollout")
    given = {str(argument).split("=")[0] for argument in recipe.rollout.server_args}
    if backend == "vllm" and given & {"--quantization", "-q"} and "--enforce-eager" not in given:
        yield (
            f"rollout.server_args={recipe.rollout.server_args} quantizes the latent attention of {shape.family}, of "
            "which vLLM's CUDA graphs would go on with old weights: add --enforce-eager, or drop --quantization"
        )


def sampling_problems(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each key of `gconfig` that asks for what the model cannot generate, whatever the prompts are."""
    if not isinstance(recipe, TrainRecipe):
        return
    longest = recipe.gconfig.max_new_tokens
    if longest >= shape.max_positions:
        yield (
            f"gconfig.max_new_tokens={longest} leaves no room for a prompt: the model has {shape.max_positions} "
            "positions; lower it"
        )
    if strays := [token for token in recipe.gconfig.stop_token_ids if token >= shape.vocab]:
        yield (
            f"gconfig.stop_token_ids holds {strays[0]}, but the model's vocabulary has {shape.vocab} tokens: remove it"
        )


def _tensor_problems(layout: ParallelLayout, shape: ModelShape) -> Iterator[str]:
    tp = layout.tp
    if shape.n_heads % tp:
        yield _indivisible("attention heads", shape.n_heads, "t", tp)
    if shape.n_kv_heads % tp:
        # Engines that generate copy key/value heads if there are fewer heads than ranks.
        is_copied = not layout.is_training and tp % shape.n_kv_heads == 0
        if not is_copied:
            yield _indivisible("key/value heads", shape.n_kv_heads, "t", tp)
    if not all(shape.moe_layers) and shape.ffn_hidden % tp:
        yield _indivisible("columns of the MLP", shape.ffn_hidden, "t", tp)
    if shape.shared_expert_ffn_hidden % tp:
        yield _indivisible("columns of the shared expert", shape.shared_expert_ffn_hidden, "t", tp)
    if shape.is_moe and not BACKENDS[layout.backend].folds_experts and shape.expert_ffn_hidden % tp:
        yield _indivisible("columns of an expert", shape.expert_ffn_hidden, "t", tp)


def _pipeline_problems(layout: ParallelLayout, shape: ModelShape) -> Iterator[str]:
    if layout.vpp > 1 and layout.pp == 1:
        yield f"v{layout.vpp} splits each pipeline stage, but there is one stage only: add p2 or more, or drop v"
    try:
        chunk_sizes(shape.n_layers, layout.pp, layout.vpp, layout.split)
    except ValueError as error:
        yield str(error)


def _expert_problems(layout: ParallelLayout, shape: ModelShape) -> Iterator[str]:
    if not shape.is_moe:
        if layout.ep > 1 or layout.etp > 1:
            degree = f"e{layout.ep}" if layout.ep > 1 else f"ffn t{layout.etp}"
            yield f"{degree} splits experts, and {shape.family} has none: drop it"
        return
    if shape.top_k == 1 and shape.norm_topk_prob:
        yield (
            "each token visits one expert with norm_topk_prob=true, so its weight is always 1 and the router learns "
            "nothing, which Megatron-Core refuses: use a model with norm_topk_prob=false or with more experts a token"
        )
    if shape.n_experts % layout.ep:
        yield _indivisible("experts", shape.n_experts, "e", layout.ep)
    if shape.expert_ffn_hidden % layout.etp:
        yield _indivisible("columns of an expert", shape.expert_ffn_hidden, "ffn t", layout.etp)


def _indivisible(what: str, size: int, letter: str, degree: int) -> str:
    return f"{size} {what} cannot be split over {letter}{degree}: {letter} must divide {size} ({_divisors(size)})"


def _divisors(size: int) -> str:
    """Return the first divisors of `size`, as far as they are plausible degrees."""
    divisors = [degree for degree in range(1, min(size, 256) + 1) if size % degree == 0]
    shown = ", ".join(map(str, divisors[:8]))
    return shown + ", ..." if len(divisors) > 8 else shown
