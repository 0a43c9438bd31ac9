"""Every recipe loads, and every command that the README and the docs show does what they say."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.config.load import load_recipe
from fivefold.config.schema import SFTRecipe, TrainRecipe
from fivefold.families.check import check_recipe
from fivefold.families.read import load_shape
from tests.e2e.conftest import ROOT, Fivefold

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
README = ROOT / "README.md"
SHORT = ("total_train_steps=2", "valid_dataset.limit=32")
"""Keys that make a training run of the README short enough for a test."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_fits_its_model(path: Path) -> None:
    keys = yaml.safe_load(path.read_text())
    recipe = load_recipe(path, [], SFTRecipe if "reward" not in keys else TrainRecipe)
    if recipe.actor.path.startswith("package:"):
        check_recipe(recipe, load_shape(ROOT / "fivefold" / "models" / recipe.actor.path.removeprefix("package:")))


def commands(document: Path) -> list[list[str]]:
    """The arguments of each `fivefold ...` line in a document's bash blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", document.read_text(), flags=re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("fivefold ")]


def test_the_commands_of_the_readme_work(fivefold: Fivefold, tmp_path: Path) -> None:
    shown = commands(README)
    assert [command[0] for command in shown] == ["train", "eval", "generate", "plan"]
    here = str(tmp_path)
    train, evaluate, generate, plan = (
        [word.replace("runs/quickstart/trial-0", f"{here}/quickstart/two-stages") for word in command]
        for command in shown
    )
    outputs = []
    for command in (
        [*train, f"cluster.fileroot={here}", *SHORT],
        # An evaluation ignores the actor's layout, so one that could not train here does not matter.
        [*evaluate, "valid_dataset.limit=32", "actor.backend=megatron:d64t3"],
        generate,
        plan,
    ):
        result = fivefold(*command)
        assert result.returncode == 0, (command, result.stdout, result.stderr)
        outputs.append(result.stdout)
    assert "finished in" in outputs[0]
    assert '"accuracy"' in outputs[1]
    assert json.loads(outputs[1])["n_prompts"] == 32
    assert outputs[2].count("47+35-36=") == 4
    assert "actor" in outputs[3]


FILES = {
    "run_qwen3_moe.sh": "verl_moe_megatron.sh",
    "launch.sh": "siirl_moe.sh",
    "run.yaml": "trinity_ppo_megatron.yaml",
    "train.yaml": "trinity_ppo_megatron.yaml",
}
"""Fixtures that stand for the files that the documents name. Their `recipe.yaml` is what an import before it wrote."""


def planning_commands(document: Path) -> list[tuple[dict[str, str], list[str]]]:
    """The environment variables and the arguments of each `fivefold ...` line in a document's indented blocks."""
    text = document.read_text().replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^    ((?:\w+=\w+ )?fivefold .*)$", text, re.M)]
    return [
        (dict(word.split("=") for word in line[: line.index("fivefold")]), line[line.index("fivefold") + 1 :])
        for line in lines
    ]


@pytest.mark.parametrize("document", ["coming-from.md", "layouts.md"])
def test_the_commands_of_the_documents_work(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example_recipe: str
) -> None:
    fixtures = ROOT / "tests/unit/importing/fixtures"
    for name, fixture in FILES.items():
        (tmp_path / name).write_text((fixtures / fixture).read_text())
    (tmp_path / "recipe.yaml").write_text(example_recipe)
    (tmp_path / "gsm8k.yaml").write_text("experiment_name: e\nactor: {path: m}\ntrain_dataset: {path: openai/gsm8k}\n")
    monkeypatch.chdir(tmp_path)
    shown = planning_commands(ROOT / "docs" / document)
    assert len(shown) >= 4
    for environment, command in shown:
        with monkeypatch.context() as changed:
            for name, value in environment.items():
                changed.setenv(name, value)
            if command[0] == "import":
                Path("recipe.yaml").unlink(missing_ok=True)
            model = ["actor.path=Qwen3-30B-A3B"] if command[:2] == ["plan", "recipe.yaml"] else []
            result = CliRunner().invoke(app, [*command, *model])
        # Exit code 1 says that the plan does not fit.
        assert result.exit_code in (0, 1), (command, result.output)
        assert "Traceback" not in result.output
        assert result.exception is None or isinstance(result.exception, SystemExit), command


@pytest.fixture
def example_recipe() -> str:
    return (ROOT / "recipes/quickstart-5d.yaml").read_text().replace("n_gpus_per_node: 0", "n_gpus_per_node: 8")


def test_the_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z][\w-]*)", README.read_text()):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_the_links_of_the_documents_lead_somewhere() -> None:
    for document in [README, ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not link.startswith("http"):
                assert (document.parent / link).exists(), f"{document.name}: {link}"
