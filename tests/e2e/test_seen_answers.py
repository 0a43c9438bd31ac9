"""Fine-tuning, DPO and reward models on answers to prompts with images, against transformers' whole model."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.e2e.conftest import ROOT, Fivefold
from tests.rows import long

MODEL = ROOT / "fivefold" / "models" / "tiny-vl"
PACKAGED = ROOT / "fivefold" / "data" / "packaged" / "squares"
N_HELD_OUT, BETA = 8, 0.1
RUNS = {
    "sft": {"response_key": "answer"},
    "dpo": {"chosen_key": "answer", "rejected_key": "other"},
    "rm": {"chosen_key": "answer", "rejected_key": "other"},
}
"""Columns of each command."""


def data(folder: Path) -> list[dict[str, Any]]:
    """Write pairs of a right and a wrong colour, some of which ask about two images; return the held-out rows."""
    rows = pq.read_table(PACKAGED / "train.parquet").to_pylist()[:40]
    made = []
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        both = len(made) % 3 == 0
        prompt = [{"role": "user", "content": "<image> what <image> colour" if both else "<image> what colour"}]
        images = [*row["images"], *(other["images"] if both else [])]
        made.append({"images": images, "prompt": prompt, "answer": row["answer"], "other": "square"})
    pq.write_table(pa.Table.from_pylist(made[N_HELD_OUT:]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(made[:N_HELD_OUT]), folder / "test.parquet")
    return made[:N_HELD_OUT]


def run(fivefold: Fivefold, folder: Path, command: str, *keys: str) -> Path:
    """Run a command for three steps; return the run's folder."""
    rows = {"image_key": "images", "max_length": 96, **RUNS[command]}
    recipe = {
        "experiment_name": command,
        "total_train_steps": 3,
        "cluster": {"n_gpus_per_node": 0, "fileroot": str(folder / "runs")},
        "actor": {
            "path": "package:tiny-vl",
            "backend": "megatron:d1t2",
            "dtype": "float32",
            "optimizer": {"lr": 1e-3, "warmup_steps_proportion": 0.0},
        },
        "train_dataset": {"path": str(folder / "train.parquet"), "batch_size": 8, **rows},
        "valid_dataset": {"path": str(folder / "test.parquet"), **rows},
    }
    (folder / f"{command}.yaml").write_text(yaml.safe_dump(recipe))
    result = fivefold(command, str(folder / f"{command}.yaml"), *keys)
    assert result.returncode == 0, result.stderr + result.stdout
    return folder / "runs" / command / "trial-0"


@cache
def whole_model(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logprob(folder: Path, row: dict[str, Any], answer: str) -> tuple[float, int]:
    """Return the log-prob of an answer and its end token, and their number, of a whole model in a folder."""
    model = whole_model(folder)
    words, processor = AutoTokenizer.from_pretrained(folder), Qwen2VLImageProcessorPil.from_pretrained(folder)
    pictures = [Image.open(io.BytesIO(image["bytes"])).convert("RGB") for image in row["images"]]
    made = processor.preprocess(pictures, return_tensors="pt")
    content = row["prompt"][0]["content"]
    for grid in made["image_grid_thw"]:
        tokens = "<|image_pad|>" * (int(grid.prod()) // processor.merge_size**2)
        content = content.replace("<image>", f"<|vision_start|>{tokens}<|vision_end|>", 1)
    chat = [{**row["prompt"][0], "content": content}]
    text = words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt, answered = words(text).input_ids, [*words(answer).input_ids, words.eos_token_id]
    ids = torch.tensor([[*prompt, *answered]])
    seen = {"mm_token_type_ids": (ids == model.config.image_token_id).int(), **made}
    logits = model(input_ids=ids, **seen).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answered)[:, None]).sum().item(), len(answered)


def test_the_likelihood_of_answers_is_the_whole_models(fivefold: Fivefold, tmp_path: Path) -> None:
    held_out = data(tmp_path)
    folder = run(fivefold, tmp_path, "sft")
    summary = json.loads((folder / "summary.json").read_text())
    losses = []
    for weights in (MODEL, folder / "weights"):
        found = [logprob(weights, row, row["answer"]) for row in held_out]
        losses.append(-sum(value for value, _ in found) / sum(n for _, n in found))
    assert summary["nll_before"] == pytest.approx(losses[0], rel=1e-4)
    assert summary["nll_after"] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1] < losses[0]


def test_preferences_are_compared_by_the_whole_models_likelihoods(fivefold: Fivefold, tmp_path: Path) -> None:
    held_out = data(tmp_path)
    folder = run(fivefold, tmp_path, "dpo")
    margins = []
    for row in held_out:
        gains = [
            logprob(folder / "weights", row, row[key])[0] - logprob(MODEL, row, row[key])[0]
            for key in ("answer", "other")
        ]
        margins.append(BETA * (gains[0] - gains[1]))
    loss = -torch.nn.functional.logsigmoid(torch.tensor(margins)).mean().item()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["margin_after"] == pytest.approx(sum(margins) / len(margins), rel=1e-3)
    assert summary["loss_after"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("command", long("rm"))
def test_a_reward_model_learns_from_answers_to_images(fivefold: Fivefold, tmp_path: Path, command: str) -> None:
    data(tmp_path)
    folder = run(fivefold, tmp_path, command, "actor.backend=fsdp:d1")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["grad_norm"] > 0 for line in lines)
