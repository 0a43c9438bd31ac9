"""What `fivefold import` does: it writes a recipe from another framework's files, and reports on each of their keys.

files, a.b=c ──read──> flat keys ──dialect──> recipe values, role plans, entries
                                                     │
              recipe.yaml <──check── layouts <───────┘      each key: mapped, implied or unsupported
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fivefold.config.interpolation import names_secret
from fivefold.config.keys import known_keys
from fivefold.config.load import load_recipe
from fivefold.config.problems import COMMANDS, RecipeError, located_problems, problems_of
from fivefold.config.roles import ROLES
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.config.source import MISSING
from fivefold.config.yaml_reader import write_yaml
from fivefold.data.rows import SUFFIXES
from fivefold.layout.placement import place
from fivefold_import import agents
from fivefold_import.checks import problems_of_recipe
from fivefold_import.critic import complete
from fivefold_import.draft import Draft, Outcome
from fivefold_import.drafting import check_framework, draft_of
from fivefold_import.framework import Framework
from fivefold_import.models import known_shape
from fivefold_import.reasons import ALL_HELD_OUT, NO_REFERENCE, NOTHING_GENERATED, SYNCHRONOUS
from fivefold_import.report import Report
from fivefold_import.settings import COEFF, MEAN_LEVEL, STD_LEVEL, TEACHER_PATH
from fivefold_import.shell.commands import OVERRIDE
from fivefold_import.source import Document
from fivefold_import.values import run_name

STAND_INS: Mapping[str, Any] = {
    "environment.game": "to-be-given:Class",
    "environment.tools": ["to-be-given:function"],
    "environment.agent": "to-be-given:function",
}
"""What stands for a value that the user has to give while the recipe is checked; `to-be-given` for other keys."""
NEEDED = ("actor.path", "train_dataset.path")
YIELDING = (
    "rollout.max_concurrent_rollouts",
    "actor.kl_estimator",
    "actor.prox_logp_method",
    "actor.recompute_logprob",
    "actor.rollout_correction.method",
    "actor.opsm_delta",
    "actor.kl_unbiased",
    "gconfig.greedy",
    "actor.ppo_n_minibatches",
    "actor.optimizer.min_lr_ratio",
    "evaluator.temperature",
    "evaluator.n_samples",
    "evaluator.max_new_tokens",
    "gconfig.min_new_tokens",
    "scheduler.address",
    "rollout.max_head_offpolicyness",
)
"""If two keys of the recipe contradict each other, the one that is listed here is taken back."""
SECTIONS_OF_ROLES = tuple(role.key for role in ROLES.values())
LEFT_BY_OTHERS = "a server takes the memory that roles on the same devices leave"
SAME_COLUMNS = (
    *("prompt_key", "input_key", "answer_key", "response_key", "messages_key", "chosen_key", "rejected_key"),
    *("max_length", "apply_chat_template", "system_prompt", "truncation", "reader", "reader_kwargs.domains"),
)
"""Keys that held-out rows share with training rows unless the source says otherwise."""
OF_OTHER_COLUMNS = ("messages_key", "reader", "reader_kwargs.domains")
"""Keys of these that held-out rows with other columns do not share."""
MAPPINGS = ("scheduler.environment.", "chat_template_kwargs.")
"""What precedes names that are the user's own."""
OF_OTHER_COMMANDS: Mapping[str, tuple[str, Outcome]] = {
    "evaluator.": (NOTHING_GENERATED, "implied"),
    "rollout.": (NOTHING_GENERATED, "implied"),
    "gconfig.": (NOTHING_GENERATED, "implied"),
    "actor.offload.": (NOTHING_GENERATED, "implied"),
}
"""Why sections that only recipes of `fivefold train` have are left out of others, and the outcome for their keys."""


def import_recipe(
    framework: Framework,
    files: Sequence[Path],
    overrides: Sequence[str],
    output: Path,
    *,
    strict: bool = False,
    overwrite: bool = False,
    environment: Mapping[str, str] | None = None,
    on_report: Callable[[Report], None] | None = None,
) -> Report:
    """Write a recipe to `output` that says what the framework's `files` and `overrides` say; return the report.

    Args:
        framework: the framework that the files are written for.
        files: YAML files and launch scripts; keys of later files override earlier ones.
        overrides: `a.b=c` in the framework's own keys, which override all files.
        output: the recipe's file.
        strict: refuse to write if anything is unsupported, or if there are problems.
        overwrite: replace `output` if it exists.
        environment: variables that launch scripts and `${oc.env:...}` may read; None: the environment of this process.
            Secrets are left out by their names.
        on_report: called with the report before anything is written, and before `strict` refuses.

    Raises:
        ValueError: a file cannot be read, `output` exists or cannot be written, or `strict` is set and keys are
            unsupported or there are problems.
    """
    _check_output(output, overwrite=overwrite)
    known = os.environ if environment is None else environment
    # What a script reads of a secret would be written into the recipe and its comments.
    known = {name: value for name, value in known.items() if not names_secret(name)}
    recipe, report = convert(framework, files, overrides, known)
    if on_report is not None:
        on_report(report)
    if strict:
        _refuse_what_is_left(report)
    _write(output, recipe, report)
    return report


def _refuse_what_is_left(report: Report) -> None:
    """Refuse an import with problems or with keys that are unsupported.

    Raises:
        ValueError: there are some; the message lists them.
    """
    keys, problems = report.unsupported, report.problems
    counts = []
    if keys:
        counts.append("1 key is unsupported" if len(keys) == 1 else f"{len(keys)} keys are unsupported")
    if problems:
        counts.append("there is 1 problem" if len(problems) == 1 else f"there are {len(problems)} problems")
    if counts:
        lines = [*(f"{entry.key}: {entry.note}" for entry in keys), *problems]
        listed = "\n".join(f"- {line}" for line in lines)
        raise ValueError(f"{' and '.join(counts)}, and --strict allows none:\n{listed}")


def _check_output(output: Path, *, overwrite: bool) -> None:
    # os.path says that a path which it cannot read does not exist; `_write` then says why.
    if os.path.isdir(output):
        raise ValueError(f"-o {output} is a folder; name a file, such as {output / 'recipe.yaml'}")
    nearest = next(parent for parent in output.absolute().parents if os.path.exists(parent))
    if not os.path.isdir(nearest):
        raise ValueError(f"-o {output}: {nearest} is a file, not a folder; name a file in a folder")
    if os.path.exists(output) and not overwrite:
        raise ValueError(f"{output} exists; give another name, or --overwrite")


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split arguments into files and overrides: an override looks like `a.b=c` and is not the name of a file."""
    # Path.exists would raise an error for a word that is too long for a file's name.
    overrides = [word for word in arguments if OVERRIDE.match(word) and not os.path.exists(word)]
    return [Path(word) for word in arguments if word not in overrides], overrides


def convert(
    framework: Framework, files: Sequence[Path], overrides: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, Any], Report]:
    """Return the recipe as nested keys, with `???` for values that the user has to give, and the report.

    Raises:
        ValueError: a file cannot be read, is another framework's or is for a task that is not imported, or a value that
            other keys depend on cannot be converted.
    """
    if not files and not overrides:
        raise ValueError("there is nothing to import; give YAML files, launch scripts or overrides as a.b=c")
    drafted = draft_of(framework, files, overrides, environment)
    check_framework(drafted, files, overrides, environment)
    draft, title = drafted.draft, drafted.dialect.title
    if unknown := draft.unknown_defaults:
        draft.notes.append(f"{title}'s defaults are not known here, so that Fivefold's hold: {', '.join(unknown)}")
    if files and drafted.is_strange:
        draft.problems.insert(
            0,
            f"{drafted.n_strangers} of {drafted.n_keys} keys are not known as {title}'s: "
            "name with --from the framework that the files are written for",
        )
    to_give = _complete(draft, drafted.documents)
    recipe = _check(draft, to_give)
    return recipe, Report(
        framework=title,
        sources=tuple(str(file) for file in files) + (("overrides",) if overrides else ()),
        entries=tuple(draft.entries),
        to_give=tuple(to_give),
        notes=tuple(draft.notes),
        problems=tuple(draft.problems),
        schema=draft.schema,
    )


def _complete(draft: Draft, documents: Sequence[Document]) -> list[str]:
    """Fill in what follows from other keys; return the keys that the user has to give."""
    recipe = draft.recipe
    if "experiment_name" not in recipe:
        recipe["experiment_name"] = run_name(Path(documents[0].name).stem if documents else "imported")
        draft.notes.append(f"experiment_name={recipe['experiment_name']}, after the file: the source names no run")
    for section in _held_out(recipe):
        has_columns = any(f"{section}.{name}" in recipe for name in ("prompt_key", "response_key", "chosen_key"))
        for name in SAME_COLUMNS:
            if has_columns and name in OF_OTHER_COLUMNS:
                continue
            if (value := recipe.get(f"train_dataset.{name}")) is not None:
                recipe.setdefault(f"{section}.{name}", value)
    grouped = [key for key in (MEAN_LEVEL, STD_LEVEL) if recipe.get(key, "group") == "group"]
    if recipe.get("gconfig.n_samples") == 1 and grouped and recipe.get("actor.advantage", "grpo") == "grpo":
        recipe |= dict.fromkeys(grouped, "batch")
        draft.notes.append(
            "with one response to each prompt, a group has no differences, so rewards are normalised over the batch"
        )
    if "recover.freq_steps" in recipe or "recover.freq_epochs" in recipe:
        # The source's own frequency takes the place of Fivefold's.
        recipe.setdefault("recover.freq_secs", None)
    if recipe.get("cluster.n_nodes", 1) > 1 and "scheduler.type" not in recipe:
        recipe["scheduler.type"] = "ray"
        draft.notes.append("scheduler.type=ray: a run on several nodes joins a Ray cluster (docs/cluster.md)")
    complete(draft)
    agents.complete(draft)
    lacks_teacher = bool(recipe.get(COEFF)) and not any(key.startswith("teachers.") for key in recipe)
    needed = (*NEEDED, *([TEACHER_PATH] if lacks_teacher and draft.schema is TrainRecipe else []))
    missing = [key for key in needed if key not in recipe]
    recipe |= dict.fromkeys(missing, MISSING)
    return [key for key, value in recipe.items() if value == MISSING]


def _held_out(recipe: Mapping[str, Any]) -> list[str]:
    """Return the sections of held-out prompts that the recipe has."""
    named = [key.removesuffix(".path") for key in recipe if key.startswith("valid_datasets.") and key.endswith(".path")]
    return ["valid_dataset"] if "valid_dataset.path" in recipe else named


def _stand_in(key: str) -> Any:
    return STAND_INS.get(key, "to-be-given")


def _drop_what_has_no_effect(draft: Draft) -> None:
    """Remove keys that have no effect because of others, and which the recipe would refuse."""
    recipe = draft.recipe
    if draft.schema is not TrainRecipe:
        _drop_what_only_training_has(draft)
    if not _held_out(recipe):
        is_divided = bool(recipe.get("train_dataset.hold_out"))
        why = ALL_HELD_OUT if is_divided else "without held-out prompts, nothing is evaluated"
        without = ("valid_dataset.",) if is_divided else ("evaluator.", "valid_dataset.")
        for key in [key for key in recipe if key.startswith(without)]:
            draft.demote(key, why, "implied")
    if recipe.get("evaluator.greedy", True):
        for name in ("temperature", "top_p", "top_k"):
            draft.demote(f"evaluator.{name}", "evaluation is greedy", "implied")
    for role in ("actor", "critic"):
        if recipe.get(f"{role}.optimizer.lr_scheduler_type", "constant") == "constant":
            draft.demote(f"{role}.optimizer.min_lr_ratio", "the learning rate is constant", "implied")
    overlap = "actor.megatron.transformer.moe_shared_expert_overlap"
    shape = known_shape(str(recipe.get("actor.path"))) if overlap in recipe else None
    if shape is not None and not shape.shared_expert_ffn_hidden:
        draft.demote(overlap, "the model has no shared experts", "implied")
    if not recipe.get("rollout.max_head_offpolicyness"):
        draft.demote("rollout.recompute_kv_cache", SYNCHRONOUS, "implied")
    if not draft.compares_with_reference:
        for key in ("actor.kl_target", "actor.kl_horizon"):
            draft.demote(key, "there is no KL term", "implied")
        for key in [key for key in recipe if key.startswith("ref.")]:
            draft.demote(key, NO_REFERENCE, "implied")
    if "ref.backend" not in recipe:
        draft.demote(
            "ref.offload", "the weights of a reference in the actor's processes move with the actor's", "implied"
        )
    if not recipe.get(COEFF):
        for key in [key for key in recipe if key.startswith(("teacher.", "teachers."))]:
            draft.demote(key, "the weight of the teacher is 0", "implied")
    if recipe.get("recover.mode") == "disabled":
        for key in [key for key in recipe if key.startswith("recover.") and key != "recover.mode"]:
            draft.demote(key, "recover.mode is disabled: no checkpoints are written", "implied")
    for section in ("train_dataset", *_held_out(recipe)):
        path = recipe.get(f"{section}.path", "")
        if any(Path(one).suffix in SUFFIXES for one in (path if isinstance(path, list) else [path])):
            draft.demote(f"{section}.split", "a data set of one file has no splits", "implied")


def _drop_what_only_training_has(draft: Draft) -> None:
    """Remove keys that only recipes of `fivefold train` have."""
    known = set(known_keys(draft.schema))
    for key in [key for key in draft.recipe if key not in known and not key.startswith(MAPPINGS)]:
        why = [why for part, why in OF_OTHER_COMMANDS.items() if key.startswith(part)]
        draft.demote(key, *(why[0] if why else (f"a recipe of `{COMMANDS[draft.schema]}` has no {key}",)))


def _check(draft: Draft, to_give: Sequence[str]) -> dict[str, Any]:
    """Return the recipe, nested; values that the schema refuses are removed, and their keys become unsupported."""
    while True:
        _drop_what_has_no_effect(draft)
        recipe = _nested({key: _stand_in(key) if key in to_give else value for key, value in draft.recipe.items()})
        try:
            checked = draft.schema.model_validate(recipe)
        except ValidationError as error:
            if not _take_back(draft, error):
                raise RecipeError("the converted recipe", problems_of(error, draft.schema)) from error
            continue
        if "rollout.memory_fraction" in draft.recipe and (reason := _who_settles_memory(checked)):
            draft.demote("rollout.memory_fraction", reason, "implied")
            continue
        draft.problems += problems_of_recipe(checked)
        draft.notes += [*_silent_notes(checked, draft), *_server_notes(checked)]
        return _nested(draft.recipe, draft.schema)


def _who_settles_memory(recipe: Recipe) -> str | None:
    """Return the reason why the recipe does not set the rollout's share of the memory; None if it does."""
    try:
        placement = place(recipe)
    except RecipeError:
        return None
    if not placement["rollout"].layout.is_server:
        return "the embedded engine takes what it needs"
    return LEFT_BY_OTHERS if placement.sharers("rollout") else None


def _silent_notes(recipe: Recipe, draft: Draft) -> list[str]:
    """Return notes on what a recipe does although no key of the source says it, or leaves undone."""
    notes: list[str] = []
    if recipe.cluster.n_nodes > 1 and recipe.scheduler.type == "local":
        notes.append(
            "scheduler.type=local is this machine alone: several nodes need scheduler.type=ray (docs/cluster.md)"
        )
    if not isinstance(recipe, TrainRecipe):
        return notes
    if recipe.actor.advantage != "none" and not any(key.startswith("reward.") for key in draft.recipe):
        notes.append(
            "no reward was converted, so reward.fn=math judges all responses: 1 for the right final answer, else 0. "
            "Where the source judges otherwise, by the data source for example, write reward.fn or reward.rewards"
        )
    if recipe.gconfig.alterations and recipe.actor.rollout_correction.method == "auto":
        notes.append(
            "with top_p, top_k or min_new_tokens the rollout samples from a cut distribution, so that its mismatch "
            "with the trainer is neither measured nor corrected (actor.rollout_correction)"
        )
    return notes


def _server_notes(recipe: Recipe) -> list[str]:
    """Return a note on what each server of the recipe needs; none if its roles cannot be placed."""
    try:
        placement = place(recipe)
    except RecipeError:
        return []
    return [
        f"{placed.layout.backend} has to be installed; if it needs other versions of torch or transformers, install it "
        f"in its own environment and name that in {ROLES[placed.role].key}.server_python"
        for placed in placement.roles
        if placed.layout.is_server
    ]


def _take_back(draft: Draft, error: ValidationError) -> bool:
    """Remove values that the schema refuses; return whether there was one."""
    found = False
    for detail, problem in located_problems(error, draft.schema):
        location = ".".join(str(part) for part in detail["loc"])
        for key in _at_fault(draft.recipe, location, detail["type"], problem):
            draft.demote(key, problem)
            found = True
    return found


def _at_fault(recipe: Mapping[str, Any], location: str, kind: str, problem: str) -> list[str]:
    """Return the recipe's keys that an error at `location` is about."""
    if kind == "missing":  # a section that lacks a key is of no use
        return [key for key in recipe if key.startswith(location.rpartition(".")[0] + ".")]
    # The location may be an item in a list.
    if keys := [key for key in recipe if f"{location}.".startswith(f"{key}.")]:
        return keys
    section = f"{location}." if location else ""
    inside = [key for key in YIELDING if key in recipe and key.startswith(section)]
    if yielding := [key for key in inside if key.removeprefix(section) in problem]:
        return yielding[:1]
    # A section whose parts contradict one another is of no use either, unless it is a role's.
    return [key for key in recipe if key.startswith(section)] if location and location not in SECTIONS_OF_ROLES else []


def _nested(flat: Mapping[str, Any], schema: type[Recipe] = TrainRecipe) -> dict[str, Any]:
    """Return flat keys as a tree, with sections and keys in the order of the schema."""
    order = {key: place_ for place_, key in enumerate(known_keys(schema))}
    tree: dict[str, Any] = {}
    for key in sorted(flat, key=lambda key: order.get(key, order.get(key.rpartition(".")[0], len(order)))):
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = flat[key]
    return tree


def _write(output: Path, recipe: Mapping[str, Any], report: Report) -> None:
    """Write report and recipe to one file, and read it back as its command will."""
    body = write_yaml(dict(recipe))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(f"{report.comments()}\n{body}", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"-o {output}: the recipe cannot be written there ({error.strerror}); name a file in a folder of yours"
        ) from error
    load_recipe(output, [f"{key}={json.dumps(_stand_in(key))}" for key in report.to_give], report.schema)
