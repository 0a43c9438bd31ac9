"""Held-out accuracy that each algorithm reaches on the quickstart's task, by seed.

    python benchmarks/learning.py                                all algorithms, three seeds, one after another
    python benchmarks/learning.py --algorithms gspo rloo --seeds 1 2 --jobs 2
    python benchmarks/learning.py --jobs 40 --out learning.jsonl  on a machine with many cores

Each run is `fivefold train recipes/quickstart.yaml algorithm=NAME seed=SEED` on the CPU, with the learning rate of the
recipe and, where the recipe writes a key that the algorithm sets, with the algorithm's value. `ppo` and
`vapo` are of recipes/quickstart-ppo.yaml. Each run prints one line of JSON when it ends; the last lines are a table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fivefold.config.algorithms import ALGORITHMS

RECIPES = Path(__file__).parents[1] / "recipes"
WRITTEN = ("actor.eps_clip", "actor.eps_clip_higher")
"""Keys that the quickstart writes and an algorithm may set."""
ALONE = sorted(ALGORITHMS.keys() - {"distill", "chord"})
"""Algorithms that need neither a teacher nor an expert's data."""
FITTED: dict[str, dict[str, Any]] = {
    "gspo": {"actor.eps_clip": 1e-2, "actor.eps_clip_higher": 1.3e-2},
    "vapo": {"actor.gae_length_alpha": 1.0},
}
"""Keys of algorithms whose own values belong to other tasks. GSPO's range of 3e-4 is for updates a hundred times
smaller than the quickstart's, and clips most of the second one of a step. VAPO's 0.05 is for answers of thousands of
tokens: in an answer of fewer than 20, a token gets the value of the next one alone."""


def main() -> None:
    args = parse_arguments()
    runs = [(name, seed) for seed in args.seeds for name in args.algorithms]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(lambda run: train(*run, Path(folder), args), runs))
    print(table(rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=sorted(ALGORITHMS), default=ALONE)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="runs at one time; each has three busy processes")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the recipe")
    parser.add_argument("--limit", type=float, help="seconds after which a run is given up")
    parser.add_argument("--out", type=Path, help="file to which each run's line is added as well")
    return parser.parse_args()


def train(name: str, seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run one algorithm with one seed. Returns its accuracies, or the end of its output if it failed."""
    recipe = RECIPES / ("quickstart-ppo.yaml" if name in ("ppo", "vapo") else "quickstart.yaml")
    keys = {"algorithm": name, "seed": seed, "trial_name": f"{name}-{seed}", "cluster.fileroot": folder}
    keys |= {"recover.mode": "disabled", "stats.trackers": "[]"}
    keys |= {key: value for key, value in ALGORITHMS[name].keys.items() if key in WRITTEN}
    keys |= FITTED.get(name, {})
    overrides = [*(f"{key}={value}" for key, value in keys.items()), *args.set]
    began = time.perf_counter()
    row: dict[str, Any] = {"algorithm": name, "seed": seed}
    command = [sys.executable, "-W", "ignore", "-m", "fivefold", "train", str(recipe), *overrides]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=args.limit, check=False)
    except subprocess.TimeoutExpired:
        row["failed"] = f"no result after {args.limit:.0f} s"
    else:
        summaries = list(folder.glob(f"*/{name}-{seed}/summary.json"))
        if run.returncode == 0 and summaries:
            summary = json.loads(summaries[0].read_text())
            row |= {key: round(summary[key], 4) for key in ("accuracy_before", "accuracy_after")}
        else:
            row["failed"] = (run.stdout + run.stderr)[-1500:]
    row["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(row), flush=True)
    if args.out:
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each algorithm, the best mean first."""
    by_name: dict[str, dict[int, str]] = defaultdict(dict)
    means: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        accuracy = row.get("accuracy_after")
        by_name[row["algorithm"]][row["seed"]] = "failed" if accuracy is None else f"{accuracy:.3f}"
        means[row["algorithm"]].append(accuracy or 0.0)
    seeds = sorted({row["seed"] for row in rows})
    lines = ["| algorithm | " + " | ".join(f"seed {seed}" for seed in seeds) + " |", "|---" * (len(seeds) + 1) + "|"]
    for name in sorted(by_name, key=lambda name: -sum(means[name]) / len(means[name])):
        lines.append(f"| `{name}` | " + " | ".join(by_name[name].get(seed, "") for seed in seeds) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
