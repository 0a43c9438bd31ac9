"""Held-out accuracy of asynchronous and of synchronous training by seed, and the wall-clock until one is reached.

    python benchmarks/asynchronous_learning.py
    python benchmarks/asynchronous_learning.py --ages 0 1 2 --seeds 1 2 --accuracy 0.9 --set total_train_steps=48

Runs of recipes/quickstart-async.yaml on the CPU, whose completions have an artificially long tail: one of `--rare` is
handed over only after a further delay, which is exponential with a mean of `--delay` seconds and follows from the seed
of its request. Delays take no processor time, as if these completions were decoded elsewhere, and every run of a seed
has the same ones, whatever its age. Evaluations have none.

Runs of all ages take turns for each seed. Each prints a line of JSON; the last lines are a table. Seconds are those of
wall-clock from the beginning of the first step on, evaluations included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from fivefold import Run
from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.roles import launch
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.replica import ReplicaSpec
from fivefold.types import Completion

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart-async.yaml"
KEYS = {
    "total_train_steps": "40",
    "evaluator.freq_steps": "4",
    "recover.mode": "disabled",
    "saver.freq_steps": "null",
    "stats.trackers": "[]",
}


def main() -> None:
    args = parse_arguments()
    if args.run:
        run(args.run, args.rare, args.delay)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for age in args.ages:
                rows.append(measure(age, seed, Path(folder), args))
                print(json.dumps(rows[-1]), flush=True)
    print(table(rows, args.accuracy))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ages", nargs="+", type=int, default=[0, 2], help="rollout.max_head_offpolicyness")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rare", type=int, default=64, help="one of so many completions is delayed")
    parser.add_argument("--delay", type=float, default=2.0, help="seconds in the mean")
    parser.add_argument("--accuracy", type=float, default=0.85, help="held-out accuracy that is to be reached")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the recipe")
    parser.add_argument("--run", nargs="+", metavar="KEY=VALUE", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(age: int, seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run with one age and one seed, in a process of its own. Returns its accuracies and times."""
    name = f"age-{age}-seed-{seed}"
    keys = KEYS | {
        "rollout.max_head_offpolicyness": str(age),
        "seed": str(seed),
        "cluster.fileroot": str(folder),
        "trial_name": name,
    }
    command = [sys.executable, __file__, "--rare", str(args.rare), "--delay", str(args.delay)]
    words = [*(f"{key}={value}" for key, value in keys.items()), *args.set]
    done = subprocess.run([*command, "--run", *words], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    place = folder / "quickstart-async" / name
    steps = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (place / "logs" / "driver.events").read_text().splitlines()]
    ends = {event["step"]: event["at"] for event in events if "step" in event}
    # The first step's own time begins it; what it saves and evaluates comes behind.
    evaluating = steps[0].get("seconds/evaluation", 0.0)
    began = ends[1] - steps[0]["seconds/step"] - evaluating
    evaluated = [(step["eval/accuracy"], ends[step["step"]] - began) for step in steps if "eval/accuracy" in step]
    reached = [seconds for accuracy, seconds in evaluated if accuracy >= args.accuracy]
    return {
        "age": age,
        "seed": seed,
        "accuracy": evaluated[-1][0],
        "seconds_to_accuracy": round(reached[0], 1) if reached else None,
        "seconds": round(ends[steps[-1]["step"]] - began, 1),
        "seconds_per_step": round(fmean(step["seconds/step"] for step in steps), 2),
        "seconds_train": round(fmean(step["seconds/train"] for step in steps), 2),
        "staleness_mean": round(fmean(step.get("staleness/mean", 0.0) for step in steps), 2),
        "idle_trainer": round(fmean(step.get("idle/trainer", 0.0) for step in steps), 2) if age else None,
    }


def table(rows: Sequence[Mapping[str, Any]], accuracy: float) -> str:
    """Return a table with a row for each age, and the mean over the seeds last in each cell."""
    by_age: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_age[row["age"]].append(row)
    lines = [
        f"| age | held-out accuracy, by seed | mean | s to {accuracy:g}, by seed | mean | s a step | staleness |",
        "|---|---|---|---|---|---|---|",
    ]
    for age, own in sorted(by_age.items()):
        reached = [row["seconds_to_accuracy"] for row in own]
        mean = "" if None in reached else f"{fmean(reached):.0f}"
        cells = (
            ", ".join(f"{row['accuracy']:.3f}" for row in own),
            f"{fmean(row['accuracy'] for row in own):.3f}",
            ", ".join("never" if seconds is None else f"{seconds:.0f}" for seconds in reached),
            mean,
            f"{fmean(row['seconds_per_step'] for row in own):.2f}",
            f"{fmean(row['staleness_mean'] for row in own):.1f}",
        )
        lines.append(f"| {age} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(words: Sequence[str], rare: int, delay: float) -> None:
    """Train the recipe, over replicas some of whose completions are late."""

    class Late(LateWorker):
        def __init__(self, spec: ReplicaSpec) -> None:
            super().__init__(spec, rare, delay)

    vars(launch)["RolloutWorker"] = Late
    Run(load_recipe(RECIPE, list(words), TrainRecipe), screen="table").finish()


class LateWorker(RolloutWorker):
    """A replica that hands some completions over late."""

    def __init__(self, spec: ReplicaSpec, rare: int, delay: float) -> None:
        super().__init__(spec)
        vars(self)["_engine"] = LateEngine(self._engine, rare, delay)


class LateEngine:
    """An engine some of whose completions come late; all else is done by the engine that it wraps."""

    def __init__(self, engine: Any, rare: int, delay: float) -> None:
        self._engine, self._rare, self._delay = engine, rare, delay
        self._delays: dict[int, float] = {}
        """Longest delay of each job of a stream."""
        self._late: dict[int, tuple[float, list[Completion]]] = {}
        """Jobs that are done: when they are handed over, and their completions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def n_running(self) -> int:
        return int(self._engine.n_running) + len(self._late)

    def delay_of(self, request: GenerationRequest) -> float:
        random = Random(request.seed)
        return random.expovariate(1 / self._delay) if random.random() < 1 / self._rare else 0.0

    def submit(self, number: int, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> None:
        is_evaluation = sampling.logprob_share == 0
        self._delays[number] = 0.0 if is_evaluation else max(map(self.delay_of, requests))
        self._engine.submit(number, requests, sampling)

    def collect(self, seconds: float) -> list[tuple[int, list[Completion]]]:
        deadline = time.monotonic() + seconds
        done = self._engine.collect(seconds) if self._engine.n_running else []
        for number, completions in done:
            self._late[number] = time.monotonic() + self._delays.pop(number), completions
        if not done and self._late:
            first = min(due for due, _ in self._late.values())
            time.sleep(max(0.0, min(first, deadline) - time.monotonic()))
        now = time.monotonic()
        due_now = [number for number, (due, _) in self._late.items() if due <= now]
        return [(number, self._late.pop(number)[1]) for number in due_now]


if __name__ == "__main__":
    main()
