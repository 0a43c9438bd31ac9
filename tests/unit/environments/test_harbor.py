"""Harbor's task folders: their files, commands of the model in namespaces, and rewards that only tests can write."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.environments.agents.tools import Tools
from fivefold.environments.others.room import check_rooms, run_closed_in
from fivefold.environments.play import Player
from tests.unit.environments.test_agents import TEMPLATE, Policy, task, tokenizer_of
from tests.unit.environments.test_play import played
from tests.unit.environments.test_tools import call

try:
    check_rooms()
    from fivefold.environments.others import harbor
except ValueError as lack:
    pytest.skip(str(lack), allow_module_level=True)

DOCKERFILE = "FROM ubuntu:24.04\n# the words\nWORKDIR /work\nCOPY words.txt \\\n  lists/\n"
TEST = """\
mkdir -p /logs/verifier
if sort lists/words.txt | cmp -s - sorted.txt; then echo 1; else echo 0.25; fi > /logs/verifier/reward.txt
"""


def write_task(folder: Path, dockerfile: str = DOCKERFILE, test: str = TEST) -> Path:
    for name, text in {
        "task.toml": "[verifier]\ntimeout_sec = 20.0\n",
        "instruction.md": "Sort the words.",
        "environment/Dockerfile": dockerfile,
        "environment/words.txt": "b\nc\na\n",
        "tests/test.sh": test,
    }.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def shell_in(folder: Path) -> harbor.Shell:
    shell = harbor.Shell()
    shell.reset({"task": str(folder)})
    return shell


def test_a_model_solves_a_task_by_commands_and_the_tests_reward_it(tmp_path: Path) -> None:
    [row] = harbor.rows(write_task(tmp_path / "sort").parent)
    assert row["prompt"] == [{"role": "user", "content": "Sort the words."}]
    config = EnvironmentConfig(tools="fivefold.environments.others.harbor:Shell", max_length=4000)
    for says, reward in (
        ([call("shell", command="cat lists/*"), call("shell", command="sort lists/words.txt > sorted.txt"), "Yes."], 1),
        (["I did."], 0.25),
    ):
        left, asked = list(says), task(row["prompt"][0]["content"])
        asked = replace(asked, prompt=replace(asked.prompt, extra_info=row["extra_info"]))
        seen: list[str] = []
        policy = Policy(lambda text, left=left, seen=seen: seen.append(text) or left.pop(0))  # type: ignore[misc]
        player = Player(policy, Tools(config, tokenizer_of(TEMPLATE)))
        player.begin(0, [asked])
        [episode] = played(player)[0]
        assert sum(episode.rewards.values()) == reward
        assert "b\nc\na" in seen[-1] or len(says) == 1


def test_commands_see_the_task_and_nothing_else_of_the_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    shell = shell_in(write_task(tmp_path / "sort"))
    assert "s3cret" not in shell.shell(f"cat {secret}; cat /proc/*/environ; ls /home /root; env")
    assert "exit code" in shell.shell("touch /usr/own")
    assert "exit code" in shell.shell("mount -o remount,rw /usr")
    assert "refused" not in (answer := shell.shell("exec 3<> /dev/tcp/127.0.0.1/1"))
    assert "exit code" in answer  # the network is unreachable
    shell.shell("(sleep 1; echo late > late) & echo kept > kept")
    time.sleep(1.5)
    assert shell.shell("ls") == "kept\nlists\n"
    assert len(shell.shell("yes | head -c 1000000")) < 5000


def test_a_command_that_takes_too_long_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harbor, "COMMAND_S", 1.0)
    shell = shell_in(write_task(tmp_path / "sort"))
    assert shell.shell("sleep 60") == "Error: the command took longer than 1 s"


@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "echo 'echo 1 > /logs/verifier/reward.txt; exit' | tee /tmp/.bashrc /tmp/.profile /tmp/.bash_profile",
        "(while true; do echo 1 > /logs/verifier/reward.txt; done) &",
    ],
)
def test_the_model_cannot_write_its_reward(command: str, tmp_path: Path) -> None:
    shell = shell_in(write_task(tmp_path / "sort"))
    shell.shell(command)
    assert shell.reward() == 0.25


def test_rewards_have_names_and_are_read_where_the_tests_ran(tmp_path: Path) -> None:
    named = write_task(tmp_path / "named", test="""echo '{"right": 1, "short": 0.5}' > /logs/verifier/reward.json""")
    assert shell_in(named).reward() == {"right": 1.0, "short": 0.5}
    outside = tmp_path / "outside"
    outside.write_text("7")
    for number, test in enumerate(
        (f"ln -s {outside} /logs/verifier/reward.txt", "echo nan > /logs/verifier/reward.txt", "echo no such file", "[")
    ):
        with pytest.raises(ValueError, match=r"test\.sh wrote no reward"):
            shell_in(write_task(tmp_path / f"odd-{number}", test=test)).reward()


def test_what_needs_a_container_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Dockerfile has RUN, which needs a container: install what the task needs"):
        list(harbor.rows(write_task(tmp_path / "run", "FROM a\nRUN apt-get install x\n").parent))
    with pytest.raises(ValueError, match="copies to /etc/x, which is not in the working folder /app"):
        shell_in(write_task(tmp_path / "far", "COPY words.txt /etc/x\n"))
    (tmp_path / "run" / "instruction.md").unlink()
    with pytest.raises(ValueError, match=r"is no task of Harbor: it lacks instruction\.md"):
        shell_in(tmp_path / "run")
    with pytest.raises(ValueError, match="has no tasks of Harbor"):
        list(harbor.rows(tmp_path, "run"))
    with pytest.raises(ValueError, match="names no task: make the rows"):
        harbor.Shell().reset({})


def test_a_room_says_how_a_command_ended() -> None:
    assert run_closed_in("pwd; echo no >&2; exit 3", {}, "/tmp", 10.0) == (3, "/tmp\nno\n")
