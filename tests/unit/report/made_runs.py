"""Folders of runs as training leaves them, of any size."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from fivefold.config.schema.train import TrainRecipe
from fivefold.observe.json_records import write_json
from fivefold.observe.jsonl import JsonLines
from fivefold.observe.run_dir import RunDir
from fivefold.observe.sample_parts import TokenValues
from fivefold.observe.step_log import SampleLog

WORDS = ("so", "the", "sum", "of", "both", "is", "then", "what", "we", "get", "if", "this", "one", "goes", "first")

OLDEST = {1: 2}
"""By how many versions the older half of a sample is older than its step's weights, by the sample's place in it."""


def make_run(
    root: Path, trial: str = "trial-0", *, n_steps: int = 12, n_samples: int = 8, length: int = 12, seed: int = 0
) -> Path:
    """Write the folder of a finished run with `n_samples` samples of `length` tokens at each step; return its path."""
    recipe = TrainRecipe.model_validate(
        {
            "experiment_name": "made",
            "trial_name": trial,
            "seed": seed + 1,
            "cluster": {"fileroot": str(root)},
            "actor": {"path": "package:tiny-moe"},
            "train_dataset": {"path": "package:arithmetic/train", "batch_size": 4},
        }
    )
    folder = RunDir.create(recipe, overwrite=True)
    draw = random.Random(seed)
    with folder:
        folder.write_about(
            {
                "title": f"made / {trial}",
                "steps": n_steps,
                "facts": {"model": "a small one", "warnings": "<b>two</b> devices are not used"},
                "command": f"fivefold train made.yaml trial_name={trial}",
                "versions": {"fivefold": "0.1.0"},
                "machine": {"host": "somewhere", "GPUs": "8 x NVIDIA H200"},
            }
        )
        folder.started()
        pool = [_tokens(length, draw) for _ in range(32)]
        with JsonLines(folder.metrics) as metrics, SampleLog(folder.samples, folder.sample_parts) as samples:
            for step in range(1, n_steps + 1):
                metrics.write({"step": step, **_metrics(step, n_steps, draw)})
                samples.write([_sample(step, place, length, draw) for place in range(n_samples)])
                samples.complete(
                    [_aged(values, step, place) for place, values in enumerate(draw.choices(pool, k=n_samples))]
                )
        folder.write_summary(
            {"accuracy_before": 0.1, "accuracy_after": 0.9, "held_out_prompts": 64, "steps": n_steps, "seconds": 90.0}
        )
    return folder.path


def _metrics(step: int, n_steps: int, draw: random.Random) -> dict[str, float]:
    done = step / n_steps
    values = {
        "reward/mean": done + draw.gauss(0, 0.05),
        "accuracy": done,
        "entropy": math.exp(-3 * done),
        "grad_norm": math.nan if step == 3 else 1 + draw.random(),
        "ppo_kl_k3": 1e-4 * draw.random(),
        "rollout_mismatch": 1e-6 * draw.random(),
        "rollout_mismatch/max": 1e-5,
        "response_length/mean": 10 + 40 * done,
        "response_length/max": 90.0,
        "tokens_per_second": 4000.0,
        "train/tflops_per_device": 400.0,
        "mfu/train": 400 / 989,
        "hfu/train": 500 / 989,
        "peak_memory_gb/max": 61.0,
        **{f"seconds/{phase}": 1 + draw.random() for phase in ("rollout", "rewards", "train", "weight sync")},
        **{f"experts/imbalance/layer_{layer}": 1 + draw.random() for layer in range(4)},
        **{f"extra/{number}": draw.random() for number in range(20)},
        "seconds/step": 6.0,
    }
    if step % 4 == 0:
        values["eval/accuracy"] = done
    return values


def _sample(step: int, place: int, length: int, draw: random.Random) -> dict[str, object]:
    return {
        "step": step,
        "prompt_index": (step + place // 4) % 5,
        "prompt": f"What is {step} + {place // 4}? <script>alert(1)</script>",
        "response": " ".join(draw.choices(WORDS, k=length)),
        "ground_truth": str(step + place // 4),
        "reward": float(place % 2),
        "reward/right": float(place % 2),
        "reward/brief": -0.5,
        "finish_reason": "length" if place == 3 else "stop",
        "n_tokens": length,
        "oldest_weight_version": max(step - 1 - OLDEST.get(place, 0), 0),
        "weight_version": step - 1,
    }


def _tokens(length: int, draw: random.Random) -> TokenValues:
    rollout = np.array([-draw.expovariate(1.0) for _ in range(length)], np.float32)
    gaps = np.array([draw.gauss(0, 0.01) for _ in range(length)], np.float32)
    tokens = [f"{word} " for word in draw.choices(WORDS, k=length)]
    advantages = np.full(length, draw.gauss(0, 1), np.float32)
    return TokenValues(tokens, rollout, rollout + gaps, advantages, np.zeros(length, np.int32))


def _aged(values: TokenValues, step: int, place: int) -> TokenValues:
    """Return the values with the versions of the sample at a place of a step: older weights may begin it."""
    versions = np.full(len(values.tokens), step - 1, np.int32)
    versions[: len(versions) // 2] = max(step - 1 - OLDEST.get(place, 0), 0)
    return replace(values, versions=versions)


def lines_of(path: Path) -> list[dict[str, object]]:
    """Return the records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def set_state(path: Path, state: str) -> None:
    """Change the state in a run's `status.json`."""
    status = json.loads((path / "status.json").read_text())
    write_json(path / "status.json", status | {"state": state})
