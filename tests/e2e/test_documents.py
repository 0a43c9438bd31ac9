"""Every recipe loads, and everything that the README and the docs show does what they say.

The README's commands are run by test_train.py.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import runpy
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from fivefold.algorithms.advantages.compute import Scores
from fivefold.algorithms.build import build_advantage, build_policy_loss
from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.metrics import Metric
from fivefold.batch import Batch
from fivefold.checkpoints.start import FromScratch
from fivefold.cli.main import app
from fivefold.config.load import load_any_recipe, load_recipe
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.rewards import RewardConfig
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.prompts import PromptDataset
from fivefold.data.sampler import Outcome
from fivefold.evaluate import Evaluation
from fivefold.families.read import load_shape
from fivefold.observe.columns import KTO_COLUMNS, PAIR_COLUMNS, SFT_COLUMNS, TRAIN_COLUMNS
from fivefold.observe.console import RunConsole
from fivefold.observe.run_dir import RunDir
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.resolve import resolve_reward, resolve_rewards
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.reward_set import compute_rewards
from fivefold.rewards.static_check import reward_problems
from fivefold.rewards.token_rewards import TokenizedText
from fivefold.roles.actor import Actor
from fivefold.roles.devices import Models
from fivefold.roles.models import MovedBytes
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.trainer_worker import UpdateResult
from fivefold.rules.recipe import check_recipe
from fivefold.run.resume import state_at_start
from fivefold.run.setup import OpenRun
from fivefold.run.stepwise import to_the_end
from fivefold.sft import FineTuning
from fivefold.supervised import run_loop, set_up
from fivefold.types import Prompt
from tests.e2e.conftest import ROOT, Fivefold
from tests.e2e.documents import DOCS, README, blocks, indented_commands, listed_metrics, shell_commands

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES, *sorted(ROOT.glob("benchmarks/*.md"))]
BLOCKS = {
    "agents.md": ["python", *["yaml"] * 6, "python", "yaml", "python", "json", "yaml", "python"],
    "README.md": ["yaml", "", "bash"],
    "cluster.md": ["bash", "bash"],  # tests/nodes
    "extending.md": ["python", "python", "python"],
    "first-experiment.md": ["python", "python", "yaml", "bash", "bash"],
    "lora.md": ["yaml", "yaml"],  # tests/unit/rules
    "metrics.md": ["python"],
    "observing.md": ["python"],  # tests/unit/report
    "python.md": ["python"] * 5,  # tests/e2e/test_python_api.py
    "rewards.md": ["python", "yaml", "bash", "python", "python", "yaml", "yaml", "text", *["yaml"] * 5, "python"],
}
"""Languages of the fenced blocks that tests run; the README's one without a language is the output of a run."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_fits_its_model(path: Path) -> None:
    recipe = load_any_recipe(path, [])
    if recipe.actor.path.startswith("package:"):
        check_recipe(recipe, load_shape(ROOT / "fivefold" / "models" / recipe.actor.path.removeprefix("package:")))


FILES = {
    "run_qwen3_moe.sh": "verl_moe_megatron.sh",
    "launch.sh": "siirl_moe.sh",
    "run.yaml": "trinity_ppo_megatron.yaml",
    "train.yaml": "trinity_ppo_megatron.yaml",
    "grpo_moe.yaml": "nemo_rl_moe.yaml",
    "nemo_rl_base.yaml": "nemo_rl_base.yaml",
    "run-moe.sh": "slime_moe.sh",
}
"""Fixtures that stand for the files that the documents name. Their `recipe.yaml` is what an import before it wrote."""


@pytest.mark.parametrize("document", ["coming-from.md", "layouts.md"])
def test_the_commands_of_the_documents_work(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example_recipe: str
) -> None:
    fixtures = ROOT / "tests/unit/fivefold_import/fixtures"
    for name, fixture in FILES.items():
        (tmp_path / name).write_text((fixtures / fixture).read_text())
    (tmp_path / "recipe.yaml").write_text(example_recipe)
    (tmp_path / "gsm8k.yaml").write_text("experiment_name: e\nactor: {path: m}\ntrain_dataset: {path: openai/gsm8k}\n")
    monkeypatch.chdir(tmp_path)
    shown = indented_commands(DOCS / document)
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


def test_the_runs_of_the_documents_have_keys_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example_recipe: str
) -> None:
    """Runs on servers and on several GPUs cannot start here; their recipes are checked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(example_recipe)
    checkpoint = tmp_path / "models" / "Qwen3-30B-A3B-mcore"  # of docs/converting.md
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    kinds = {"train": TrainRecipe, "eval": TrainRecipe, "sft": SFTRecipe, "dpo": DPORecipe, "rm": RMRecipe}
    shown = [words for page in PAGES for _, words in indented_commands(page) if words[0] in kinds]
    assert shown
    for command, path, *overrides in shown:
        file = tmp_path / path if path == "recipe.yaml" else ROOT / path
        recipe: Recipe = load_recipe(file, ["cluster.n_nodes=4", *overrides], kinds[command])
        model = "tiny-vl" if recipe.actor.path == "package:tiny-vl" else "tiny-moe"
        check_recipe(recipe, load_shape(ROOT / "fivefold/models" / model))


# docs/rewards.md


@pytest.fixture
def rewards_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the page's two modules, and the recipes."""
    first, of_groups, of_tokens, second = blocks(DOCS / "rewards.md", "python")
    (tmp_path / "my_rewards.py").write_text(f"{first}\n\n{of_groups}\n\n{of_tokens}")
    (tmp_path / "my_judges.py").write_text(second)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def judged(reward: NamedReward, *responses: str) -> list[float]:
    """Return the rewards of responses to a prompt whose ground truth is 46."""
    return compute_rewards(reward, [Prompt(0, "47+35-36=", (1,), "46")] * len(responses), responses)


@pytest.mark.usefixtures("rewards_folder")
def test_the_reward_of_the_documents_judges_as_they_say() -> None:
    written, *_ = blocks(DOCS / "rewards.md", "yaml")
    reward = resolve_reward(RewardConfig(**yaml.safe_load(written)["reward"]))
    assert judged(reward, "82-36=46", "82-36=45", "no idea") == [1.0, 0.1, 0.0]
    of_groups = resolve_rewards(RewardConfig(fn="my_rewards:brief_and_right"))
    prompts = [Prompt(0, "47+35-36=", (1,), "46")] * 4
    found = of_groups.judge(prompts, ["45", " 46", "46", "no idea"], [4])
    assert [next(iter(each.values())) for each in found] == [0.0, 0.5, 1.0, 0.0]
    of_tokens = resolve_reward(RewardConfig(fn="my_rewards:without_repeats"))
    (reward,) = judged(of_tokens, TokenizedText("46", (7, 8, 7, 7), (2, 3, 4, 5)))
    assert (reward, getattr(reward, "values", None)) == (pytest.approx(0.98), (0.0, 0.0, -0.01, -0.01))
    waiting = resolve_reward(RewardConfig(fn="my_judges.py:judge"))
    assert judged(waiting, "it is 46", "it is 45") == [1.0, 0.0]


def test_the_other_rewards_of_the_documents_are_what_they_say(rewards_folder: Path) -> None:
    with (rewards_folder / "my_rewards.py").open("a") as module:
        module.write("\n\ndef brevity(response, ground_truth, **_):\n    return -len(response)\n")
    _, *written = (yaml.safe_load(block)["reward"] for block in blocks(DOCS / "rewards.md", "yaml"))
    several, of_choice, of_model, hosted, judge, http, code = (RewardConfig.model_validate(keys) for keys in written)
    rewards = resolve_rewards(several)
    prompts = [Prompt(0, "", (1,), "46", "gsm8k"), Prompt(1, "", (1,), {"inputs": [""], "outputs": ["46"]}, "taco")]
    assert rewards.judge(prompts, ["46", "print(46)"]) == [
        {"math": 1.0, "brief": -2.0},
        {"program": 1.0, "brief": -9.0},
    ]
    assert [rewards.scored_by(prompt) for prompt in prompts] == ["math", "program"]
    chosen = [Prompt(0, "", (1,), "B", "quiz")]
    assert resolve_rewards(of_choice).judge(chosen, ["b b b B"]) == [{"quiz": 0.5, "brief": pytest.approx(-0.5)}]
    [boxes] = blocks(DOCS / "rewards.md", "text")
    [found] = resolve_rewards(RewardConfig(fn="detection")).judge(
        [Prompt(0, "", (1,), boxes, "boxes")], [f"A cat.\n{boxes}"]
    )
    assert found == {"detection": 1.0}
    asked: list[str] = []

    class Host:
        def answer(self, question: str, **_: Any) -> str:
            asked.append(question)
            return "A good one. Score: 8"

    of_judge = resolve_rewards(hosted).asking(Host())
    assert of_judge.judge(prompts[:1], ["46"]) == [{"judge": pytest.approx(0.8)}]
    assert asked[0].splitlines()[2:] == ["Reference: 46", "Answer: 46"]
    assert list(reward_problems(judge)) == list(reward_problems(http)) == []
    chat = [Prompt(0, "", (1,), "46", "chat")]
    with_model = resolve_rewards(of_model)
    [functions] = with_model.judge(chat, ["46"])
    assert with_model.complete(chat[0], "46", functions, -3.0) == {"right": 1.0, "liked": -3.0}
    half = Prompt(0, "", (1,), {"inputs": ["1", "2"], "outputs": ["1", "1"]})
    assert compute_rewards(resolve_reward(code), [half], ["```python\nprint(input())\n```"]) == [0.5]


def test_the_reward_of_the_documents_evaluates_the_quickstart(rewards_folder: Path, fivefold: Fivefold) -> None:
    (command,) = shell_commands(DOCS / "rewards.md")
    result = fivefold(*command, "valid_dataset.limit=32", cwd=rewards_folder)
    assert result.returncode == 0, result.stdout + result.stderr
    answer = json.loads(result.stdout)
    # Wrong numbers earn a tenth, and do not count as right.
    assert answer["accuracy"] < answer["reward"] <= answer["accuracy"] + 0.1 * (1 - answer["accuracy"]) + 1e-9


# docs/metrics.md; that the page lists what a run writes is tested with the run in test_train.py


def test_the_files_that_the_page_of_metrics_names_know_each_metric() -> None:
    for name, files in listed_metrics().items():
        word = re.sub("^(critic/)?(seconds|eval|critic|mfu|hfu|peak_memory_gb)/", "", name)
        assert any(name in (text := file.read_text()) or word in text for file in files), name


def test_the_page_of_metrics_lists_the_columns_of_the_screen() -> None:
    page = (DOCS / "metrics.md").read_text()
    rows = dict(re.findall(r"^\| ([\w/]+) \| (.*) \|$", page, flags=re.MULTILINE))
    for column in (*TRAIN_COLUMNS, *SFT_COLUMNS, *PAIR_COLUMNS, *KTO_COLUMNS):
        assert set(column.keys) <= set(re.findall(r"`([^`]+)`", rows[column.label])), column.label


def test_the_page_of_metrics_lists_the_numbers_of_an_evaluation() -> None:
    of_supervised = {"eval/nll", "eval/loss", "eval/margin"}
    shown = {name.removeprefix("eval/") for name in listed_metrics().keys() - of_supervised if name.startswith("eval/")}
    kinds = ("set/<name>", "source/<data_source>")
    parts = {f"{measure}/{kind}": 0.5 for measure in ("accuracy", "reward") for kind in kinds}
    evaluation = Evaluation(0.5, 0.5, 3.0, n_prompts=1, pass_at={"pass_at/<k>": 0.75}, parts=parts)
    assert shown == evaluation.measures.keys()


class FixedTrainer(Actor):
    """Computes the loss of two tokens, and no step."""

    def __init__(self) -> None:
        self.moved = MovedBytes()

    def update(self, batch: RemoteBatch, loss: Any, kl: object = None) -> UpdateResult:
        ones_T = torch.ones(2)
        total, metrics = loss(LossInputs({"logprobs": -ones_T, "entropy": ones_T}, ones_T, (2,), {}))
        others = {"loss": float(total), "grad_norm": 1.0, "lr": 1e-3, "skipped_updates": 0.0}
        return UpdateResult({**metrics, **{name: Metric(value) for name, value in others.items()}}, skipped=False)

    def save(self, folder: Path) -> None: ...

    def device_names(self) -> list[str | None]:
        return [None]


def test_the_page_of_metrics_lists_what_fine_tuning_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+2=", "response": "3"}\n' * 4)
    data = f"train_dataset.path={tmp_path / 'data.jsonl'}"
    short = [
        data,
        "train_dataset.batch_size=2",
        "valid_dataset=null",
        f"cluster.fileroot={tmp_path}",
        "recover.mode=disabled",
    ]
    recipe = load_recipe(ROOT / "recipes/tiny-moe-sft.yaml", short, SFTRecipe)
    setup = set_up(recipe, FineTuning(recipe))
    batch = RemoteBatch(np.array([2]), np.array([1]), ())
    monkeypatch.setattr(RemoteBatch, "of", lambda columns: batch)
    folder = RunDir.create(setup.recipe, overwrite=False)
    run = OpenRun(folder, RunConsole(SFT_COLUMNS, timers := PhaseTimers()), timers, session=None)  # type: ignore[arg-type]
    state, _ = state_at_start(setup.recipe, FromScratch("from scratch"), setup.sampler, setup.ground, setup.total_steps)
    to_the_end(run_loop(setup, Models(FixedTrainer()), run, state, began=0.0))
    written = {name for line in folder.metrics.read_text().splitlines() for name in json.loads(line)} - {"step"}
    section = (DOCS / "metrics.md").read_text().partition("## Fine-tuning")[2]
    # On GPUs, with checkpoints, with held-out examples.
    elsewhere = {"peak_memory_gb/max", "allocator_retries/max", "mfu/train", "hfu/train"}
    elsewhere |= {"seconds/checkpoint", "seconds/checkpoint write", "seconds/evaluation", "eval/nll"}
    assert written | elsewhere == listed_metrics().keys() & set(re.findall(r"`([^`]+)`", section))


# docs/extending.md


def test_the_family_of_the_documents_is_the_file_of_the_package() -> None:
    assert blocks(DOCS / "extending.md", "python")[0] == (ROOT / "fivefold/families/mistral.py").read_text()


@pytest.fixture
def methods_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainRecipe:
    """The recipe of the page's command, with the page's module in the working folder."""
    (tmp_path / "my_methods.py").write_text(blocks(DOCS / "extending.md", "python")[1])
    monkeypatch.chdir(tmp_path)
    return shown_recipe("actor.loss")


def shown_recipe(key: str) -> TrainRecipe:
    """Return the recipe of the command of docs/extending.md that writes a key."""
    commands = [words for _, words in indented_commands(DOCS / "extending.md") if words[0] == "train"]
    ((_, recipe, *overrides),) = [words for words in commands if any(word.startswith(f"{key}=") for word in words)]
    return load_recipe(ROOT / recipe, overrides, TrainRecipe)


def test_the_loss_of_the_documents_is_its_formula_however_it_is_split(methods_recipe: TrainRecipe) -> None:
    loss = pickle.loads(pickle.dumps(build_policy_loss(methods_recipe.actor, methods_recipe.gconfig)))
    logprobs_T = torch.tensor([torch.nan, -1.0, -2.0, -torch.inf, -0.5], requires_grad=True)
    batch = Batch(
        lengths=(3, 2),
        tokens_T=torch.zeros(5, dtype=torch.int64),
        mask_T=torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]),
        fields={
            "advantages": torch.tensor([0.0, 0.5, 0.5, torch.nan, -2.0]),
            "old_logprobs": torch.tensor([0.0, -1.5, -2.0, torch.nan, -0.5]),
        },
    )
    inputs = {"logprobs": logprobs_T, "entropy": torch.zeros(5)}
    whole, metrics = loss(LossInputs(inputs, batch.mask_T, batch.lengths, batch.fields))
    r = math.exp(0.5)
    # The recipe's strength is 0.5, and its eps_clip 0.2.
    assert whole.item() == pytest.approx(-0.5 * r + 0.25 * 0.5**2 - 0.5 + 2.0)
    assert float(metrics["far"].sum) == 1
    whole.backward()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == pytest.approx([0.0, -0.5 * r + 0.25, -0.5, 0.0, 2.0])
    parts = [
        LossInputs({name: value[rows] for name, value in inputs.items()}, part.mask_T, part.lengths, part.fields)
        for part, rows in ((batch.select([0]), slice(3)), (batch.select([1]), slice(3, 5)))
    ]
    assert sum(loss(part)[0].item() for part in parts) == pytest.approx(whole.item())


def test_the_advantage_of_the_documents_is_its_formula(methods_recipe: TrainRecipe) -> None:
    compute = build_advantage(methods_recipe.actor, n_samples=3)
    rewards_N, groups_N = torch.tensor([1.0, 0.0, 0.25, 3.0], dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    assert compute(Scores(rewards_N, groups_N, torch.ones(4).long())).tolist() == [0.75, -0.25, 0.0, 0.0]


def test_the_sampler_of_the_documents_goes_on_to_longer_prompts_when_most_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_samplers.py").write_text(blocks(DOCS / "extending.md", "python")[2])
    monkeypatch.chdir(tmp_path)
    config = shown_recipe("train_dataset.sampler").train_dataset.model_copy(update={"batch_size": 2})
    prompts = tuple(Prompt(i, "", (0,) * length, "") for i, length in enumerate((5, 1, 4, 2, 3, 6)))
    sampler = PromptDataset(prompts, 6, 0).sampler(config, seed=1)
    drawn = []
    for rate in (0.0, 0.6, 0.7, 1.0, 1.0):
        drawn.append([len(prompt.token_ids) for prompt in sampler.next_batch()])
        sampler.told([Outcome(0, (rate,), rate)])
    assert drawn == [[1, 2], [1, 2], [1, 2], [3, 4], [5, 6]]


# The README and the first experiment


def test_the_recipe_of_the_readme_fits_its_gpus(tmp_path: Path) -> None:
    (text,) = blocks(README, "yaml")
    (tmp_path / "recipe.yaml").write_text(text)
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "recipe.yaml")])
    assert result.exit_code == 0, result.output
    assert "It fits." in result.output


def test_the_first_experiment_runs_as_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fivefold: Fivefold
) -> None:
    page = DOCS / "first-experiment.md"
    make_data, reward = blocks(page, "python")
    (recipe,) = blocks(page, "yaml")
    monkeypatch.chdir(tmp_path)
    exec(make_data, {})
    rows = [json.loads(line) for line in Path("train.jsonl").read_text().splitlines()]
    assert len(rows) == 1024
    assert all(str(eval(row["question"].rstrip("="))) == row["answer"] for row in rows)
    Path("sums_reward.py").write_text(reward)
    functions = runpy.run_path("sums_reward.py")
    told = {"data_source": "", "extra_info": {}}
    for response, right, length in (("49-35=14", 1.0, 8.0), ("14", 1.0, 2.0), ("41", 0.0, 2.0), ("", 0.0, 0.0)):
        assert functions["right"](response, "14", **told) == right
        assert functions["length"](response, "14", **told) == length
        assert functions["length"](response, "14", only_right=True, **told) == right * length
    Path("sums.yaml").write_text(recipe)
    for command in shell_commands(page):
        shortened = ["total_train_steps=1"] if command[0] == "train" else []
        if command[0] == "train" and command[2] != "trial_name=free":
            load_recipe(Path("sums.yaml"), command[2:], TrainRecipe)
        else:
            fivefold(*command, *shortened, cwd=tmp_path)


# All documents


def test_every_block_of_the_documents_is_run_by_a_test() -> None:
    shown = {page.name: re.findall(r"^```(\w*)\n.*?^```", page.read_text(), re.S | re.M) for page in [README, *PAGES]}
    assert {name: languages for name, languages in shown.items() if languages} == BLOCKS


def test_the_snippet_of_the_metrics_page_prints_a_line_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"step": 1, "reward/mean": 0.5, "rollout_mismatch": 0.001, "seconds/step": 2.0}
    file = tmp_path / "runs/quickstart/trial-0/metrics.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(DOCS / "metrics.md", "python")
    exec(code, {})
    assert capsys.readouterr().out == "1 0.5 0.001 2.0\n"


def test_the_make_targets_of_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in (README, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"make ([a-z][\w-]*)", document.read_text()):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), (document.name, target)


def test_contributing_shows_the_rooms_and_their_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    drawn, ordered = (
        block for block in re.findall(r"(?:^    .*\n)+", text, re.M) if re.search(r"^ +cli\b", block, re.M)
    )
    rooms = {path.name for path in (ROOT / "fivefold").iterdir() if (path / "__init__.py").exists()}
    assert rooms <= set(re.findall(r"^      (\w+)/ ", drawn, re.M))
    (contract, *_) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [[room.removeprefix("fivefold.") for room in layer.split(" | ")] for layer in contract["layers"]]
    assert [line.strip().split(", ") for line in ordered.splitlines()] == layers


def test_the_index_lists_every_page() -> None:
    links = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text())
    assert sorted(links) == [page.name for page in PAGES if page.name != "index.md"]


def test_the_links_and_the_files_of_the_documents_lead_somewhere() -> None:
    for document in TEXTS:
        text = document.read_text()
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if not link.startswith("http"):
                assert (document.parent / link).exists(), f"{document.name}: {link}"
        for path in re.findall(r"`((?:fivefold|tests|docs|recipes|scripts|benchmarks)/[\w./-]*)`", text):
            assert (ROOT / path).exists(), f"{document.name}: {path}"
