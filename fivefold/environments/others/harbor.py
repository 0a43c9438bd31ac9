"""Harbor: folders of tasks for an agent in a shell, which run on this machine, without containers.

    task.toml            time limits
    instruction.md       the prompt
    environment/         files that the agent finds; of its Dockerfile, FROM is ignored, and WORKDIR and COPY are heeded
    tests/test.sh        comes when the agent has finished, and writes /logs/verifier/reward.txt or reward.json

{"prompt": [{"role": "user", "content": "..."}], "extra_info": {"task": "/data/tasks/sort-a-file"}}
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.environments.others.room import TooLate, check_rooms, run_closed_in

check_rooms()

COMMAND_S = 30.0
"""Most seconds of one command of the agent."""
MOST_CHARACTERS = 4000
"""Most characters of a command's output that the model reads."""
_READ = "head -c 65536 reward.json 2> /dev/null || head -c 65536 reward.txt"
_IGNORED = ("FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER")


def rows(path: str | Path, split: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each task of a folder, in the order of their names; it is a `train_dataset.reader`.

    Args:
        path: the folder.
        split: a folder in it to take; None: it has the tasks itself.

    Raises:
        ValueError: the folder has no task, or one that cannot run without containers.
    """
    whole = Path(path, split or "").expanduser()
    folders = sorted(file.parent for file in whole.glob("*/task.toml"))
    if not folders:
        raise ValueError(f"{str(whole)!r} has no tasks of Harbor: it needs folders with a task.toml")
    for folder in folders:
        _setting(folder)
        yield {
            "data_source": f"harbor/{folder.name}",
            "prompt": [{"role": "user", "content": (folder / "instruction.md").read_text()}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"task": str(folder.resolve())},
        }


class Shell:
    """Gives the model a shell in the task's files, and runs the task's tests in the end.

    Each command is a new shell without network: files stay, programs and variables do not. The tests see what the
    agent has left in its working folder, and nothing else of it.
    """

    def reset(self, extra_info: Mapping[str, Any]) -> None:
        """Copy the task's files.

        Raises:
            ValueError: the row names no task, or one that cannot run without containers.
        """
        if not isinstance(extra_info.get("task"), str):
            raise ValueError(f"extra_info={dict(extra_info)!r} names no task: make the rows with harbor.rows")
        self._task = Path(extra_info["task"])
        self._held = tempfile.TemporaryDirectory(prefix="harbor-")
        self._work, copies = _setting(self._task)
        self._folders = {self._work: self._made("work"), "/tmp": self._made("tmp")}
        for source, place in copies:
            target = self._folders[self._work] / place
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("Dockerfile"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)

    def shell(self, command: str) -> str:
        """Run a command in bash and return what it prints.

        Args:
            command: the command, such as `ls -l`
        """
        try:
            code, text = run_closed_in(command, self._folders, self._work, COMMAND_S)
        except TooLate as late:
            return f"Error: {late}"
        if len(text) > MOST_CHARACTERS:
            text = f"{text[:MOST_CHARACTERS]}\n... and {len(text) - MOST_CHARACTERS:,} characters more"
        return text if code == 0 else f"{text}\n(exit code {code})"

    def reward(self) -> float | dict[str, float]:
        """Run the tests, and return what they have written.

        Raises:
            ValueError: they wrote no reward.
        """
        config = tomllib.loads((self._task / "task.toml").read_text())
        tests, logs = self._made("tests"), self._made("logs")
        shutil.copytree(self._task / "tests", tests, dirs_exist_ok=True)
        (logs / "verifier").mkdir()
        # Programs read settings in their home: the agent's /tmp is not there.
        folders = {self._work: self._folders[self._work], "/tests": tests, "/logs": logs, "/tmp": self._made("fresh")}
        limit_s = float(config.get("verifier", {}).get("timeout_sec", 600.0))
        try:
            _, output = run_closed_in("bash /tests/test.sh", folders, self._work, limit_s)
            # There as well: a link in their place names no file of this machine.
            _, found = run_closed_in(_READ, {"/logs": logs}, "/logs/verifier", COMMAND_S)
        except TooLate as late:
            output, found = str(late), ""
        return _reward_of(found, f"{self._task}/tests/test.sh", output)

    def _made(self, name: str) -> Path:
        folder = Path(self._held.name, name)
        folder.mkdir()
        return folder


def _reward_of(found: str, tests: str, output: str) -> float | dict[str, float]:
    """Return the reward in a file that tests wrote: a number, or an object with numbers by name."""
    try:
        value = json.loads(found)
        reward = {name: float(each) for name, each in value.items()} if isinstance(value, dict) else float(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        reward = {}
    numbers = [*reward.values()] if isinstance(reward, dict) else [reward]
    if not numbers or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{tests} wrote no reward, or no finite number, to /logs/verifier: {output[-500:]}")
    return reward


def _setting(task: Path) -> tuple[str, list[tuple[Path, Path]]]:
    """Return the working folder of a task, and what is copied there: files, and their places in it.

    Raises:
        ValueError: a file of the task is missing, or its Dockerfile has an instruction that needs containers.
    """
    context = task / "environment"
    for needed in (task / "instruction.md", task / "tests" / "test.sh", context):
        if not needed.exists():
            raise ValueError(f"{str(task)!r} is no task of Harbor: it lacks {needed.relative_to(task)}")
    file, work, copies = context / "Dockerfile", Path("/app"), list[tuple[Path, Path]]()
    text = file.read_text() if file.exists() else "COPY . ."
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "WORKDIR":
            work = work / rest.strip()
        elif word.upper() == "COPY" and not rest.lstrip().startswith(("--", "[")):
            *patterns, place = shlex.split(rest)
            sources = [source for each in patterns for source in ([context] if each == "." else context.glob(each))]
            is_folder = place.endswith(("/", ".")) or len(sources) > 1
            for source in sources:
                copies.append((source, work / place / (source.name if is_folder and source.is_file() else "")))
        elif word and not word.startswith("#") and word.upper() not in _IGNORED:
            raise ValueError(
                f"{file} has {word}, which needs a container: install what the task needs on this machine, and leave "
                "only FROM, WORKDIR and COPY in a copy of it"
            )
    if strays := [place for _, place in copies if not place.is_relative_to(work)]:
        raise ValueError(f"{file} copies to {strays[0]}, which is not in the working folder {work}: copy to that alone")
    return str(work), [(source, place.relative_to(work)) for source, place in copies]
