"""Checkpoints on a disk that is full or read-only: a real file system, in a namespace of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MOUNTED = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what the script beside the tests reports about each attempt to save."""
    disk = tmp_path_factory.mktemp("disk")
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNTED, str(disk)]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let its users mount a file system of their own")
    script = [sys.executable, "-m", "tests.unit.checkpoints.save_on_small_disk", str(disk)]
    done = subprocess.run([*isolated, *script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_case(attempts: list[dict[str, Any]], case: str) -> list[dict[str, Any]]:
    return [attempt for attempt in attempts if attempt["case"] == case]


def test_a_disk_that_fills_up_at_any_byte_names_the_file_and_leaves_the_earlier_checkpoint(
    attempts: list[dict[str, Any]],
) -> None:
    *failed, last = of_case(attempts, "full")
    assert (last["error"], last["latest"], last["problems"]) == (None, 2, [])
    assert len(failed) >= 16, "one for each page of the weights"
    for attempt in failed:
        assert (attempt["latest"], attempt["problems"]) == (1, []), attempt
        for words in ("checkpoint of step 2", "[Errno 28] No space left on device: '/", "step-000001"):
            assert words in attempt["error"], attempt
    for file in ("trainer/__0_0.distcp", "trainer/.metadata", "manifest.json"):
        assert any(f"step-000002/{file}" in attempt["error"] for attempt in failed), file


def test_the_run_goes_on_when_there_is_room_again(attempts: list[dict[str, Any]]) -> None:
    assert of_case(attempts, "freed") == [{"case": "freed", "error": None, "latest": 3, "problems": []}]


def test_a_read_only_disk_is_an_error_that_names_the_path(attempts: list[dict[str, Any]]) -> None:
    (attempt,) = of_case(attempts, "read-only")
    assert "[Errno 30] Read-only file system: '" in attempt["error"]
    assert "checkpoints/step-000004'" in attempt["error"]
    assert (attempt["latest"], attempt["problems"]) == (3, [])


def test_logs_name_their_file_and_the_old_status_stays(attempts: list[dict[str, Any]]) -> None:
    (attempt,) = of_case(attempts, "logs")
    lines, status = attempt["errors"]
    assert "metrics.jsonl" in lines
    assert "status.json" in status
    assert attempt["status"] == {"state": "running"}
