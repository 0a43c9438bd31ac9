"""Wall-clock of asynchronous training against synchronous training, with a long tail of lengths, on the CPU.

    python benchmarks/asynchronous.py
    python benchmarks/asynchronous.py --ages 0 2 --steps 20 --set train_dataset.batch_size=32

One process trains and one generates. The model has the quickstart's shape and random weights, which end a completion
with the same small probability at every token: a few completions are many times longer than most. The learning rate is
so small that the weights stay as they are; so every run samples the same tokens, whatever the age, and does the same
work. Runs of all ages are repeated in turn. Each prints a line of JSON, and the last lines are a table.

The table also has the seconds that the simulation of `fivefold plan --lengths` gives for the lengths of the runs. The
time of a token of n completions is a + b * n, with a and b fitted to the steps of the smallest age, which must be 0. An
update takes as long as in the runs of the age itself, because both sides share the processor.
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

import numpy as np

from fivefold.planning.simulation.lengths import Lengths
from fivefold.planning.simulation.run import OverlappedWeights, Setting, simulate

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
WARM_UP = 4
"""First steps, which are not measured: a look-ahead begins with empty hands."""
N_PROMPTS, N_SAMPLES, SLOTS = 16, 8, 256
KEYS = {
    "actor.backend": "megatron:d1",
    "actor.init_from_scratch": "true",
    "actor.optimizer.lr": "1e-12",
    "actor.ppo_n_minibatches": "2",
    "gconfig.max_new_tokens": "400",
    "gconfig.stop_token_ids": "[3,4,5]",
    "train_dataset.batch_size": str(N_PROMPTS),
    "gconfig.n_samples": str(N_SAMPLES),
    "rollout.max_batch_size": str(SLOTS),
    "stats.n_logged_samples": "all",
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
                print(json.dumps({name: value for name, value in row.items() if name != "steps"}), flush=True)
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
    run = folder / "quickstart" / name
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    lengths = defaultdict(list)
    for sample in samples:
        lengths[sample["step"]].append(sample["n_tokens"])
    return {
        "age": age,
        "seconds_per_step": fmean(step["seconds/step"] for step in steps),
        "seconds_train": fmean(step["seconds/train"] + step["seconds/old log-probs"] for step in steps),
        "seconds_waiting": fmean(step["seconds/rollout"] for step in steps),
        "seconds_weights": fmean(step["seconds/weight sync"] for step in steps),
        "seconds_staging": fmean(step.get("seconds/weight staging", 0.0) for step in steps),
        "seconds_swap": fmean(step.get("seconds/weight swap", 0.0) for step in steps),
        "idle_rollout": fmean(step.get("idle/rollout", 0.0) for step in steps) if age else None,
        "staleness_mean": fmean(step.get("staleness/mean", 0.0) for step in steps),
        "length_mean": fmean(step["response_length/mean"] for step in steps),
        "length_max": max(step["response_length/max"] for step in steps),
        "tokens": sum(step["tokens_per_second"] * step["seconds/step"] for step in steps),
        "steps": [(step["seconds/rollout"], lengths[step["step"]]) for step in steps],
    }


def simulated(age: int, synchronous: list[dict[str, Any]], own: list[dict[str, Any]]) -> float:
    """Return the seconds of a step that the simulation gives.

    Args:
        age: the age.
        synchronous: measured runs of age 0.
        own: measured runs of this age.
    """
    steps = [step for row in synchronous for step in row["steps"]]
    seconds = np.array([seconds for seconds, _ in steps])
    longest, total = np.array([[max(lengths), sum(lengths)] for _, lengths in steps]).T
    (_, each), *_ = np.linalg.lstsq(np.stack([longest, total], axis=1), seconds, rcond=None)
    # Noise gives one of the two a negative share where all steps have about as many tokens.
    each = min(max(each, 0.0), seconds.mean() / total.mean() * 0.99)
    fixed = (seconds.mean() - each * total.mean()) / longest.mean()
    weights, staging, swap = (fmean(row[f"seconds_{part}"] for row in own) for part in ("weights", "staging", "swap"))
    setting = Setting(
        batch_size=N_PROMPTS,
        group_size=N_SAMPLES,
        n_replicas=1,
        slots=SLOTS,
        token_seconds=tuple(fixed + each * n for n in range(SLOTS + 1)),
        train_seconds=fmean(row["seconds_per_step"] - row["seconds_waiting"] for row in own) - weights,
        update_seconds=weights,
        # With a look-ahead, the first of them is the copy alone.
        overlapped=OverlappedWeights(weights, staging, swap),
        max_age=age,
    )
    lengths = Lengths(tuple(length for _, lengths in steps for length in lengths))
    return simulate(setting, lengths, n_steps=64).seconds


def table(rows: list[dict[str, Any]]) -> str:
    """Return a table with the median over the repeats of each age."""
    by_age: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_age[row["age"]].append(row)
    base = median(row["seconds_per_step"] for row in by_age[min(by_age)])
    lines = [
        "| age | s a step | simulated | of which waiting | speed-up | mean staleness |",
        "|---|---|---|---|---|---|",
    ]
    for age, own in sorted(by_age.items()):
        seconds = median(row["seconds_per_step"] for row in own)
        waiting = median(row["seconds_waiting"] for row in own)
        staleness = median(row["staleness_mean"] for row in own)
        guess = simulated(age, by_age[min(by_age)], own)
        cells = (f"{seconds:.2f}", f"{guess:.2f}", f"{waiting:.2f}", f"{base / seconds:.2f}", f"{staleness:.1f}")
        lines.append(f"| {age} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
