"""Files of JSON that are nested too deep, or hold something else: readers skip them or refuse them by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fivefold.checkpoints import manifest
from fivefold.checkpoints.fingerprints import config_fingerprint
from fivefold.checkpoints.manifest import DamagedCheckpointError
from fivefold.checkpoints.run_state import RunState
from fivefold.json_text import parsed, parsed_object
from fivefold.observe import earlier, json_records
from fivefold.report.samples import Samples

DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize("text", [DEEP, b"{", b"\xff", b""])
def test_what_is_not_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"nested too deep|Expecting|decode"):
        parsed(text)
    with pytest.raises(ValueError, match="it is a list and no object"):
        parsed_object("[1]")


def test_odd_lines_of_metrics_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + DEEP + b'\n[1]\n{"step": "2"}\n{"step": 2}\n{"step": 3}\n')
    assert list(json_records.records(file)) == [{"step": 1}, {"step": 2}, {"step": 3}]
    json_records.cut_back(file, 2)
    assert list(json_records.records(file)) == [{"step": 1}, {"step": 2}]
    events = tmp_path / "events"
    events.write_bytes(b'[1]\n{"name": "build", "seconds": "x"}\n' + DEEP + b"\n")
    assert earlier._seconds(events) is None


def test_odd_lines_of_samples_cost_no_page(tmp_path: Path) -> None:
    good = {"step": 1, "prompt": "p", "response": "r", "reward": 1.0}
    odd = [{**good, "reward": "high"}, {"step": 1}, {**good, "response": 5}, {**good, "oldest_weight_version": "x"}]
    lines = tmp_path / "samples.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in [good, *odd]) + '{"step": 1, [\n')
    samples = Samples(lines, tmp_path / "parts")
    samples.refresh()
    assert [row["reward"] for row in samples.rows] == [1.0, "high"]
    assert samples.index([0, 1])
    assert samples.chunk([0, 1], with_tokens=True)


def forged(folder: Path, **values: Any) -> None:
    """Write a manifest whose own checksum is right."""
    text = json.dumps(values | {manifest.DIGEST: manifest._own_digest(values)})
    (folder / manifest.FILE).write_text(text)


def test_forged_manifests_and_states_are_damaged(tmp_path: Path) -> None:
    (tmp_path / manifest.FILE).write_bytes(DEEP)
    with pytest.raises(DamagedCheckpointError, match="nested too deep"):
        manifest.read(tmp_path)
    for values in ({"files": {}}, {"format": 1, "files": [1]}, {"format": "1", "files": {}}, {"format": 1}):
        forged(tmp_path, **values)
        with pytest.raises(DamagedCheckpointError, match="not of the form of a manifest"):
            manifest.read(tmp_path)
    for content in (DEEP, b"[]", b"{}", b'{"kept_metric": {"name": 1, "values": []}}'):
        (tmp_path / "run.json").write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=r"run\.json is damaged"):
            RunState.read(tmp_path)


@pytest.mark.parametrize("content", [DEEP, b"[]"])
def test_an_odd_config_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        config_fingerprint(tmp_path)
