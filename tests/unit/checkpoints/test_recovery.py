"""Where a run starts, for every state in which an earlier start may have left its folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fivefold.checkpoints import manifest
from fivefold.checkpoints.changes import RecipeChangedError, compare_recipes
from fivefold.checkpoints.manifest import DamagedCheckpointError, NewerCheckpointError
from fivefold.checkpoints.recovery import find_start
from fivefold.checkpoints.start import Finished, FromScratch, Resume, Start
from fivefold.checkpoints.store import TRAINER, CheckpointStore
from fivefold.config.load import load_recipe, resolved_yaml
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.sampler import EpochSampler
from fivefold.observe.run_dir import RunDir
from fivefold.run.state_owners import load_state
from tests.unit.checkpoints.examples import FINGERPRINTS, manifest_of, run_state, save

MINIMAL = """\
experiment_name: e
actor: {path: m}
train_dataset: {path: d, batch_size: 2}
total_train_steps: 50
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{MINIMAL}cluster: {{fileroot: {tmp_path}/runs}}\n")
    return path


def recipe(file: Path, *overrides: str) -> TrainRecipe:
    return load_recipe(file, overrides, TrainRecipe)


def run(loaded: Recipe, *steps: int, ending: str = "killed", started_from: str | None = None) -> RunDir:
    """Leave the folder of a run that wrote checkpoints after `steps` and ended one step later."""
    folder = RunDir.create(loaded, overwrite=True)
    folder.started()
    last = max(steps, default=0) + 1
    folder.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, last + 1)))
    for step in steps:
        save(CheckpointStore(folder.checkpoints), step, loaded, run_state(step, started_from=started_from))
    if ending == "finished":
        folder.write_summary({"steps": last})
    status = json.loads(folder.status.read_text())
    state = "running" if ending == "killed" else ending
    folder.status.write_text(json.dumps({**status, "pid": 2**22 + 1, "state": state}))
    return folder


def resumed(start: Start) -> Resume:
    assert isinstance(start, Resume), start
    return start


def test_a_first_start_is_anew(recipe_file: Path) -> None:
    for mode in ("auto", "disabled"):
        start = find_start(recipe(recipe_file, f"recover.mode={mode}"), overwrite=False)
        assert isinstance(start, FromScratch)
        assert (start.step, start.started_from, start.overwrite) == (0, None, False)
        assert str(start.facts()["start"]).startswith("from scratch; ")
    with start.open_folder(recipe(recipe_file)) as folder:
        assert folder.recipe.exists()


def test_a_killed_run_goes_on_from_its_newest_checkpoint(recipe_file: Path) -> None:
    loaded = recipe(recipe_file)
    left = run(loaded, 4, 8)
    unfinished = CheckpointStore(left.checkpoints).begin(12)
    (unfinished / "run.json").write_text("{")
    start = resumed(find_start(loaded, overwrite=False))
    assert (start.step, start.in_place, start.changes, start.started_from) == (8, True, (), None)
    assert start.facts() == {"start": f"continues after step 8, from {left.checkpoints}/step-000008"}
    with start.open_folder(loaded) as folder:
        folder.started()
        assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == list(range(1, 9))


def test_a_run_without_a_whole_checkpoint_starts_anew_and_says_so(recipe_file: Path) -> None:
    loaded = recipe(recipe_file)
    left = run(loaded)
    CheckpointStore(left.checkpoints).begin(1)
    start = find_start(loaded, overwrite=False)
    assert start == FromScratch("from scratch; the run before (killed) had saved no checkpoint", overwrite=True)
    assert isinstance(start, FromScratch)
    assert not start.open_folder(loaded).metrics.exists()


def test_results_of_a_run_that_kept_no_checkpoints_are_not_deleted(recipe_file: Path) -> None:
    without = recipe(recipe_file, "recover.mode=disabled")
    left = run(without)
    for loaded in (without, recipe(recipe_file)):
        with pytest.raises(ValueError, match="holds the results of a killed run"):
            find_start(loaded, overwrite=False)
        assert find_start(loaded, overwrite=True).overwrite  # type: ignore[union-attr]
    # An older version of Fivefold knew no checkpoints.
    left.recipe.write_text(left.recipe.read_text().partition("recover:")[0])
    with pytest.raises(ValueError, match="holds the results of a killed run"):
        find_start(recipe(recipe_file), overwrite=False)


def test_disabled_and_overwrite_do_not_look_at_checkpoints(recipe_file: Path) -> None:
    run(recipe(recipe_file), 4)
    with pytest.raises(ValueError, match="holds the results of a killed run"):
        find_start(recipe(recipe_file, "recover.mode=disabled"), overwrite=False)
    for mode in ("auto", "disabled"):
        start = find_start(recipe(recipe_file, f"recover.mode={mode}"), overwrite=True)
        assert isinstance(start, FromScratch)
        assert start.overwrite


def test_a_run_that_goes_on_is_refused(recipe_file: Path) -> None:
    loaded = recipe(recipe_file)
    RunDir.create(loaded, overwrite=False).started()
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="a run is active in"):
            find_start(loaded, overwrite=overwrite)


def test_a_finished_run_goes_on_only_for_more_steps(recipe_file: Path) -> None:
    run(recipe(recipe_file), 48, 50, ending="finished")
    for override in (
        "total_train_steps=50",
        "total_train_steps=40",
        "stats.n_logged_samples=1",
        "recover.freq_secs=1m",
    ):
        start = find_start(recipe(recipe_file, override), overwrite=False)
        assert isinstance(start, Finished), start
        assert start.summary == {"steps": 51}
        assert "nothing to do" in start.reason
    assert resumed(find_start(recipe(recipe_file, "total_train_steps=51"), overwrite=False)).step == 50
    # 20 batches in an epoch
    epochs = ("total_train_steps=null", "total_train_epochs=3")
    assert resumed(find_start(recipe(recipe_file, *epochs), overwrite=False)).step == 50
    with pytest.raises(
        RecipeChangedError, match=r"finished run of another recipe:\n- actor.optimizer.lr: 1e-06 -> 0.1\n.*trial-1"
    ):
        find_start(recipe(recipe_file, "actor.optimizer.lr=0.1"), overwrite=False)


def test_a_finished_run_without_checkpoints_is_not_deleted(recipe_file: Path) -> None:
    loaded = recipe(recipe_file)
    run(loaded, ending="finished")
    assert isinstance(find_start(loaded, overwrite=False), Finished)


def test_a_run_that_failed_after_its_last_step_ends_as_it_should(recipe_file: Path) -> None:
    run(recipe(recipe_file), 50, ending="failed")
    assert resumed(find_start(recipe(recipe_file), overwrite=False)).step == 50
    with pytest.raises(ValueError, match=r"asks for 49 steps, and .*step-000050 has 50"):
        find_start(recipe(recipe_file, "total_train_steps=49"), overwrite=False)


def test_a_run_does_not_start_from_the_last_step_of_another(recipe_file: Path) -> None:
    left = run(recipe(recipe_file), 50, ending="finished")
    overrides = ("trial_name=next", f"recover.mode={left.path}")
    with pytest.raises(ValueError, match=r"asks for 50 steps, and .*step-000050 has 50"):
        find_start(recipe(recipe_file, *overrides), overwrite=False)
    assert resumed(find_start(recipe(recipe_file, *overrides, "total_train_steps=51"), overwrite=False)).step == 50


def test_a_pass_over_the_data_is_read_to_its_end_with_another_batch_size(recipe_file: Path) -> None:
    """By brute force: steps of the old size, then of the new one, until `total_train_epochs` are over."""
    for done, size, epochs, earlier in ((12, 4, 2, []), (25, 3, 2, []), (19, 8, 1, []), (30, 7, 3, [[8, 4], [1, 6]])):
        loaded = recipe(recipe_file, "total_train_steps=null", f"total_train_epochs={epochs}")
        changed = recipe(
            recipe_file, "total_train_steps=null", f"total_train_epochs={epochs}", f"train_dataset.batch_size={size}"
        )
        state = run_state(done, earlier_steps=earlier)
        rest = done - sum(n for _, n in earlier)
        sizes = [*(size for size, n in earlier for _ in range(n)), *([2] * rest)]
        for reader, expected in ((loaded, 2), (changed, size)):
            epoch = row = 0
            steps = 0
            while epoch < epochs:
                each = sizes[steps] if steps < done else expected
                if row + each <= 40:
                    row, steps = row + each, steps + 1
                if row + each > 40:
                    epoch, row = epoch + 1, 0
            assert state.last_step(reader, 40) == steps
    assert run_state(9).last_step(recipe(recipe_file), 40) == 50


# Changes of the recipe


def test_what_may_change_is_listed(recipe_file: Path) -> None:
    run(recipe(recipe_file), 4)
    overrides = (
        "actor.optimizer.lr=2e-6", "actor.backend=megatron:d1t2", "rollout.backend=vllm:d2", "total_train_steps=60",
        "cluster.n_gpus_per_node=2", "recover.freq_steps=3", "actor.path=/elsewhere/m", "recover.accept_changes=[seed]",
    )  # fmt: skip
    start = resumed(find_start(recipe(recipe_file, *overrides), overwrite=False))
    assert sorted(map(str, start.changes)) == [
        "actor.backend: 'megatron:d1' -> 'megatron:d1t2'",
        "actor.optimizer.lr: 1e-06 -> 2e-06",
        "actor.path: 'm' -> '/elsewhere/m'",
        "cluster.n_gpus_per_node: 8 -> 2",
        "recover.freq_steps: null -> 3",
        "rollout.backend: 'transformers:d1' -> 'vllm:d2'",
        "total_train_steps: 50 -> 60",
    ]
    assert "actor.optimizer.lr: 1e-06 -> 2e-06" in str(start.facts()["changed"])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=7", "seed"),
        ("train_dataset.limit=9", "train_dataset"),
        ("train_dataset.shuffle=false", "train_dataset"),
        ("valid_dataset.path=v", "valid_dataset"),
        ("actor.init_from_scratch=true", "actor.init_from_scratch"),
    ],
)
def test_what_may_not_change_is_refused_unless_it_is_accepted(recipe_file: Path, override: str, key: str) -> None:
    run(recipe(recipe_file), 4)
    changed = override.partition("=")[0]
    with pytest.raises(ValueError, match=rf"(?s)- {changed}.* -> .*recover\.accept_changes=\[{key}\]"):
        find_start(recipe(recipe_file, override), overwrite=False)
    for accepted in (key, changed.partition(".")[0]):
        start = resumed(
            find_start(recipe(recipe_file, override, f"recover.accept_changes=[{accepted}]"), overwrite=False)
        )
        assert changed in str(start.facts()["changed"])


def test_a_recipe_of_another_version_is_compared_by_its_keys(recipe_file: Path, tmp_path: Path) -> None:
    loaded = recipe(recipe_file)
    saved = tmp_path / "saved.yaml"
    values = yaml.safe_load(resolved_yaml(loaded))
    del values["recover"]
    values["gconfig"]["retired_key"] = 3
    saved.write_text(yaml.safe_dump(values))
    assert [str(change) for change in compare_recipes(saved, loaded).allowed] == ["gconfig.retired_key: 3 -> absent"]


def test_a_checkpoint_of_the_other_command_is_refused(recipe_file: Path) -> None:
    run(recipe(recipe_file), 4)
    kinds: dict[str, type[SFTRecipe | DPORecipe | RMRecipe]] = {"sft": SFTRecipe, "dpo": DPORecipe, "rm": RMRecipe}
    for command, kind in kinds.items():
        words = f"checkpoint of `fivefold train`, from which `fivefold {command}` cannot continue"
        with pytest.raises(ValueError, match=words):
            find_start(load_recipe(recipe_file, [], kind), overwrite=False)


def test_a_model_or_a_tokenizer_of_other_content_is_refused_unless_it_is_accepted(recipe_file: Path) -> None:
    loaded = recipe(recipe_file)
    run(loaded, 4)
    start = resumed(find_start(loaded, overwrite=False))
    start.check_contents(loaded, FINGERPRINTS)
    for name, key, words in (
        ("config", "actor.path", "the config.json of the model"),
        ("weights", "actor.path", "the weights of the model"),
        ("tokenizer", "tokenizer_path", "the files of the tokenizer"),
    ):
        found = type(FINGERPRINTS)(**{**vars(FINGERPRINTS), name: "other"})
        with pytest.raises(ValueError, match=rf"{words}.*step-000004.*accept_changes=\[{key}\]"):
            start.check_contents(loaded, found)
        start.check_contents(recipe(recipe_file, f"recover.accept_changes=[{key}]"), found)


def test_the_order_of_the_data_goes_on_or_begins_again_if_a_change_is_accepted(recipe_file: Path) -> None:
    loaded = recipe(recipe_file)
    run(loaded, 24)
    start = resumed(find_start(loaded, overwrite=False))

    def sampler(**changed: object) -> EpochSampler[int]:
        options = {"items": range(40), "batch_size": 2, "shuffle": True, "seed": 1, "fingerprint": "d", **changed}
        return EpochSampler(**options)  # type: ignore[arg-type]

    same = sampler()
    assert start.restore_order(loaded, same) is None
    assert same.place == (1, 8)
    larger = sampler(batch_size=4)
    assert start.restore_order(loaded, larger) is None
    assert larger.place == (1, 8)
    for changed, accepted, words in (
        ({"fingerprint": "x"}, "train_dataset", "the contents of its rows differ"),
        ({"fingerprint": "x"}, "tokenizer_path", "the contents of its rows differ"),
        ({"fingerprint": "d replay {}"}, "train_dataset.sampler", "weights of its sources or its sampler differ"),
        ({"items": range(41)}, "train_dataset.limit", "number of rows: 40 -> 41"),
        ({"seed": 2}, "seed", "seed: 1 -> 2"),
    ):
        other = sampler(**changed)
        with pytest.raises(ValueError, match=f"(?s)training data is not the one of the checkpoint.*{words}"):
            start.restore_order(recipe(recipe_file, "recover.accept_changes=[ref.path]"), other)
        note = start.restore_order(recipe(recipe_file, f"recover.accept_changes=[{accepted}]"), other)
        assert note is not None
        assert other.place == (0, 0)


# Paths


def test_a_run_starts_from_another_runs_checkpoint_and_then_goes_on_from_its_own(recipe_file: Path) -> None:
    first = run(recipe(recipe_file), 4, 8)
    for path, step in ((first.path, 8), (first.checkpoints, 8), (first.checkpoints / "step-000004", 4)):
        loaded = recipe(recipe_file, "trial_name=next", f"recover.mode={path}")
        start = resumed(find_start(loaded, overwrite=False))
        origin = str(first.checkpoints / f"step-{step:06d}")
        assert (start.step, start.in_place, start.started_from) == (step, False, origin)
        with start.open_folder(loaded) as folder:
            folder.started()
        own = run(loaded, 20, started_from=origin)
        again = resumed(find_start(loaded, overwrite=False))
        assert (again.step, again.in_place, again.started_from) == (20, True, origin)
        shutil.rmtree(own.path)
    assert len(CheckpointStore(first.checkpoints).all()) == 2


def test_a_run_goes_on_when_the_checkpoint_that_it_started_from_is_gone(recipe_file: Path) -> None:
    first = run(recipe(recipe_file), 4, 8)
    origin = first.checkpoints / "step-000004"
    loaded = recipe(recipe_file, "trial_name=next", f"recover.mode={origin}")
    run(loaded, 20, started_from=str(origin))
    shutil.rmtree(origin)
    assert resumed(find_start(loaded, overwrite=False)).step == 20
    with pytest.raises(ValueError, match="step-000004 does not exist"):
        find_start(loaded, overwrite=True)


def test_a_folder_with_results_of_another_origin_is_refused(recipe_file: Path) -> None:
    first = run(recipe(recipe_file), 4, 8)
    loaded = recipe(recipe_file, "trial_name=next", f"recover.mode={first.checkpoints / 'step-000004'}")
    for origin in (None, str(first.checkpoints / "step-000008")):
        run(loaded, 20, started_from=origin)
        with pytest.raises(ValueError, match=r"next holds the results.*--overwrite"):
            find_start(loaded, overwrite=False)
        start = resumed(find_start(loaded, overwrite=True))
        assert (start.step, start.in_place, start.overwrite) == (4, False, True)


def test_a_run_goes_back_to_one_of_its_checkpoints_only_with_overwrite(recipe_file: Path) -> None:
    left = run(recipe(recipe_file), 4, 8, 12)
    loaded = recipe(recipe_file, f"recover.mode={left.checkpoints}/step-000008")
    with pytest.raises(
        ValueError, match=r"gone on to step 12. To go back to step 8, .*--overwrite.*trial_name=trial-1"
    ):
        find_start(loaded, overwrite=False)
    assert resumed(find_start(recipe(recipe_file, f"recover.mode={left.path}"), overwrite=False)).step == 12
    start = resumed(find_start(loaded, overwrite=True))
    assert (start.step, start.in_place) == (8, True)
    with start.open_folder(loaded) as folder:
        assert len(CheckpointStore(folder.checkpoints).all()) == 3
        folder.started()
        assert [each.step for each in CheckpointStore(folder.checkpoints).all()] == [4, 8]
        assert folder.metrics.read_text().count("\n") == 8


def test_a_path_without_a_checkpoint_is_an_error_that_says_what_is_there(recipe_file: Path, tmp_path: Path) -> None:
    left = run(recipe(recipe_file, "trial_name=other"))
    unfinished = CheckpointStore(left.checkpoints).begin(3)
    run_state(3).write(unfinished)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for path, words in (
        ("atuo", "does not exist; give auto, disabled, or the folder"),
        (str(recipe_file), "is a file"),
        (str(tmp_path / "model"), "it is a model in Hugging Face format, which belongs to actor.path"),
        (str(tmp_path / "empty"), "it is empty"),
        (str(left.path), "it holds checkpoints, logs, metrics.jsonl, recipe.yaml, status.json"),
        (str(unfinished), "it is one that was not finished, for manifest.json"),
        ("~no-such-user/x", "there is no home folder"),
    ):
        with pytest.raises(ValueError, match=words):
            find_start(recipe(recipe_file, f"recover.mode={path}"), overwrite=False)


# Damage


def test_metrics_that_lack_steps_before_the_checkpoint_are_noted(
    recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = recipe(recipe_file)
    folder = run(loaded, 4, 8)
    find_start(loaded, overwrite=False)
    assert capsys.readouterr().err == ""
    folder.metrics.write_text('{"step": 1}\n{"step": 2}\n')
    assert resumed(find_start(loaded, overwrite=False)).step == 8
    assert "metrics.jsonl ends at step 2, and the checkpoint is of step 8" in capsys.readouterr().err


def test_the_latest_good_checkpoint_is_the_newest_that_is_whole(
    recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lenient = recipe(recipe_file, "recover.mode=latest-good")
    assert isinstance(find_start(lenient, overwrite=False), FromScratch)
    folder = run(recipe(recipe_file), 4, 8, 12)
    assert resumed(find_start(lenient, overwrite=False)).step == 12
    for step, left in ((12, 8), (8, 4)):
        (folder.checkpoints / f"step-{step:06}" / "run.json").write_text("{}")
        start = resumed(find_start(lenient, overwrite=False))
        assert (start.step, start.in_place) == (left, True)
        assert f"step-{step:06} is left out" in capsys.readouterr().err
    with start.open_folder(lenient) as opened:
        opened.started()
        assert [checkpoint.step for checkpoint in CheckpointStore(opened.checkpoints).all()] == [4]
    (folder.checkpoints / "step-000004" / "run.json").write_text("{}")
    with pytest.raises(DamagedCheckpointError, match="step-000004 is damaged"):
        find_start(lenient, overwrite=False)


def test_a_damaged_checkpoint_is_an_error_that_names_the_file_and_the_way_on(recipe_file: Path) -> None:
    loaded = recipe(recipe_file)
    left = run(loaded, 4, 8)
    file = left.checkpoints / "step-000008/trainer/__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"!")
    with pytest.raises(
        DamagedCheckpointError,
        match=rf"(?s){file} is damaged.*set recover.mode=latest-good to continue from step-000004",
    ):
        find_start(loaded, overwrite=False)
    assert resumed(find_start(recipe(recipe_file, "recover.verify=false"), overwrite=False)).step == 8
    for damage in (lambda: file.write_bytes(b""), file.unlink):
        damage()
        with pytest.raises(DamagedCheckpointError, match=str(file)):
            find_start(recipe(recipe_file, "recover.verify=false"), overwrite=False)
    manifest_file = left.checkpoints / "step-000008/manifest.json"
    manifest_file.write_bytes(manifest_file.read_bytes()[:100])
    with pytest.raises(DamagedCheckpointError, match=rf"(?s){manifest_file} is damaged.*step-000004"):
        find_start(loaded, overwrite=False)
    shutil.rmtree(left.checkpoints / "step-000008")
    assert resumed(find_start(loaded, overwrite=False)).step == 4


def test_a_checkpoint_of_a_newer_version_is_refused(recipe_file: Path) -> None:
    left = run(recipe(recipe_file), 8)
    folder = left.checkpoints / "step-000008"
    (folder / "manifest.json").unlink()
    manifest.write(folder, replace(manifest_of(folder, 8), format=99))
    with pytest.raises(NewerCheckpointError, match=rf"{folder}/manifest.json has format 99"):
        find_start(recipe(recipe_file), overwrite=False)


class NotedRole:
    """A role that notes the folders that it was told to load."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load_state(self, folder: Path) -> None:
        self.loaded.append(folder.name)


def test_a_new_critic_begins_anew_beside_an_actor_that_goes_on(recipe_file: Path) -> None:
    ppo = ("algorithm=ppo", "critic.path=m")
    folder = run(recipe(recipe_file), 4)
    with pytest.raises(ValueError, match=r"(?s)critic\.path: absent -> .*accept_changes=\[critic"):
        find_start(recipe(recipe_file, *ppo), overwrite=False)
    start = resumed(find_start(recipe(recipe_file, *ppo, "recover.accept_changes=[critic]"), overwrite=False))
    role = NotedRole()
    (start.checkpoint.path / TRAINER).mkdir(exist_ok=True)
    for name in (TRAINER, "critic"):
        load_state(start, name, role.load_state)
    assert role.loaded == [TRAINER]
    (start.checkpoint.path / "critic").mkdir()
    load_state(start, "critic", role.load_state)
    assert role.loaded == [TRAINER, "critic"]
    assert folder.checkpoints in start.checkpoint.path.parents
