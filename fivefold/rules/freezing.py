"""Rules of frozen weights: some are frozen, not all, and those that an engine keeps in one parameter together."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.problems import did_you_mean
from fivefold.config.roles import ROLES, roles_of
from fivefold.config.schema.recipe import Recipe
from fivefold.families.registry import find_family
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import Trained, WeightTensor, tensors
from fivefold.layout.recipe import recipe_allocation
from fivefold.rules.models import RoleShapes


def freezing_problems(recipe: Recipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each role and pattern of `freeze` that its model cannot follow."""
    backends = {role.role: role.backend for role in recipe_allocation(recipe).roles}
    for name, role in roles_of(recipe).items():
        if role.trained is not None and role.trained.freeze:
            own = others.get(name, shape).with_head(role.section.head)
            backend = backends.get(name, backends["actor"])
            key = f"{ROLES[name].key}.freeze"
            yield from (f"{key}: {line}" for line in frozen_problems(tuple(role.trained.freeze), own, backend))


def frozen_problems(patterns: tuple[str, ...], shape: ModelShape, backend: str) -> Iterator[str]:
    """Yield a line for each thing that keeps the weights that match `patterns` from being frozen on an engine."""
    own = tensors(shape)
    known = [name for tensor in own for name in tensor.names]
    trained = Trained(patterns)
    for pattern in patterns:
        if not any(name in Trained(only=(pattern,)) for name in known):
            near = did_you_mean(pattern, known) or f", such as {known[-1]}"
            yield f"no weight is named {pattern!r}; names are as in the Hugging Face files{near}"
    if not any(name in trained for name in known):
        yield f"{', '.join(patterns)} names all weights, and nothing is left to train: name fewer"
    for names in _together(shape, own, backend):
        frozen = [name for name in names if name not in trained]
        if 0 < len(frozen) < len(names):
            learning = next(name for name in names if name in trained)
            yield (
                f"{frozen[0]} is frozen and {learning} is trained, but on {backend} they are parts of one parameter: "
                "freeze both or none"
            )


def _together(shape: ModelShape, own: tuple[WeightTensor, ...], backend: str) -> Iterator[list[str]]:
    """Yield the names of weights that an engine keeps in one parameter, such as q, k and v, or all experts."""
    joined: dict[str, list[str]] = {}
    for tensor in own:
        is_fused = tensor.n_experts is not None or backend == "megatron"
        whole = _whole(tensor.name, shape) if is_fused else tensor.name
        joined.setdefault(whole, []).extend(tensor.names)
    return (names for names in joined.values() if len(names) > 1)


def _whole(name: str, shape: ModelShape) -> str:
    """Return one name for all weights that are fused with a weight."""
    family = find_family(shape.family)
    mlps = [family.mlp] if family.moe is None else [family.mlp, family.moe.expert, family.moe.shared or family.mlp]
    fused = [(mlp.gate, mlp.up) for mlp in mlps]
    if shape.latent is None:
        for kind in ("weight", "bias"):
            fused += [(f"self_attn.q_proj.{kind}", f"self_attn.{letter}_proj.{kind}") for letter in "kv"]
    if shape.delta is not None:
        first, *others = ("qkvz", "ba") if shape.delta.is_grouped else ("qkv", "z", "b", "a")
        fused += [(f"linear_attn.in_proj_{first}.weight", f"linear_attn.in_proj_{other}.weight") for other in others]
    for first, other in fused:
        if name.endswith(f".{other}"):
            return name.removesuffix(other) + first
    return name
