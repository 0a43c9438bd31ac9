"""What holds for every command: recipes and options handed over, messages, exit codes, quick help."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fivefold import __version__
from fivefold.cli.main import app
from fivefold.cluster.errors import Member, WorkerError
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.observe.run_dir import RunDir

RECIPE = """
experiment_name: e
actor: {path: nowhere}
train_dataset: {path: nowhere}
"""

Loop = Callable[..., object]


def invoke(*args: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, list(args), input=text)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("actor.loss_kwargs={rign: 1}", "actor.loss_kwargs.rign=1: there is no such option"),
        ("actor.advantage_kwargs={rign: 1}", "actor.advantage_kwargs.rign=1"),
        ("actor.advantage=nowhere.py:own", "nowhere.py"),
    ],
)
def test_a_plan_refuses_a_loss_and_an_advantage_as_the_training_does(word: str, message: str) -> None:
    from fivefold.config.load import load_recipe
    from fivefold.train_setup import set_up

    path = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        set_up(load_recipe(path, [word], TrainRecipe))
    planned = invoke("plan", str(path), word)
    assert planned.exit_code == 2
    assert " ".join(str(refused.value).split()) in " ".join(planned.output.split())


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{RECIPE}cluster: {{fileroot: {tmp_path}/runs}}\n")
    return str(path)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Loop], None]:
    """`loop(name, function)` puts a fake where the command line looks for `fivefold.<name>.<name>`."""

    def install(name: str, function: Loop) -> None:
        module = types.ModuleType(f"fivefold.{name}")
        setattr(module, name, function)
        monkeypatch.setitem(sys.modules, f"fivefold.{name}", module)

    return install


def test_train_hands_over_the_recipe_with_its_overrides(recipe: str, loop: Callable[[str, Loop], None]) -> None:
    seen: dict[str, object] = {}
    loop("train", lambda recipe, *, overwrite, screen: seen.update(recipe=recipe, overwrite=overwrite) or iter(()))
    result = invoke("train", recipe, "actor.optimizer.lr=2e-6", "trial_name=t", "--overwrite")
    assert result.exit_code == 0, result.output
    got = seen["recipe"]
    assert isinstance(got, TrainRecipe)
    assert got.actor.optimizer.lr == 2e-6
    assert got.trial_name == "t"
    assert seen["overwrite"] is True


def test_the_other_commands_hand_over_their_recipes(recipe: str, loop: Callable[[str, Loop], None]) -> None:
    seen: list[object] = []
    for name, kind in (("sft", SFTRecipe), ("dpo", DPORecipe), ("rm", RMRecipe)):
        loop(name, lambda recipe, *, overwrite, screen: seen.append((type(recipe), overwrite)) or iter(()))
        assert invoke(name, recipe).exit_code == 0
        assert seen.pop() == (kind, False)

    loop("evaluate", lambda recipe, *, model, samples, status: {"samples": str(samples), "model": model})
    result = invoke("eval", recipe, "--model", "elsewhere", "--samples", "a.jsonl")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"samples": "a.jsonl", "model": "elsewhere"}


def test_a_wrong_recipe_is_exit_code_2_and_one_message(recipe: str) -> None:
    result = invoke("train", recipe, "actor.optimizer.learning_rate=1", "gconfig.temperature=-1")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr
    assert "actor.optimizer.learning_rate" in result.stderr
    assert "gconfig.temperature" in result.stderr
    assert invoke("train", "no-such.yaml").exit_code == 2
    assert invoke("trian").exit_code == 2


def test_a_value_error_of_the_setup_is_exit_code_2(recipe: str, loop: Callable[[str, Loop], None]) -> None:
    def train(recipe: TrainRecipe, *, overwrite: bool, screen: str) -> None:
        raise ValueError("14 heads cannot be split over 4 ranks")

    loop("train", train)
    result = invoke("train", recipe)
    assert result.exit_code == 2
    assert result.stderr == "Error: 14 heads cannot be split over 4 ranks\n"


def test_a_failed_worker_is_exit_code_1_with_its_traceback_and_log(
    recipe: str, tmp_path: Path, loop: Callable[[str, Loop], None]
) -> None:
    def train(recipe: TrainRecipe, *, overwrite: bool, screen: str) -> None:
        member = Member("actor", 3, "10.0.0.1", tmp_path / "actor-3.log", strategy=None)  # type: ignore[arg-type]
        with RunDir.create(recipe, overwrite=overwrite) as run:
            run.started()
            raise WorkerError(member, "train", "Traceback ...\nValueError: no good")

    loop("train", train)
    result = invoke("train", recipe)
    assert result.exit_code == 1
    for text in ("actor rank 3", "phase 'train'", "10.0.0.1", "ValueError: no good", "actor-3.log"):
        assert text in result.stderr
    assert "fivefold/cli/" not in result.stderr


def test_a_path_that_cannot_be_used_is_exit_code_2_and_one_line(
    recipe: str, tmp_path: Path, loop: Callable[[str, Loop], None]
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "latin-1.txt").write_bytes("é".encode("latin-1"))
    long = tmp_path / ("x" * 300)
    for arguments, message in [
        (("train", str(long)), "it cannot be read (File name too long)"),
        (("train", str(tmp_path)), "it is a folder, not a file"),
        (("train", str(tmp_path / "file" / "recipe.yaml")), "it cannot be read (Not a directory)"),
        (("plan", "--model", str(long), "--gpus", "8"), f"{long}: File name too long"),
        (("plan", "--model", "~no-such-user/m", "--gpus", "8"), "~no-such-user/m: there is no home folder for this"),
        (("data", "additions", "-o", str(tmp_path / "file")), f"{tmp_path}/file/one_digit: Not a directory"),
        (("data", "additions", "-o", "~no-such-user/m"), "~no-such-user/m: there is no home folder for this"),
        (("convert", "~no-such-user/m", "-o", "x"), "~no-such-user/m: there is no home folder for this"),
        (("generate", "--model", "m", "--file", str(tmp_path / "latin-1.txt")), "latin-1.txt is not a text in UTF-8"),
        (("generate", "--model", "m", "--file", str(tmp_path)), "Is a directory"),
        (("generate", "--model", "m", "--prompt", "caf\udce9"), "prompt 1 is not a text in UTF-8: 'caf\\udce9'"),
    ]:
        result = invoke(*arguments)
        assert result.exit_code == 2, (arguments, result.output, result.exception)
        assert message in result.stderr
        assert "Traceback" not in result.stderr

    def train(recipe: TrainRecipe, *, overwrite: bool, screen: str) -> None:
        raise PermissionError(13, "Permission denied", "/etc/weights")

    loop("train", train)
    result = invoke("train", recipe)
    assert result.exit_code == 2
    assert result.stderr == "Error: /etc/weights: Permission denied; name a path that you may use\n"


def test_a_disk_that_is_full_in_the_middle_of_a_run_is_exit_code_1(
    recipe: str, loop: Callable[[str, Loop], None]
) -> None:
    def train(recipe: TrainRecipe, *, overwrite: bool, screen: str) -> None:
        with RunDir.create(recipe, overwrite=overwrite) as run:
            run.started()
            raise OSError(28, "No space left on device", str(run.metrics))

    loop("train", train)
    result = invoke("train", recipe)
    assert result.exit_code == 1
    assert result.stderr.startswith("\nThe run failed: [Errno 28] No space left on device")


def test_numbers_that_would_take_for_ever_are_refused(recipe: str) -> None:
    huge = "10000000000"
    for arguments in [
        ("plan", "--model", "Qwen3-8B", "--gpus", huge),
        ("plan", "--model", "Qwen3-8B", "--gpus", "8", "--gpus-per-node", huge),
        ("plan", "--model", "Qwen3-8B", "--gpus", "8", "--sequence-length", huge),
        ("plan", "--model", "Qwen3-8B", "--gpus", "8", "--sequences", huge),
        ("plan", "--model", "Qwen3-8B", "--gpus", "8", "--micro-tokens", "9" * 5000),
        ("plan", "--model", "Qwen3-8B", "--gpus", "8", "--actor", "megatron:d999999t999999"),
        ("generate", "--model", "m", "--prompt", "x", "--n", huge),
        ("generate", "--model", "m", "--prompt", "x", "--max-new-tokens", huge),
        ("generate", "--model", "m", "--prompt", "x", "--seed", huge),
        ("data", "additions", "-o", "x", "--seed", huge),
        ("plan", recipe, "cluster.n_nodes=32768", "cluster.n_gpus_per_node=256"),
    ]:
        began = time.process_time()
        result = invoke(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert "Traceback" not in result.stderr
        assert time.process_time() - began < 2


def test_a_bug_keeps_its_traceback(recipe: str, loop: Callable[[str, Loop], None]) -> None:
    def train(recipe: TrainRecipe, *, overwrite: bool, screen: str) -> None:
        raise KeyError("a bug")

    loop("train", train)
    result = invoke("train", recipe)
    assert result.exit_code == 1
    assert isinstance(result.exception, KeyError)


def test_an_interrupted_run_says_what_it_saved(recipe: str, loop: Callable[[str, Loop], None]) -> None:
    def train(recipe: TrainRecipe, *, overwrite: bool, screen: str) -> None:
        with RunDir.create(recipe, overwrite=overwrite) as run:
            run.started()
            run.metrics.write_text("{}\n")
            raise KeyboardInterrupt

    loop("train", train)
    result = invoke("train", recipe)
    assert result.exit_code == 130
    assert "Saved in" in result.stderr
    assert "metrics.jsonl" in result.stderr

    def not_begun(recipe: TrainRecipe, *, overwrite: bool, screen: str) -> None:
        raise KeyboardInterrupt

    loop("train", not_begun)
    assert invoke("train", recipe, "trial_name=other").stderr == "Nothing was saved.\n"


def test_the_version_is_printed() -> None:
    assert invoke("--version").stdout == f"fivefold {__version__}\n"


def test_every_command_has_an_example_and_its_exit_codes_in_its_help() -> None:
    listed = invoke("--help").stdout
    for command in ("train", "sft", "eval", "generate", "play", "plan", "import", "convert", "checkpoints", "doctor"):
        assert f"\n  {command} " in listed
        text = invoke(command, "--help").stdout
        assert "Example" in text
        assert "130  it was interrupted" in text
    assert {"arithmetic", "additions", "tools"} <= set(invoke("data", "--help").stdout.split())


def test_no_command_is_cut_short_in_the_list() -> None:
    assert "..." not in invoke("--help").stdout.partition("Commands:")[2]


def test_help_imports_none_of_the_libraries_that_a_run_needs() -> None:
    """`--help` and `--version` are quick; a wrong recipe is reported before torch is imported."""
    code = """
import sys
from typer.testing import CliRunner
from fivefold.cli.main import app

def imported(names, *args):
    CliRunner().invoke(app, args)
    return [name for name in names.split() if name in sys.modules]

heavy = "torch ray transformers megatron"
for args in (["--version"], ["--help"], ["train", "--help"], ["plan", "--help"], ["import", "--help"]):
    print(imported(f"{heavy} pydantic omegaconf yaml psutil fivefold.config.schema.run", *args))
print(imported(heavy, "train", "no-such.yaml"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == [*["[]"] * 6, ""]


def test_generate_refuses_what_the_engine_cannot_do() -> None:
    result = invoke("generate", "--model", "x", "--prompt", "1+1=", "--top-p", "0")
    assert result.exit_code == 2
    assert "top_p" in result.stderr
    assert "Traceback" not in result.stderr
    assert invoke("generate", "--prompt", "1+1=").exit_code == 2
    assert invoke("generate", "--model", "x", "--prompt", "1+1=", "--dtype", "int8").exit_code == 2


def test_generate_reads_prompts_from_options_files_and_standard_input(
    tmp_path: Path, loop: Callable[[str, Loop], None]
) -> None:
    def generate(model: str, prompts: list[str], config: object, **options: object) -> list[list[str]]:
        return [[f"<{prompt}>"] for prompt in prompts]

    loop("generate", generate)
    (tmp_path / "prompts.txt").write_text("a\n\nb c\n")
    result = invoke("generate", "--model", "m", "--prompt", "x", "--file", str(tmp_path / "prompts.txt"), "--json")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"prompt": prompt, "completions": [f"<{prompt}>"]} for prompt in ("x", "a", "b c")
    ]
    assert invoke("generate", "--model", "m", text="1+1=\n").stdout == "1+1=<1+1=>\n"
    assert invoke("generate", "--model", "m", "--file", "-", text="2+2=\n").stdout == "2+2=<2+2=>\n"


def test_an_empty_name_of_a_model_is_no_name(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The path of an empty text is the working folder, which may hold a model.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    prompts = ("--prompt", "x")
    for arguments in (("eval", recipe, "--model", ""), ("play", recipe, "--model", " "), ("generate", "--model", "")):
        result = invoke(*arguments, *(prompts if arguments[0] == "generate" else ()))
        assert result.exit_code == 2, arguments
        assert "there is no such folder" in result.stderr
