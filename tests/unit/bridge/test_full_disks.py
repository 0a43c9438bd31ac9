"""Saving to a disk that is too small, full, or read-only: a real file system, in a namespace of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.bridge import save_on_small_disk

MOUNTED = 'mount -t tmpfs -o size=4m none "$0" && exec "$@"'


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what came of each save: `case: message` lines of the script that runs beside the tests."""
    disk = tmp_path_factory.mktemp("disk")
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNTED, str(disk)]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let its users mount a file system of their own")
    script = [sys.executable, save_on_small_disk.__file__, str(disk)]
    done = subprocess.run([*isolated, *script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(outcomes: dict[str, str]) -> None:
    assert "the model needs 5,000,192 bytes, and " in outcomes["too small"]
    assert "No space" not in outcomes["too small"]


def test_a_disk_that_fills_up_is_an_error_that_names_the_file(outcomes: dict[str, str]) -> None:
    assert "[Errno 28] No space left on device" in outcomes["filled meanwhile"]
    assert "model.safetensors" in outcomes["filled meanwhile"]


def test_a_disk_that_is_read_only_is_an_error_that_names_the_folder(outcomes: dict[str, str]) -> None:
    assert "[Errno 30] Read-only file system" in outcomes["read-only"]
    assert ".model.partial-" in outcomes["read-only"]


@pytest.mark.parametrize("case", ["too small", "filled meanwhile", "read-only"])
def test_the_earlier_model_stays_whole(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[f"after {case}"] == "['model', 'source'], weights of the first save"
