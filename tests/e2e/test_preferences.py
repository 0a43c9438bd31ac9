"""DPO, KTO and reward models from the command line: evaluation, metrics, saved models, and runs that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from fivefold.cli.main import app
from tests.e2e.conftest import ROOT, Fivefold, cut_back, is_timed
from tests.e2e.documents import as_listed, listed_metrics
from tests.rows import long

N_STEPS = 4
SHORT = (
    f"total_train_steps={N_STEPS}", "train_dataset.batch_size=8", "valid_dataset.limit=16", "recover.freq_steps=1",
    f"recover.max_to_keep={N_STEPS}",
)  # fmt: skip
RUNS = {
    "dpo": ("dpo", "quickstart-dpo.yaml", "actor.backend='megatron:(attn:d1t2|ffn:e2)'"),
    "apart": (
        "dpo",
        "quickstart-dpo.yaml",
        "experiment_name=quickstart-apart",
        "actor.backend='megatron:(attn:d1t2|ffn:e2)'",
        "ref.backend='megatron:(attn:d1t2|ffn:e2)'",
        "ref.offload=true",
    ),
    "kto": ("dpo", "quickstart-dpo.yaml", "experiment_name=quickstart-kto", "actor.loss_type=kto"),
    "orpo": ("dpo", "quickstart-dpo.yaml", "experiment_name=quickstart-orpo", "actor.loss_type=orpo"),
    "rm": ("rm", "quickstart-rm.yaml", "actor.backend=megatron:d2", "actor.center_rewards_coefficient=0.01"),
}
"""Command, recipe and further keys of each run."""


class Runs:
    """Runs that start when a test first asks for them."""

    def __init__(self, fivefold: Fivefold, root: Path) -> None:
        self._fivefold, self._root = fivefold, root
        self._done: set[str] = set()

    def run(self, name: str) -> str:
        """Run the command of `name`; return its output."""
        command, recipe, *keys = RUNS[name]
        path = str(ROOT / "recipes" / recipe)
        result = self._fivefold(command, path, *SHORT, *keys, f"cluster.fileroot={self._root}")
        assert result.returncode == 0, result.stderr + result.stdout
        self._done.add(name)
        return result.stdout

    def folder(self, name: str) -> Path:
        """Return the folder of a run that has ended."""
        if name not in self._done:
            self.run(name)
        return self._root / f"quickstart-{name}" / "trial-0"


@pytest.fixture(scope="module")
def runs(fivefold: Fivefold, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(fivefold, tmp_path_factory.mktemp("runs"))


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps, without those that measure time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not is_timed(key)} for line in lines]


@pytest.mark.parametrize("name", ["dpo", "rm", *long("kto", "apart")])
def test_a_run_starts_undecided_and_is_evaluated_at_its_end(runs: Runs, name: str) -> None:
    run = runs.folder(name)
    summary, first = json.loads((run / "summary.json").read_text()), rows(run)[0]
    chance = 0.5 if name == "kto" else torch.log(torch.tensor(2.0)).item()
    assert summary["accuracy_before"] == 0.5
    assert summary["loss_before"] == pytest.approx(chance, abs=1e-6)
    assert (first["accuracy"], first["loss"]) == (0.5, pytest.approx(chance, abs=1e-6))
    assert summary["loss_after"] < summary["loss_before"]
    assert len(rows(run)) == N_STEPS
    assert [row.get("eval/loss") for row in rows(run)] == [*[None] * (N_STEPS - 1), summary["loss_after"]]


@pytest.mark.long
def test_a_reference_in_processes_of_its_own_gives_the_same_bits(runs: Runs) -> None:
    beside, apart = runs.folder("dpo"), runs.folder("apart")
    # Its weights leave the devices while it waits, which the metrics of its run count.
    moved = [key for key in rows(apart)[0] if key.startswith("offload/")]
    assert moved
    assert [{key: row[key] for key in row if key not in moved} for row in rows(apart)] == rows(beside)
    saved = [load_file(run / "weights" / "model.safetensors") for run in (beside, apart)]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert (apart / "logs" / "ref-1.log").exists()
    assert not (beside / "logs" / "ref-0.log").exists()


def test_a_loss_without_a_reference_loads_none_and_is_that_of_the_saved_model(runs: Runs) -> None:
    run = runs.folder("orpo")
    assert not [key for row in rows(run) for key in row if "ref" in key]
    assert "seconds/reference" not in (run / "metrics.jsonl").read_text()
    model = AutoModelForCausalLM.from_pretrained(run / "weights", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "weights")

    def logprobs(prompt: str, answer: str) -> torch.Tensor:
        before, after = (tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, answer))
        ids = torch.tensor([*before, *after, tokenizer.eos_token_id])
        every_TV = model(ids[None]).logits[0, :-1].log_softmax(-1)
        return every_TV.gather(1, ids[1:, None])[len(before) - 1 :, 0].double()

    lines = (ROOT / "fivefold/data/packaged/arithmetic/pairs_test.jsonl").read_text().splitlines()[:16]
    ratios, chosen = [], []
    with torch.no_grad():
        for pair in map(json.loads, lines):
            both = [logprobs(pair["prompt"], pair[key]) for key in ("chosen", "rejected")]
            averages = [logprobs_T.mean() for logprobs_T in both]
            odds = [average.exp() / (1 - average.exp()) for average in averages]
            ratios.append(-0.1 * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))
            chosen.append(both[0])
    nll = -torch.cat(chosen).mean()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["loss_after"] == pytest.approx((torch.stack(ratios).mean() + nll).item(), rel=1e-5)
    assert summary["loss_after"] < summary["loss_before"]


def test_the_page_of_metrics_lists_those_of_preferences(runs: Runs) -> None:
    own = ("dpo", "kto", "orpo", "rm")
    written = {as_listed(name) for run in own for row in rows(runs.folder(run)) for name in row} - {"step"}
    assert written <= listed_metrics().keys()
    assert {"kl", "margin", "reward/chosen", "reward/desirable"} <= written


def test_a_reward_model_scores_as_transformers_does(runs: Runs) -> None:
    weights = runs.folder("rm") / "weights"
    model = AutoModelForSequenceClassification.from_pretrained(weights, dtype=torch.float32).eval()
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(weights)
    lines = (ROOT / "fivefold/data/packaged/arithmetic/pairs_test.jsonl").read_text().splitlines()[:16]
    pairs = [json.loads(line) for line in lines]
    with torch.no_grad():
        chosen, rejected = (
            model(**tokenizer([f"{pair['prompt']}{pair[key]}{tokenizer.eos_token}" for pair in pairs],
                              padding=True, return_tensors="pt")).logits[:, 0]
            for key in ("chosen", "rejected")
        )  # fmt: skip
    summary = json.loads((runs.folder("rm") / "summary.json").read_text())
    assert (chosen - rejected).mean().item() == pytest.approx(summary["margin_after"], abs=1e-5)
    assert summary["margin_after"] > 0


def test_a_checkpoint_of_a_reward_model_is_exported_as_the_run_saves_it(runs: Runs, tmp_path: Path) -> None:
    run, out = runs.folder("rm"), tmp_path / "model"
    result = CliRunner().invoke(app, ["checkpoints", str(run), "--export", str(N_STEPS), "-o", str(out)])
    assert result.exit_code == 0, result.output
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (run / "weights" / name).read_bytes()


def test_an_example_leaves_room_for_the_token_that_follows_it(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "1" * 510, "chosen": "2", "rejected": "3"}))
    keys = [
        f"train_dataset.path={tmp_path / 'pairs.jsonl'}",
        "train_dataset.max_length=600",
        "train_dataset.batch_size=1",
    ]
    result = CliRunner().invoke(
        app, ["rm", str(ROOT / "recipes/quickstart-rm.yaml"), *keys, f"cluster.fileroot={tmp_path}"]
    )
    assert result.exit_code == 2
    assert "the longest example of train_dataset has 512 tokens" in result.stderr
    assert "set train_dataset.max_length=511" in result.stderr


def test_a_run_goes_on_with_the_same_bits(runs: Runs) -> None:
    run = runs.folder("dpo")
    whole = cut_back(run, 2)
    assert "continues after step" in runs.run("dpo")
    assert rows(run) == rows(whole)
    mine, other = (load_file(path / "weights" / "model.safetensors") for path in (run, whole))
    assert mine.keys() == other.keys()
    assert [key for key, tensor in other.items() if not torch.equal(mine[key], tensor)] == []
    before, after = (json.loads((path / "summary.json").read_text()) for path in (whole, run))
    measures = ("accuracy_before", "accuracy_after", "loss_after", "margin_after")
    assert [before[key] for key in measures] == [after[key] for key in measures]
