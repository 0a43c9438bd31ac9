"""The memory that `fivefold plan` estimates against torch's measured peak.

    torchrun --nproc-per-node 1 benchmarks/actor_update.py --layers 8 --recompute full >> runs.jsonl
    torchrun --nproc-per-node 4 benchmarks/actor_update.py --layers 8 --backend megatron:d1p4 >> runs.jsonl
    python benchmarks/memory_check.py runs.jsonl

Reads the lines of JSON that `actor_update.py` prints (other lines are passed over) and prints a table; rank 0, hence
the first pipeline stage, is what those runs measure. Exit code 1 if an estimate is off by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import fileinput
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fivefold.layout.allocation import parse_backend
from fivefold.layout.memory import training_memory
from fivefold.layout.plan_shape import PlanShape, find_shape
from fivefold.layout.workload import Workload

MODEL = "Qwen3-30B-A3B"


def main() -> None:
    args = parse_arguments()
    rows = list(measured(args.files))
    if not rows:
        raise SystemExit("no line of JSON with peak_memory_gb was found; give the output of benchmarks/actor_update.py")
    print("| gpus | layers | backend | recompute | micro-batch | measured GB | estimate GB | off by |")
    print("|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for row in rows:
        expected = estimate(row, args.sequence, args.chunk)
        deviation = expected / row["peak_memory_gb"] - 1
        worst = max(worst, abs(deviation))
        print(
            f"| {row['gpus']} | {row['layers']} | `{row['backend']}` | {row['recompute']} | {row['micro_tokens']} | "
            f"{row['peak_memory_gb']:.1f} | {expected:.1f} | {deviation:+.1%} |"
        )
    print(f"\n{len(rows)} runs, the worst is off by {worst:.1%}")
    raise SystemExit(worst > args.tolerance)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="output of actor_update.py; none: standard input")
    parser.add_argument("--sequence", type=int, default=4096, help="--sequence of the runs")
    parser.add_argument("--chunk", type=int, default=1024, help="--chunk of the runs")
    parser.add_argument("--tolerance", type=float, default=0.1, help="largest deviation, as a share of the peak")
    return parser.parse_args()


def measured(files: list[str]) -> Iterator[dict[str, Any]]:
    """The runs in `files`."""
    with fileinput.input(files or ("-",), encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("{") and '"peak_memory_gb": ' in line:
                yield json.loads(line)


def estimate(row: dict[str, Any], sequence: int, chunk: int) -> float:
    """Estimated peak of rank 0's allocator in a run, in GB (1e9)."""
    work = Workload(
        sequence_length=sequence,
        sequences=row["tokens_per_step"] // sequence,
        micro_tokens=row["micro_tokens"],
        recompute=row["recompute"],
        logprob_chunk=chunk,
        n_fields=1,
    )
    return training_memory(parse_backend(row["backend"]), shape(row["layers"]), work)[0].allocated / 1e9


def shape(n_layers: int) -> PlanShape:
    """The benchmark's model: that many layers of `MODEL`."""
    return replace(find_shape(MODEL), n_layers=n_layers, moe_layers=(True,) * n_layers)


if __name__ == "__main__":
    main()
