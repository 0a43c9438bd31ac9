"""A private folder is removed by its process or, if that was killed, by the next process of the same user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fivefold.observe.private_folder import PrivateFolder

MAKES_ONE_AND_WAITS = """
import sys
from pathlib import Path
from fivefold.observe.private_folder import PrivateFolder
folder = PrivateFolder.create(Path(sys.argv[1]))
(folder.contents / "file").touch()
folder.contents.chmod(0o777)
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_private_and_the_next_process_removes_it(tmp_path: Path) -> None:
    others = tmp_path / "fivefold-others"
    others.mkdir()
    command = [sys.executable, "-c", MAKES_ONE_AND_WAITS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert path.stat().st_mode & 0o777 == 0o700
        PrivateFolder.create(tmp_path).remove()
        assert (path / "contents/file").exists(), "its process lives"
        process.kill()
        process.wait()
    assert path.exists()
    PrivateFolder.create(tmp_path).remove()
    assert list(tmp_path.iterdir()) == [others]
