from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import shutil
import subprocess
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.observe import alive
from fivefold.observe.errors import RunFailed
from fivefold.observe.machine import versions
from fivefold.observe.run_dir import RunDir
from tests.unit.checkpoints.examples import killed_at


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
    with pytest.raises(ValueError, match=rf"a run is active in .*\(process {os.getpid()} on "):
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


def test_a_run_has_ended_when_its_process_has_though_its_parent_has_not_asked(tmp_path: Path) -> None:
    run = RunDir.create(recipe(tmp_path), overwrite=False)
    with subprocess.Popen(["sleep", "600"]) as process:
        run.status.write_text(json.dumps(status(run) | {"pid": process.pid}))
        assert run.present_state() == "setup"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert run.present_state() == "killed"


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


def test_a_full_disk_says_what_to_do_and_names_no_log_that_is_not_there(tmp_path: Path) -> None:
    run = RunDir.create(recipe(tmp_path), overwrite=False)
    run.started()
    shutil.rmtree(run.logs)  # as on a full disk, the log cannot be written
    with pytest.raises(RunFailed, match=r"events.*free some space.*same command") as caught, run:
        raise OSError(errno.ENOSPC, "No space left on device", "events")
    assert "Traceback" not in str(caught.value)
    assert f"could not be written to {run.path}" in str(caught.value)


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


@pytest.fixture
def quick_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heart that beats, and is watched, a hundred times as fast."""
    for name in ("BEAT_SECONDS", "WATCH_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(alive, name, getattr(alive, name) / 100)


@pytest.mark.usefixtures("quick_heart")
@pytest.mark.parametrize("place", [{"host": "elsewhere"}, {"pid_namespace": "pid:[1]", "pid": 2**22 + 1}])
def test_a_run_of_another_machine_or_container_goes_on_while_its_heart_beats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: dict[str, object]
) -> None:
    with RunDir.create(recipe(tmp_path), overwrite=False) as run:
        run.started()
        run.metrics.write_text("{}\n")
        run.status.write_text(json.dumps(status(run) | place))
        host = status(run)["host"]
        assert run.present_state() == "running"
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=rf"a run is active in .*on {host}\).*trial_name=trial-1"):
                RunDir.create(recipe(tmp_path), overwrite=overwrite)
        assert f"A run on {host} may still be alive in" in capsys.readouterr().err
        assert run.metrics.exists()


@pytest.mark.usefixtures("quick_heart")
def test_a_run_of_another_machine_without_a_heartbeat_has_ended(tmp_path: Path) -> None:
    run = RunDir.create(recipe(tmp_path), overwrite=False)
    run.started()
    run.status.write_text(json.dumps({**status(run), "host": "elsewhere"}))
    run.metrics.write_text("{}\n")
    with pytest.raises(ValueError, match="holds the results of a killed run"):
        RunDir.create(recipe(tmp_path), overwrite=False)
    assert (status(run)["state"], status(run)["host"]) == ("killed", "elsewhere")
    assert not RunDir.create(recipe(tmp_path), overwrite=True).metrics.exists()


def dead(run: RunDir) -> RunDir:
    """Let `run` look as after a SIGKILL of its process."""
    run.status.write_text(json.dumps({**status(run), "pid": 2**22 + 1}))
    return run


def killed_run(root: Path, last_step: int) -> RunDir:
    """A run that was killed after `last_step`, in the middle of its next lines."""
    run = RunDir.create(recipe(root), overwrite=False)
    run.started()
    for file in (run.metrics, run.samples):
        lines = [json.dumps({"step": step, "text": "π\u2028"}) + "\n" for step in range(1, last_step + 1)]
        file.write_text("".join([*lines, f'{{"step": {last_step + 1}, "te']), encoding="utf-8")
    (run.checkpoints / "step-000002").mkdir(parents=True)
    for step in (2, 4):
        (run.weights / f"step-{step:06d}").mkdir(parents=True)
    (run.logs / "actor-0.log").write_text("first start")
    return dead(run)


NO_TIME = b'{"state": "running", "host": "here", "pid": 1, "changed": "yesterday"}'


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").split("\n")[:-1]]


def test_a_resumed_run_keeps_the_results_up_to_its_step(tmp_path: Path) -> None:
    began = status(killed_run(tmp_path, last_step=5))["began"]
    changed = recipe(tmp_path).model_copy(update={"seed": 7})
    with RunDir.resume(changed, step=3) as run:
        assert run.metrics.read_text().count("\n") == 5
        assert (run.checkpoints / "step-000002").is_dir()
        assert (run.logs / "start-1" / "actor-0.log").read_text() == "first start"
        assert load_recipe(run.recipe, [], TrainRecipe) == recipe(tmp_path)
        (run.logs / "actor-0.log").write_text("second start")
        run.started()
        assert (status(run)["state"], status(run)["began"]) == ("running", began)
        assert steps(run.metrics) == steps(run.samples) == [1, 2, 3]
        assert load_recipe(run.recipe, [], TrainRecipe) == changed
        assert [folder.name for folder in run.weights.iterdir()] == ["step-000002"]
    with RunDir.resume(changed, step=3) as run:
        assert sorted(path.name for path in run.logs.iterdir()) == ["start-1", "start-2"]
        run.started()
        assert steps(run.metrics) == [1, 2, 3]


def test_a_set_up_that_fails_leaves_the_results_of_a_resumed_run(tmp_path: Path) -> None:
    run = killed_run(tmp_path, last_step=5)
    before = run.metrics.read_bytes()
    with pytest.raises(ValueError, match="no device"), RunDir.resume(recipe(tmp_path), step=3):
        raise ValueError("no device")
    assert run.metrics.read_bytes() == before


@pytest.mark.parametrize("torn", [b"", b'{"state": "runn', b"\0\0\0\0", b'"text"', b'{"state": "running"}', NO_TIME])
def test_a_torn_status_is_that_of_a_killed_run(tmp_path: Path, torn: bytes) -> None:
    run = killed_run(tmp_path, last_step=5)
    run.status.write_bytes(torn)
    assert not run.is_ours()
    with pytest.raises(ValueError, match="holds the results of a killed run of an unknown time"):
        RunDir.create(recipe(tmp_path), overwrite=False)
    with RunDir.resume(recipe(tmp_path), step=3) as run:
        run.started()
    assert status(run)["state"] == "finished"


def test_checkpoints_are_results(tmp_path: Path) -> None:
    run = killed_run(tmp_path, last_step=5)
    for path in (run.metrics, run.samples):
        path.unlink()
    shutil.rmtree(run.weights)
    with pytest.raises(ValueError, match="killed run"):
        RunDir.create(recipe(tmp_path), overwrite=False)
    assert not RunDir.create(recipe(tmp_path), overwrite=True).checkpoints.exists()


@pytest.mark.long
def test_a_kill_while_a_run_is_replaced_leaves_a_folder_that_can_be_replaced(tmp_path: Path) -> None:
    for number in itertools.count(1):
        root = tmp_path / str(number)
        run = killed_run(root, last_step=5)
        for file in ("a", "b"):
            (run.checkpoints / "step-000002" / file).write_text("x")
        was_killed = killed_at(number, run.path, lambda root=root: RunDir.create(recipe(root), overwrite=True))
        left = run.checkpoints / "step-000002"
        assert not left.exists() or {path.name for path in left.iterdir()} == {"a", "b"}
        again = RunDir.create(recipe(root), overwrite=True)
        assert {path.name for path in again.path.iterdir()} == {"recipe.yaml", "status.json", "logs"}
        if not was_killed:
            break
    assert number > 20


def test_a_kill_while_a_run_begins_leaves_a_free_folder(tmp_path: Path) -> None:
    for number in itertools.count(1):
        root = tmp_path / str(number)
        was_killed = killed_at(number, root, lambda root=root: RunDir.create(recipe(root), overwrite=False))
        RunDir.create(recipe(root), overwrite=False)
        if not was_killed:
            break
    assert number > 5


@pytest.mark.long
def test_a_kill_while_a_run_resumes_loses_nothing(tmp_path: Path) -> None:
    def go_on(root: Path) -> None:
        RunDir.resume(recipe(root), step=3).started()

    for number in itertools.count(1):
        root = tmp_path / str(number)
        run = killed_run(root, last_step=5)
        was_killed = killed_at(number, run.path, lambda root=root: go_on(root))
        assert run.metrics.read_text().startswith(run.samples.read_text()[:20])
        go_on(root)
        assert steps(run.metrics) == steps(run.samples) == [1, 2, 3]
        if not was_killed:
            break
    assert number > 20


N_STARTS, N_ROUNDS = 4, 10


def start_at_once(folder: Path, barrier: Barrier, taken: SimpleQueue[int]) -> None:
    """Try to take each round's folder, and stay alive until all others have tried."""
    for number in range(N_ROUNDS):
        barrier.wait()
        try:
            RunDir.create(recipe(folder, f"trial-{number}"), overwrite=False)
            taken.put(number)
        except ValueError as error:
            if "a run is active" not in str(error):
                raise
        barrier.wait()


def test_one_of_several_starts_at_once_takes_the_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, taken = context.Barrier(N_STARTS, timeout=60), context.SimpleQueue()
    processes = [context.Process(target=start_at_once, args=(tmp_path, barrier, taken)) for _ in range(N_STARTS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(taken.get() for _ in range(N_ROUNDS)) == list(range(N_ROUNDS))
    assert taken.empty()
