"""Reads the layouts of a recipe's roles into one form, an `Allocation`.

A recipe lays out its roles key by key (`actor.backend`, `rollout.backend`, `critic.backend`, `rollout.colocate`,
`critic.colocate` and so on) or in one string (`allocation_mode`), and may put each role on a list of devices
(`device_mapping`). The reference model lives in the actor's processes unless it has a backend; only then is it a role.
A critic, a reward model and a teacher always have separate processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fivefold.config.problems import RecipeError
from fivefold.config.roles import ROLES, Role, roles_of
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.machines import ClusterConfig
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.allocation import Allocation, RoleAllocation
from fivefold.layout.backends import backend_names, example_layout
from fivefold.layout.devices import parse_devices
from fivefold.layout.errors import AllocationError, RuleError
from fivefold.layout.parser import parse, parse_role
from fivefold.layout.stages import implied_virtual_stages, stage_split

Groups = tuple[tuple[RoleAllocation, ...], ...]


def recipe_allocation(recipe: Recipe) -> Allocation:
    """Return the recipe's roles, named and grouped by the devices they share.

    Raises:
        RecipeError: strings that cannot be read, that contradict one another, or that name a backend of the wrong kind.
    """
    lists = recipe_devices(recipe)
    if lists is not None:
        groups = _from_lists(recipe, lists)
    elif isinstance(recipe, TrainRecipe) and recipe.allocation_mode is not None:
        groups = _from_allocation_mode(recipe, recipe.allocation_mode)
    else:
        groups = _from_backends(recipe)
    _require(recipe, (line for group in groups for role in group if (line := _wrong_kind(role))))
    try:
        return Allocation(tuple(tuple(_with_stages(recipe, role) for role in group) for group in groups))
    except RuleError as error:
        raise RecipeError(recipe.experiment_name, [str(error)]) from error


def recipe_devices(recipe: Recipe) -> dict[str, tuple[int, ...]] | None:
    """Return the devices of each role from its `device_mapping`; None if no role has one.

    Raises:
        RecipeError: lists that cannot be read, that only some roles have, or that other keys contradict.
    """
    mappings = {name: role.section.device_mapping for name, role in _own_processes(recipe).items()}
    written = {role: mapping for role, mapping in mappings.items() if mapping is not None}
    if not written:
        return None
    _require(recipe, _mapping_problems(recipe, written.keys(), mappings.keys() - written.keys()))
    lists, problems = {}, []
    for role, mapping in written.items():
        try:
            lists[role] = parse_devices(mapping if isinstance(mapping, str) else str(mapping))
        except AllocationError as error:
            problems.append(f"{ROLES[role].key}.device_mapping: {error}")
    _require(recipe, problems)
    return lists


def _mapping_problems(recipe: Recipe, listed: Iterable[str], unlisted: Iterable[str]) -> Iterable[str]:
    example = f"{ROLES[min(listed)].key}.device_mapping"
    if missing := ", ".join(sorted(ROLES[role].key for role in unlisted)):
        yield f"{example} is set, but no list for {missing}: give every role a device_mapping, or none"
    if recipe.cluster.n_gpus_per_node == 0:
        yield f"{example} lists GPUs, but cluster.n_gpus_per_node is 0, so that roles are CPU processes: drop it"
    if isinstance(recipe, TrainRecipe):
        for key, value in (("allocation_mode", recipe.allocation_mode), ("rollout.colocate", recipe.rollout.colocate)):
            if value is not None:
                yield f"{example} and {key} both say which devices a role has: keep one of the two keys"


def _own_processes(recipe: Recipe) -> dict[str, Role]:
    """Return the roles that have their own processes; a reference without a backend is in the actor's."""
    return {name: role for name, role in roles_of(recipe).items() if role.section.backend is not None}


def _from_lists(recipe: Recipe, lists: Mapping[str, tuple[int, ...]]) -> Groups:
    """Return each role in a group by itself, its `d*` filled from its list; the lists say which roles share devices."""
    roles = _written_roles(recipe)
    try:
        return tuple((replace(roles[name], dp=roles[name].resolve(len(lists[name])).dp),) for name in lists)
    except AllocationError as error:
        raise RecipeError(recipe.experiment_name, [str(error)]) from error


def _require(recipe: Recipe, problems: Iterable[str]) -> None:
    if lines := list(problems):
        raise RecipeError(recipe.experiment_name, lines)


def _wrong_kind(role: RoleAllocation) -> str | None:
    must_train = not ROLES[role.role].generates
    if role.is_training == must_train:
        return None
    does = "trains" if role.is_training else "only generates"
    fix = f"{'train' if must_train else 'generate'} with {backend_names(trains=must_train)}"
    return f"the {role.role} cannot run {role.backend}, which {does}; {fix}"


def _with_stages(recipe: Recipe, role: RoleAllocation) -> RoleAllocation:
    """Return a role with its virtual stages and the layers of each stage.

    Its layout, its section `megatron` or both (then equal) may give the virtual stages.
    """
    row = roles_of(recipe).get(role.role)
    if row is None or not isinstance(section := row.section, EngineConfig):
        return role
    path = f"{row.spec.key}.megatron"
    try:
        split = stage_split(section.megatron)
        implied = implied_virtual_stages(split, role.pp)
    except ValueError as error:
        raise RecipeError(recipe.experiment_name, [f"{path}.transformer: {error}"]) from error
    virtual, key = section.megatron.virtual_pipeline_parallel_size, "virtual_pipeline_parallel_size"
    if implied > 1 and virtual == 1:
        virtual, key = implied, "transformer.pipeline_model_parallel_layout, which implies v"
    key = f"{path}.{key}={virtual}"
    if virtual != 1 and role.vpp not in (1, virtual):
        problem = f"{key} contradicts v{role.vpp} in the {role.role}'s layout {role}; keep one"
        raise RecipeError(recipe.experiment_name, [problem])
    try:
        return replace(role, vpp=max(virtual, role.vpp), split=split)
    except RuleError as error:
        problem = f"{key} with the {role.role}'s layout {role}: {error}"
        raise RecipeError(recipe.experiment_name, [problem]) from error


def _from_backends(recipe: Recipe) -> Groups:
    roles, turns = _written_roles(recipe), {name: row.section.takes_turns for name, row in roles_of(recipe).items()}
    apart = [name for name in roles if name != "rollout" and turns[name] is False]
    trainers = tuple(role for name, role in roles.items() if name not in ("rollout", *apart))
    if "rollout" not in roles:
        return (trainers,)
    is_shared = turns["rollout"]
    if is_shared is None:
        is_shared = _needs_sharing([roles[name] for name in ("actor", "rollout", *apart)], recipe.cluster)
    groups: Groups = ((roles["rollout"], *trainers),) if is_shared else ((roles["rollout"],), trainers)
    return (*groups, *((roles[name],) for name in apart))


def _written_roles(recipe: Recipe) -> dict[str, RoleAllocation]:
    """Parse the backend key of each role, the schema's defaults included; `allocation_mode` is not read here."""
    roles, problems = {}, []
    for name, row in sorted(_own_processes(recipe).items(), key=lambda each: each[0] != "actor"):  # it comes first
        try:
            roles[name] = replace(parse_role(str(row.section.backend)), name=name)
        except AllocationError as error:
            problems.append(f"{row.spec.key}.backend: {error}")
    _require(recipe, problems)
    return roles


def _needs_sharing(roles: Sequence[RoleAllocation], cluster: ClusterConfig) -> bool:
    """Whether the cluster has too few GPUs for the roles side by side. There are always enough CPU processes."""
    actor, rollout, *_ = roles
    if actor.dp is None and rollout.dp is None:
        return True
    available = cluster.n_nodes * cluster.n_gpus_per_node
    least = [role.replica_size if role.n_devices is None else role.n_devices for role in roles]
    return available > 0 and sum(least) > available


def _from_allocation_mode(recipe: TrainRecipe, text: str) -> Groups:
    try:
        allocation = parse(text)
    except AllocationError as error:
        raise RecipeError(recipe.experiment_name, [f"allocation_mode: {error}"]) from error
    groups = tuple(tuple(replace(role, name=role.role) for role in group) for group in allocation.groups)
    roles = {role.role: role for group in groups for role in group}
    _require(recipe, _wrong_roles(recipe, roles))
    is_shared = any({"actor", "rollout"} <= {role.role for role in group} for group in groups)
    _require(recipe, _contradictions(recipe, roles, is_shared=is_shared))
    _require(recipe, _colocation_contradictions(recipe, groups))
    return groups


def _wrong_roles(recipe: TrainRecipe, roles: Mapping[str, RoleAllocation]) -> Iterable[str]:
    for name in roles:
        if name not in ROLES:
            yield f"allocation_mode lays out a role `{name}`; the roles of a recipe are {', '.join(ROLES)}"
    for name, row in roles_of(recipe).items():
        if name not in roles and row.spec.host is None:
            example = example_layout(trains=not row.spec.generates)
            yield f"allocation_mode lays out no {name}; add one, such as `{example}`"
    for name, spec in ROLES.items():
        if name in roles and name not in roles_of(recipe):
            yield f"allocation_mode gives devices to {name}, but {spec.absent.format(name=name, key=spec.key)}"


def _contradictions(recipe: TrainRecipe, roles: Mapping[str, RoleAllocation], *, is_shared: bool) -> Iterable[str]:
    """Yield a line for each key of the recipe that says something else than `allocation_mode`."""
    rows = roles_of(recipe)
    for name, role in _written_roles(recipe).items():
        if "backend" in rows[name].section.model_fields_set and role != roles.get(name):
            said = f"`{roles[name]}`" if name in roles else f"no {name}"
            key = ROLES[name].key
            yield f"{key}.backend says `{role}`, allocation_mode says {said}; keep one of the two keys"
    if recipe.rollout.colocate not in (None, is_shared):
        colocate, sign = str(recipe.rollout.colocate).lower(), "|" if is_shared else "+"
        yield f"rollout.colocate={colocate} contradicts the `{sign}` in allocation_mode; keep one of the two keys"


def _colocation_contradictions(recipe: TrainRecipe, groups: Groups) -> Iterable[str]:
    """Yield a line for each model whose key `colocate` says something else than `allocation_mode`."""
    for name, row in roles_of(recipe).items():
        if name == "rollout" or "colocate" not in row.section.model_fields_set:
            continue
        is_shared = any({"actor", name} <= {role.role for role in group} for group in groups)
        if row.section.takes_turns != is_shared:
            colocate, sign = str(row.section.takes_turns).lower(), "|" if is_shared else "+"
            key = f"{row.spec.key}.colocate={colocate}"
            yield f"{key} contradicts the `{sign}` in allocation_mode; keep one of the two keys"
