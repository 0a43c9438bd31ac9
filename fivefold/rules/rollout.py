"""Rules of the rollout: what its engine cannot do with the recipe's keys, its model or its devices."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.schema.generator import GeneratorConfig
from fivefold.config.schema.rules import OfServers, marked, said
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.shape import ModelShape
from fivefold.layout.backends import BACKENDS, Backend, server_titles
from fivefold.layout.placement import Placement
from fivefold.layout.recipe import recipe_allocation


def server_problems(recipe: TrainRecipe) -> Iterator[str]:
    """Yield a line for each key of the recipe that the rollout's backend cannot take.

    These are keys for servers, if the rollout is none, and temperatures that the engine does not sample with.
    """
    backend = next(BACKENDS[role.backend] for role in recipe_allocation(recipe).roles if role.role == "rollout")
    yield from key_problems("rollout", recipe.rollout, backend)
    if backend.is_server and recipe.rollout.recompute_kv_cache is False and not backend.can_hold:
        yield (
            f"rollout.recompute_kv_cache=false is for vLLM and the embedded engine: {backend.title} computes the keys "
            "and values of running completions again when weights change; drop it"
        )
    if backend.temperatures is not None:
        low, high = backend.temperatures
        for section, value in (("gconfig", recipe.gconfig), ("evaluator", recipe.evaluator)):
            if not value.greedy and not low <= value.temperature <= high:
                yield (
                    f"{section}.temperature={value.temperature}: {backend.title} samples with {low} to {high}; "
                    "choose a temperature in this range"
                )


def key_problems(section: str, config: GeneratorConfig, backend: Backend) -> Iterator[str]:
    """Yield a line for each key of a section that only servers read, if its role runs none."""
    if backend.is_server:
        return
    for key, value, mark in marked(config, OfServers):
        always = f", which always {mark.otherwise}" if mark.otherwise else ""
        yield (
            f"{section}.{key}={said(value)} is for servers ({server_titles()}), and the "
            f"{section.rpartition('.')[2]} runs {backend.name}{always}: drop it"
        )


def cache_problems(recipe: TrainRecipe, placement: Placement) -> Iterator[str]:
    """Yield a line if a server shall keep keys and values of running completions on devices that it gives away."""
    if recipe.rollout.recompute_kv_cache is not False:
        return
    others = placement.sharers("rollout")
    if placement["rollout"].layout.is_server and others:
        yield (
            f"rollout.recompute_kv_cache=false needs devices for the rollout alone, and {' and '.join(others)} "
            "works on them in turn with it, for which a server gives its cache back: drop it, or set "
            "rollout.colocate=false"
        )


def sync_problems(recipe: TrainRecipe, placement: Placement) -> Iterator[str]:
    """Yield a line if the rollout shall keep its weights for several steps on devices that it gives away in each."""
    if recipe.rollout.sync_freq_steps == 1 or placement.is_cpu:
        return
    if others := placement.sharers("rollout"):
        yield (
            f"rollout.sync_freq_steps={recipe.rollout.sync_freq_steps} needs devices for the rollout alone, and "
            f"{' and '.join(others)} works on them in turn with it, for which it drops its weights: set the key to 1, "
            "or rollout.colocate=false"
        )


def graph_problems(recipe: TrainRecipe, shape: ModelShape) -> Iterator[str]:
    """Yield a line if vLLM's CUDA graphs would compute with the weights of an earlier version.

    vLLM makes two matrices of the projection that makes keys and values of latents. They are views of its weight, whose
    memory stays the same, unless it is quantized: then each update makes them elsewhere, and graphs read the old ones.
    """
    if shape.latent is None:
        return
    backend = next(role.backend for role in recipe_allocation(recipe).roles if role.role == "rollout")
    given = _arguments(recipe)
    quantizes = recipe.rollout.quantization is not None or given & _QUANTIZATION
    if backend == "vllm" and quantizes and "--enforce-eager" not in given:
        yield (
            f"the rollout quantizes the latent attention of {shape.family}, whose CUDA graphs in vLLM would continue "
            "with old weights: drop rollout.quantization, or set rollout.server_args=[--enforce-eager]"
        )


def quantization_problems(recipe: TrainRecipe) -> Iterator[str]:
    """Yield a line if the server cannot quantize the weights that it gets, or gets two such keys.

    SGLang 0.5.17 quantizes what it loads at its start. Its one loader that quantizes new weights too, `flash_rl`, takes
    norms of queries and keys and routers for matrices, and leaves experts their first scales.
    """
    asked, given = recipe.rollout.quantization, sorted(_arguments(recipe) & _QUANTIZATION)
    backend = next(role.backend for role in recipe_allocation(recipe).roles if role.role == "rollout")
    keys = [] if asked is None else [f"rollout.quantization={asked}"]
    if backend == "sglang":
        for key in [*keys, *(f"{argument} in rollout.server_args" for argument in given)]:
            yield (
                f"{key} is for vLLM: SGLang quantizes weights when it starts, and would take new ones for quantized; "
                "drop it"
            )
        return
    if asked is None:
        return
    if given:
        yield f"rollout.quantization={asked} and {given[0]} in rollout.server_args say the same: drop the argument"
    if (dtype := recipe.rollout.dtype or recipe.actor.dtype) != "bfloat16":
        yield f"rollout.quantization={asked} needs weights that arrive in bfloat16, and they are {dtype}"


def speculative_problems(recipe: TrainRecipe) -> Iterator[str]:
    """Yield a line for each thing that the server cannot do while it verifies drafted tokens."""
    if (asked := recipe.rollout.speculative) is None:
        return
    backend = next(role.backend for role in recipe_allocation(recipe).roles if role.role == "rollout")
    if backend == "sglang" and asked.method == "ngram":
        yield (
            "rollout.speculative.method=ngram is for vLLM: SGLang with n-grams cannot load weights from files; choose "
            "mtp, or drop rollout.speculative"
        )
    unknown = {"gconfig.min_p": recipe.gconfig.min_p > 0, "evaluator.min_p": (recipe.evaluator.min_p or 0) > 0}
    if backend == "vllm":  # it has no other way to forbid a token
        unknown |= {f"gconfig.{key}": bool(getattr(recipe.gconfig, key)) for key in ("logit_bias", "bad_token_ids")}
    for key in (key for key, is_set in unknown.items() if is_set):
        yield f"{key}: {BACKENDS[backend].title} does not heed it for drafted tokens; drop it, or rollout.speculative"


_QUANTIZATION = {"--quantization", "-q"}


def _arguments(recipe: TrainRecipe) -> set[str]:
    """Return the names of the arguments of the server's command line."""
    return {str(argument).split("=")[0] for argument in recipe.rollout.server_args}
