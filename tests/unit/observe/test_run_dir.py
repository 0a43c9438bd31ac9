from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema import TrainRecipe
from fivefold.observe.errors import RunFailed
from fivefold.observe.run_dir import RunDir
from fivefold.observe.versions import versions


def recipe(root: Path, trial: str = "trial-0") -> TrainRecipe:
    return TrainRecipe.model_validate(
        {
            "experiment_name": "e",
            "trial_name": trial,
            "cluster": {"fileroot": str(root / "runs")},
            "actor": {"path": "nowhere"},
            "train_dataset": {"path": "nowhere"},
        }
    )


def finished_run(root: Path) -> RunDir:
    with RunDir.create(recipe(root), overwrite=False) as run:
        run.started()
        run.metrics.write_text('{"step": 1}\n')
        run.write_summary({"accuracy": {"after": 0.9}})
    return run


def status(run: RunDir) -> dict[str, object]:
    return dict(json.loads(run.status.read_text()))


def test_a_run_records_its_states_and_its_results(tmp_path: Path) -> None:
    with RunDir.create(recipe(tmp_path), overwrite=False) as run:
        assert run.path == tmp_path / "runs/e/trial-0"
        assert status(run)["state"] == "setup"
        assert run.is_ours()
        run.started()
        assert status(run)["state"] == "running"
        run.write_summary({"accuracy": 0.9})
    assert status(run)["state"] == "finished"
    assert status(run)["error"] is None
    assert load_recipe(run.recipe, [], TrainRecipe) == recipe(tmp_path)
    assert json.loads(run.summary.read_text()) == {"accuracy": 0.9}
    assert set(run.saved()) == {"summary", "recipe"}


def test_results_are_overwritten_only_with_overwrite(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    (tmp_path / "runs/e/trial-1").mkdir()
    with pytest.raises(ValueError, match=r"finished run.*trial_name=trial-2.*--overwrite"):
        RunDir.create(recipe(tmp_path), overwrite=False)
    assert run.summary.exists()
    again = RunDir.create(recipe(tmp_path), overwrite=True)
    assert not again.summary.exists()
    assert not again.metrics.exists()
    assert again.recipe.exists()


def test_a_trial_name_without_a_number_gets_one(tmp_path: Path) -> None:
    with RunDir.create(recipe(tmp_path, "best"), overwrite=False) as run:
        run.metrics.write_text("{}\n")
    with pytest.raises(ValueError, match="trial_name=best-1"):
        RunDir.create(recipe(tmp_path, "best"), overwrite=False)


def test_a_folder_without_a_run_is_never_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "runs/e/trial-0"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="is not the folder of a run"):
            RunDir.create(recipe(tmp_path), overwrite=overwrite)
    assert (folder / "thesis.tex").exists()


def test_the_folder_of_a_run_in_progress_is_never_deleted(tmp_path: Path) -> None:
    run = RunDir.create(recipe(tmp_path), overwrite=False)
    run.started()
    with pytest.raises(ValueError, match=rf"a run goes on in .*\(process {os.getpid()}\)"):
        RunDir.create(recipe(tmp_path), overwrite=True)


def test_a_killed_run_keeps_its_folder_only_if_it_has_results(tmp_path: Path) -> None:
    run = RunDir.create(recipe(tmp_path), overwrite=False)
    run.started()
    dead = status(run) | {"pid": 2**22 + 1}
    run.status.write_text(json.dumps(dead))
    run.metrics.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="killed run"):
        RunDir.create(recipe(tmp_path), overwrite=False)
    run.metrics.unlink()
    RunDir.create(recipe(tmp_path), overwrite=False)


def test_a_failure_in_the_setup_stays_a_value_error_and_does_not_keep_the_folder(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="heads"), RunDir.create(recipe(tmp_path), overwrite=False) as run:
            raise ValueError("14 heads cannot be split over 4 ranks")
    assert status(run)["state"] == "failed"
    assert status(run)["error"] == "14 heads cannot be split over 4 ranks"


def test_a_value_error_of_the_run_becomes_run_failed_with_its_traceback_in_a_log(tmp_path: Path) -> None:
    run = RunDir.create(recipe(tmp_path), overwrite=False)
    run.started()
    with pytest.raises(RunFailed, match=r"(?s)shapes differ.*driver\.log") as caught, run:
        raise ValueError("shapes differ")
    assert isinstance(caught.value.__cause__, ValueError)
    assert "ValueError: shapes differ" in (run.logs / "driver.log").read_text()
    assert status(run)["state"] == "failed"


def test_errors_other_than_value_errors_are_raised_as_they_are(tmp_path: Path) -> None:
    run = RunDir.create(recipe(tmp_path), overwrite=False)
    run.started()
    with pytest.raises(KeyError), run:
        raise KeyError("x")
    assert status(run)["state"] == "failed"
    run = RunDir.create(recipe(tmp_path), overwrite=False)
    run.started()
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    assert status(run)["state"] == "interrupted"


def test_versions_are_those_of_the_libraries_that_results_depend_on() -> None:
    import ray
    import torch

    found = versions()
    # torch's own version has the build (+cpu, +cu130), which the version of its package may lack.
    assert torch.__version__.startswith(found["torch"].split("+")[0])
    assert found["ray"] == ray.__version__
    assert {"fivefold", "python", "megatron-core", "transformers"} <= set(found)


@pytest.mark.parametrize("has_results", [True, False])
def test_a_run_of_another_machine_counts_as_in_progress(tmp_path: Path, has_results: bool) -> None:
    run = RunDir.create(recipe(tmp_path), overwrite=False)
    run.started()
    run.status.write_text(json.dumps({**status(run), "host": "elsewhere"}))
    if has_results:
        run.metrics.write_text("{}\n")
    with pytest.raises(ValueError, match=r"a run on elsewhere .* may still go on.*trial_name=trial-1.*--overwrite"):
        RunDir.create(recipe(tmp_path), overwrite=False)
    assert run.logs.exists()
    assert not RunDir.create(recipe(tmp_path), overwrite=True).metrics.exists()
