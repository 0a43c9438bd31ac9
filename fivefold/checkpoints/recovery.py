"""Decides where a run starts: at its first step, at a checkpoint, or not at all because it has finished.

recover.mode   disabled            the run starts from scratch, in a free folder
               auto                it continues from the newest checkpoint in its folder, if any
               latest-good         as auto, and leaves out checkpoints that are damaged
               path of another     it starts from that checkpoint, in a free folder; run again, it continues from
               run's checkpoint    its own newest checkpoint
               path of one of      it goes back to that checkpoint; what came after it is deleted, which needs
               its own             `--overwrite`
"""

from __future__ import annotations

import sys
from pathlib import Path

from fivefold.checkpoints import manifest
from fivefold.checkpoints.changes import Changes, RecipeChangedError, compare_recipes, is_below
from fivefold.checkpoints.manifest import DamagedCheckpointError
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.start import Finished, FromScratch, Resume, Start
from fivefold.checkpoints.store import RECIPE, Checkpoint, CheckpointStore, checkpoint_in, first_few, what_is_in
from fivefold.config.load import kind_of
from fivefold.config.paths import user_path
from fivefold.config.problems import COMMANDS
from fivefold.config.schema.recipe import Recipe
from fivefold.config.source import read_mapping
from fivefold.json_text import read_object
from fivefold.observe.json_records import records
from fivefold.observe.run_dir import RunDir

OPERATIONAL = (
    "cluster",
    "profile",
    "recover",
    "saver",
    "scheduler",
    "stats",
    "total_train_epochs",
    "total_train_steps",
)
"""Keys and sections that do not change what a finished run has learned."""
LATEST_GOOD = "latest-good"
OWN = ("auto", LATEST_GOOD)
"""Values of `recover.mode` that look for a checkpoint in the run's own folder."""
LARGE = 10**9
"""Bytes of a checkpoint whose verification takes so long that the user gets a note."""


def find_start(recipe: Recipe, *, overwrite: bool) -> Start:
    """Find where the run of `recipe` starts. Nothing is changed by that.

    Every file of the checkpoint is compared with its checksum, unless `recover.verify` is false.

    Raises:
        ValueError: the run's folder is in use or holds results that would be lost; `recover.mode` names no checkpoint;
            the checkpoint is damaged, of a newer version, or of a recipe that differs in what may not change.
    """
    run = RunDir.of(recipe)
    mode = recipe.recover.mode
    if mode == "disabled" or (mode in OWN and overwrite):
        run.check_free(overwrite=overwrite)
        return FromScratch(
            "from scratch; no checkpoints are written" if mode == "disabled" else "from scratch", overwrite
        )
    run.check_idle()
    if mode in OWN:
        return _in_own_folder(recipe, run)
    if not overwrite and _started_from(run, user_path(mode).resolve()):
        return _in_own_folder(recipe, run)
    given = _checkpoint_at(mode)
    if given.path.parent == run.checkpoints:
        return _in_own_past(recipe, run, given, overwrite)
    return _from_another(recipe, run, given, overwrite)


def _in_own_folder(recipe: Recipe, run: RunDir) -> Start:
    newest_first = CheckpointStore(run.checkpoints).all()[::-1]
    if not newest_first:
        return _without_checkpoint(recipe, run)
    is_lenient = recipe.recover.mode == LATEST_GOOD
    for checkpoint in newest_first[:-1] if is_lenient else ():
        try:
            return _at_own(checkpoint, recipe, run)
        except DamagedCheckpointError as error:
            text = f"recover.mode={LATEST_GOOD}: {checkpoint.path.name} is left out, and deleted once the run has begun"
            print(f"{text}: {error}", file=sys.stderr, flush=True)
    return _at_own(newest_first[-1 if is_lenient else 0], recipe, run)


def _at_own(latest: Checkpoint, recipe: Recipe, run: RunDir) -> Start:
    """Return the start from a checkpoint in the run's own folder."""
    state, changes = _opened(latest, recipe)
    wanted = state.last_step(recipe, state.sampler["n_items"])
    has_stopped = state.has_stopped(recipe.evaluator.early_stopping)
    is_over = has_stopped or (wanted <= state.total_steps and not state.stopped_early)
    if run.ending() == "finished" and run.summary.is_file() and is_over:
        return _finished(run, changes)
    last = max((record["step"] for record in records(run.metrics)), default=0)
    if last < state.step:
        text = f"{run.metrics} ends at step {last}, and the checkpoint is of step {state.step}"
        print(f"{text}: curves lack the steps between", file=sys.stderr, flush=True)
    return _resumed(latest, state, changes, recipe, in_place=True)


def _without_checkpoint(recipe: Recipe, run: RunDir) -> Start:
    if not run.has_results():
        return FromScratch("from scratch; there is no checkpoint yet")
    if run.ending() == "finished" and run.summary.is_file():
        return _finished(run, compare_recipes(run.recipe, recipe))
    if not _kept_checkpoints(run):
        run.check_free(overwrite=False)
    return FromScratch(f"from scratch; the run before ({run.ending()}) had saved no checkpoint", overwrite=True)


def _in_own_past(recipe: Recipe, run: RunDir, given: Checkpoint, overwrite: bool) -> Start:
    latest = CheckpointStore(run.checkpoints).latest()
    if given == latest and not overwrite:
        return _in_own_folder(recipe, run)
    if latest is not None and given < latest and not overwrite:
        raise ValueError(
            f"recover.mode={recipe.recover.mode}: this run has gone on to step {latest.step}. To go back to step "
            f"{given.step}, delete what came after it with --overwrite; or start from there in a new run, such as "
            f"trial_name={run.free_name()}"
        )
    state, changes = _opened(given, recipe)
    return _resumed(given, state, changes, recipe, in_place=True)


def _started_from(run: RunDir, folder: Path) -> bool:
    """Return whether the run in its own folder started from the checkpoint `folder`, or from one of the run `folder`.

    That checkpoint may be gone by now, or its run may have a newer one.
    """
    mine = CheckpointStore(run.checkpoints).latest()
    origin = None if mine is None else RunState.read(mine.path).started_from
    return origin is not None and folder in (Path(origin), *Path(origin).parents[:2])


def _from_another(recipe: Recipe, run: RunDir, given: Checkpoint, overwrite: bool) -> Start:
    has_checkpoints = CheckpointStore(run.checkpoints).latest() is not None
    if has_checkpoints or run.ending() == "finished" or not _kept_checkpoints(run):
        run.check_free(overwrite=overwrite)
    state, changes = _opened(given, recipe)
    return _resumed(given, state, changes, recipe, in_place=False)


def _resumed(checkpoint: Checkpoint, state: RunState, changes: Changes, recipe: Recipe, *, in_place: bool) -> Resume:
    """Return the start from a checkpoint, after all checks that need neither model nor data."""
    changes.check()
    wanted = state.last_step(recipe, state.sampler["n_items"])
    # A run in its own folder may have lost no more than its end: the last evaluation, the summary.
    if wanted < state.step or (wanted == state.step and not in_place):
        raise ValueError(
            f"the recipe asks for {wanted} steps, and {checkpoint.path} has {state.step} already: raise "
            "total_train_steps, or start a new run with another trial_name"
        )
    _verify(checkpoint, deep=recipe.recover.verify)
    # A free folder has no results; one that is not free and was not refused was started without checkpoints.
    return Resume(checkpoint, state, changes.allowed, in_place, overwrite=not in_place)


def _finished(run: RunDir, changes: Changes) -> Finished:
    """Return that the run has finished, unless the recipe asks for another one."""
    others = [change for change in (*changes.refused, *changes.allowed) if not is_below(change.key, OPERATIONAL)]
    if others:
        lines = "".join(f"\n- {change}" for change in others)
        raise RecipeChangedError(
            f"{run.path} holds a finished run of another recipe:{lines}\nChoose another trial_name, such as "
            f"trial_name={run.free_name()}, or delete its results with --overwrite. With a larger total_train_steps, "
            "it would continue"
        )
    try:
        summary = read_object(run.summary)
    except ValueError as error:
        raise ValueError(f"{run.summary} is damaged: {error}. Delete it, and run the command again") from error
    words = f"{run.path} holds the finished run of this recipe, so there is nothing to do. To train further, raise "
    early = "evaluator.early_stopping.patience" if summary.get("stopped_early") else None
    keys = early or "total_train_steps or total_train_epochs"
    return Finished(f"{words}{keys}; to start from scratch, use --overwrite", summary)


def _opened(checkpoint: Checkpoint, recipe: Recipe) -> tuple[RunState, Changes]:
    """Read what a checkpoint says about its run, and compare the recipes."""
    _verify(checkpoint, deep=False)
    saved = checkpoint.path / RECIPE
    theirs, ours = COMMANDS[kind_of(read_mapping(saved))], COMMANDS[type(recipe)]
    if theirs != ours:
        raise ValueError(
            f"{checkpoint.path} is a checkpoint of `{theirs}`, from which `{ours}` cannot continue: "
            "choose another trial_name; to train its model further, export it with `fivefold checkpoints` and name "
            "that as actor.path"
        )
    try:
        state = RunState.read(checkpoint.path)
    except DamagedCheckpointError as error:
        raise _damaged(checkpoint, [str(error)]) from error
    return state, compare_recipes(saved, recipe)


def _verify(checkpoint: Checkpoint, *, deep: bool) -> None:
    """Refuse a damaged checkpoint.

    Raises:
        DamagedCheckpointError: it names the files, and what to do.
        NewerCheckpointError: a newer version of Fivefold has written it.
    """
    try:
        content = checkpoint.manifest()
    except DamagedCheckpointError as error:
        problems = [str(error)]
    else:
        if deep and content.n_bytes > LARGE:
            text = f"Comparing the checksums of {content.n_bytes / 1e9:,.0f} GB in {checkpoint.path} ..."
            print(text, file=sys.stderr, flush=True)
        problems = manifest.compare(checkpoint.path, content, deep=deep)
    if problems:
        raise _damaged(checkpoint, problems)


def _damaged(checkpoint: Checkpoint, problems: list[str]) -> DamagedCheckpointError:
    """Return the error of a damaged checkpoint, which says what to do."""
    earlier = [each for each in CheckpointStore(checkpoint.path.parent).all() if each < checkpoint]
    others = f"set recover.mode={LATEST_GOOD} to continue from {earlier[-1].path.name}, or" if earlier else "or"
    lines = "".join(f"\n- {problem}" for problem in first_few(problems))
    return DamagedCheckpointError(
        f"the checkpoint {checkpoint.path} is damaged:{lines}\nBring the files back, {others} start a new run"
    )


def _checkpoint_at(mode: str) -> Checkpoint:
    """Return the checkpoint that `recover.mode` names: a folder of one, or the newest of a run.

    Raises:
        ValueError: there is none; it says what is there.
    """
    folder = user_path(mode).resolve()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(
            f"recover.mode={mode}: {folder} {what}; give auto, disabled, or the folder of a checkpoint or of a run"
        )
    found = checkpoint_in(folder)
    for root in (folder / "checkpoints", folder):
        found = found or CheckpointStore(root).latest()
    if found is None:
        raise ValueError(f"recover.mode={mode}: {folder} holds no complete checkpoint; {what_is_in(folder)}")
    return found


def _kept_checkpoints(run: RunDir) -> bool:
    """Return whether the run in the folder would have written checkpoints, and ended before its first one."""
    if not run.recipe.is_file():
        return not run.has_results()
    section = read_mapping(run.recipe).get("recover", {"mode": "disabled"})
    return bool(section["mode"] != "disabled")
