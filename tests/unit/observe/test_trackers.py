"""Trackers over their own packages, without a network: what was logged is read back from their files."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold.config.schema.train import TrainRecipe
from fivefold.observe.run_dir import RunDir
from fivefold.observe.trackers import background
from fivefold.observe.trackers.background import TrackedRun, Trackers, check_installed

SAMPLE = {"step": 2, "prompt": "2+3=", "response": "5", "ground_truth": "5", "reward": 1.0, "finish_reason": "stop"}


@pytest.fixture(autouse=True)
def _packages_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trackers take as long as they need on a busy machine."""
    monkeypatch.setattr(background, "END_SECONDS", 600.0)


def recipe(root: Path, *trackers: str) -> TrainRecipe:
    return TrainRecipe.model_validate(
        {
            "experiment_name": "sums",
            "cluster": {"fileroot": str(root)},
            "actor": {"path": "package:tiny-moe"},
            "train_dataset": {"path": "package:arithmetic/train", "batch_size": 4},
            "stats": {"trackers": list(trackers)},
        }
    )


def track(root: Path, name: str, steps: Sequence[int], *, ends: bool) -> list[str]:
    """Log steps as one start of a run does; return what the user was told."""
    told: list[str] = []
    folder = RunDir.of(recipe(root))
    trackers = Trackers.open(recipe(root, name), folder, told.append)
    for step in steps:
        trackers.log(step, {"reward/mean": step / 4, "seconds/old log-probs": 0.5, "grad_norm": float("nan")})
    trackers.samples([SAMPLE | {"half": "\ud83d"}])
    if ends:
        trackers.summary({"accuracy_after": 0.9, "recipe": "long"})
    trackers.close()
    return told


def twice(root: Path, name: str) -> None:
    """Log two starts of one run, the second of which goes on behind step 2."""
    assert track(root, name, (1, 2), ends=False) == []
    if name == "wandb":
        time.sleep(1.1)  # the names of its folders have whole seconds
    assert track(root, name, (3, 4), ends=True) == []


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, whose first block here lacks the 7 bytes of a file's header."""
    block, header, whole = 32768, 7, b""
    place, left = 0, block - header
    while place + header <= len(content):
        if left < header:
            place, left = place + left, block
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + header : place + header + size]
        place, left = place + header + size, left - header - size
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield whole
            whole = b""


def wandb_records(file: Path) -> list[Any]:
    """Return the records of one start, once wandb's own process has written the last of them."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(DecodeError):
            records = [Record.FromString(data) for data in leveldb_records(file.read_bytes()[7:])]
            if any(record.HasField("exit") for record in records):
                return records
        time.sleep(0.05)
    raise TimeoutError(f"{file} has no end")


def test_wandb_has_the_steps_of_all_starts_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")

    monkeypatch.setenv("WANDB_MODE", "offline")
    twice(tmp_path, "wandb")
    folder = RunDir.of(recipe(tmp_path)).trackers
    history, ids, config, summary, exits = {}, set(), {}, {}, []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(file):
            if record.run.run_id:
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            row = {item.key or item.nested_key[-1]: json.loads(item.value_json) for item in record.history.item}
            if "reward/mean" in row:
                history[row["_step"]] = row["reward/mean"]
            summary |= {item.key or item.nested_key[-1]: json.loads(item.value_json) for item in record.summary.update}
            exits += [record.exit.exit_code] if record.HasField("exit") else []
    assert history == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    assert ids == {json.loads((folder / "key.json").read_text())["key"]}
    assert config["train_dataset.batch_size"] == 4
    assert config["places.checkpoints"].endswith("sums/trial-0/checkpoints")
    assert summary["accuracy_after"] == 0.9
    assert exits == [1, 0]  # the first start was interrupted


def test_mlflow_has_the_steps_of_all_starts_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    twice(tmp_path, "mlflow")
    folder = RunDir.of(recipe(tmp_path)).trackers
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    assert [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "reward/mean")] == [
        (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0),
    ]  # fmt: skip
    assert run.data.params["train_dataset.batch_size"] == "4"
    assert run.info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"summary.json", "samples.json"}
    summary, table = (
        json.loads(Path(client.download_artifacts(run.info.run_id, name, str(tmp_path))).read_text())
        for name in ("summary.json", "samples.json")
    )
    assert summary == {"accuracy_after": 0.9}
    assert table["data"] == [list(SAMPLE.values())]


def test_mlflow_keeps_a_metric_and_its_largest_value_in_a_folder_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # later versions ask for it
    told: list[str] = []
    own = recipe(tmp_path, "mlflow")
    own = own.model_copy(update={"reward": own.reward.model_copy(update={"kwargs": {"a=b": 1}})})
    trackers = Trackers.open(own, RunDir.of(own), told.append)
    trackers.log(1, {"ratio": 1.0, "ratio/max": 2.0})
    trackers.close()
    assert told == []
    assert {file.name for file in tmp_path.glob("mlruns/*/*/metrics/*")} == {"ratio", "ratio.max"}
    assert len(list(tmp_path.glob("mlruns/*/*/params/reward.kwargs.a_b"))) == 1


def test_swanlab_has_the_steps_of_all_starts_under_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("swanlab")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    monkeypatch.setenv("SWANLAB_MODE", "offline")
    stdout = sys.stdout
    twice(tmp_path, "swanlab")
    assert sys.stdout is stdout
    assert "ERROR" not in "".join(capfd.readouterr())
    folder = RunDir.of(recipe(tmp_path)).trackers
    scalars: dict[str, dict[int, float]] = {}
    keys, texts = set(), []
    for file in sorted(folder.glob("run-*/*.swanlab")):
        for data in leveldb_records(file.read_bytes()[7:]):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("start"):
                keys.add((record.start.project, record.start.id))
            if record.HasField("scalar"):
                scalars.setdefault(record.scalar.key, {})[record.scalar.step] = record.scalar.value.number
            if record.HasField("media"):
                texts += [file.parent / "media" / "text" / item.filename for item in record.media.value.items]
    assert scalars["reward/mean"] == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    assert list(scalars["summary/accuracy_after"].values()) == [pytest.approx(0.9)]
    assert keys == {("sums", json.loads((folder / "key.json").read_text())["key"])}
    assert [file.read_text() for file in texts] == ["2+3=\n\n5"] * 2
    config = yaml.safe_load(next(folder.glob("run-*/files/config.yaml")).read_text())
    assert config["train_dataset.batch_size"]["value"] == 4
    assert config["places.checkpoints"]["value"].endswith("sums/trial-0/checkpoints")


def test_trackio_has_the_steps_of_all_starts_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when the package is imported
    pytest.importorskip("trackio")
    twice(tmp_path, "trackio")
    [file] = (tmp_path / "trackio").glob("sums*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    logged = {step: json.loads(metrics) for _, step, metrics in rows}
    assert {step: logged[step]["reward/mean"] for step in (1, 2, 3, 4)} == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}
    assert len({name for name, *_ in rows}) == 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeTracker]]:
    """A package of the name wandb whose tracker does what the test says."""
    module = types.ModuleType("fivefold.observe.trackers.wandb")
    module.WandbTracker = FakeTracker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    FakeTracker.reset()
    return FakeTracker


class FakeTracker:
    fails_at: str | None = None
    hangs: threading.Event | None = None
    """It hangs until this is set."""
    calls: list[Any] = []  # noqa: RUF012
    runs: list[TrackedRun] = []  # noqa: RUF012

    @classmethod
    def reset(cls) -> None:
        cls.fails_at, cls.hangs, cls.calls, cls.runs = None, None, [], []

    def __init__(self, run: TrackedRun) -> None:
        self.runs.append(run)
        self._do("open")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._do("log")
        self.calls.append((step, dict(metrics)))

    def finish(self, summary: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        self._do("finish")
        self.calls.append((dict(summary), list(samples)))

    def _do(self, what: str) -> None:
        if self.fails_at == what:
            raise SystemExit("the server said no")
        if self.hangs is not None:
            self.hangs.wait(120)


def test_a_tracker_is_told_the_steps_the_summary_and_the_last_samples(tmp_path: Path, fake: type[FakeTracker]) -> None:
    assert track(tmp_path, "wandb", (1,), ends=True) == []
    assert track(tmp_path, "wandb", (2,), ends=False) == []
    # What is not a number is left out: trackers draw it in ways of their own.
    assert fake.calls[0] == (1, {"reward/mean": 0.25, "seconds/old log-probs": 0.5})
    # Half a surrogate pair has no encoding, and a text with one would end a tracker.
    assert fake.calls[1] == ({"accuracy_after": 0.9}, [SAMPLE | {"half": r"\ud83d"}])
    assert [run.is_new for run in fake.runs] == [True, False]
    assert fake.runs[0].key == fake.runs[1].key


@pytest.mark.parametrize("where", ["open", "log", "finish"])
def test_a_tracker_that_fails_is_told_of_once_and_ends_nothing(
    tmp_path: Path, fake: type[FakeTracker], where: str
) -> None:
    fake.fails_at = where
    [told] = track(tmp_path, "wandb", (1, 2, 3), ends=True)
    assert (
        told
        == "wandb no longer tracks this run (SystemExit: the server said no); the run continues, with metrics.jsonl"
    )


def test_a_tracker_that_hangs_holds_nothing_up(
    tmp_path: Path, fake: type[FakeTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.hangs = threading.Event()
    monkeypatch.setattr(background, "END_SECONDS", 0.1)
    [told] = track(tmp_path, "wandb", (1, 2), ends=True)
    fake.hangs.set()
    assert told.startswith("wandb no longer tracks this run (it has not ended after")


def test_a_tracker_without_its_package_is_refused_before_the_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'fivefold\[mlflow\]', or leave it out"):
        check_installed(["tensorboard", "mlflow"])
    check_installed(["tensorboard"])


def test_a_tracker_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trackers has wandb twice"):
        recipe(tmp_path, "wandb", "wandb")
