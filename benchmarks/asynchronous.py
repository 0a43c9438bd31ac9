"""Wall-clock of asynchronous training against synchronous training, with a long tail of lengths, on the CPU.

    python benchmarks/asynchronous.py
    python benchmarks/asynchronous.py --ages 0 2 --steps 20 --set train_dataset.batch_size=32

One process trains and one generates. The model has the quickstart's shape and random weights, which end a completion
with the same small probability at every token: a few completions are many times longer than most. The learning rate is
so small that the weights stay as they are; so every run samples the same tokens, whatever the age, and does the same
work. Runs of all ages are repeated in turn. Each prints a line of JSON, and the last lines are a table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
WARM_UP = 4
"""First steps, which are not measured: a look-ahead begins with empty hands."""
KEYS = {
    "actor.backend": "megatron:d1",
    "actor.init_from_scratch": "true",
    "actor.optimizer.lr": "1e-12",
    "actor.ppo_n_minibatches": "2",
    "gconfig.max_new_tokens": "400",
    "gconfig.stop_token_ids": "[3,4,5]",
    "train_dataset.batch_size": "16",
    "valid_dataset": "null",
    "recover.mode": "disabled",
    "saver.freq_steps": "null",
}


def main() -> None:
    args = parse_arguments()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            for age in args.ages:
                row = measure(age, repeat, Path(folder), args)
                rows.append(row)
                print(json.dumps(row), flush=True)
    print(table(rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ages", nargs="+", type=int, default=[0, 1, 2, 4], help="rollout.max_head_offpolicyness")
    parser.add_argument("--steps", type=int, default=16, help="steps of a run, the first few of which do not count")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the recipe")
    return parser.parse_args()


def measure(age: int, repeat: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run with one age. Returns what its steps took, and how long the completions were."""
    name = f"age-{age}-{repeat}"
    keys = KEYS | {
        "rollout.max_head_offpolicyness": str(age),
        "total_train_steps": str(args.steps),
        "cluster.fileroot": str(folder),
        "trial_name": name,
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "fivefold", "train", str(QUICKSTART), *words, *args.set]
    subprocess.run(command, check=True, capture_output=True)
    lines = (folder / "quickstart" / name / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][WARM_UP:]
    return {
        "age": age,
        "seconds_per_step": fmean(step["seconds/step"] for step in steps),
        "seconds_train": fmean(step["seconds/train"] + step["seconds/old log-probs"] for step in steps),
        "seconds_waiting": fmean(step["seconds/rollout"] for step in steps),
        "idle_rollout": fmean(step.get("idle/rollout", 0.0) for step in steps) if age else None,
        "staleness_mean": fmean(step.get("staleness/mean", 0.0) for step in steps),
        "length_mean": fmean(step["response_length/mean"] for step in steps),
        "length_max": max(step["response_length/max"] for step in steps),
        "tokens": sum(step["tokens_per_second"] * step["seconds/step"] for step in steps),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table with the median over the repeats of each age."""
    by_age: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_age[row["age"]].append(row)
    base = median(row["seconds_per_step"] for row in by_age[min(by_age)])
    lines = ["| age | s a step | of which waiting | speed-up | mean staleness |", "|---|---|---|---|---|"]
    for age, own in sorted(by_age.items()):
        seconds = median(row["seconds_per_step"] for row in own)
        waiting = median(row["seconds_waiting"] for row in own)
        staleness = median(row["staleness_mean"] for row in own)
        lines.append(f"| {age} | {seconds:.2f} | {waiting:.2f} | {base / seconds:.2f} | {staleness:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
