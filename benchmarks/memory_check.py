"""Compares the memory and the time that `fivefold plan` estimates with measured ones.

    torchrun --nproc-per-node 1 benchmarks/actor_update.py --layers 8 --recompute full >> runs.jsonl
    torchrun --nproc-per-node 4 benchmarks/actor_update.py --layers 8 --backend megatron:d1p4 >> runs.jsonl
    python benchmarks/memory_check.py runs.jsonl
    python benchmarks/memory_check.py benchmarks/results/actor-update-h200.jsonl

Reads the lines of JSON that `actor_update.py` prints, ignores other lines, and prints a table. The measured memory is
that of the fullest rank, or of rank 0 where a line has no memory by rank; the time is that of the fastest step after
the first. The exit code is 1 if an estimate of the memory is off by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import fileinput
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from actor_update import engine_section

from fivefold.families.read import find_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import find_gpu
from fivefold.layout.parallel import with_stages
from fivefold.layout.parser import parse_backend
from fivefold.planning.groups import from_node_start, ranks_together
from fivefold.planning.model_estimate import trainer_memory
from fivefold.planning.recipe_inputs import engine_work
from fivefold.planning.timing import step_time

COLUMNS = (
    *("GPUs", "model", "layers", "backend", "recompute", "micro-batch"),
    *("GB", "estimate", "off by", "seconds", "estimate", "off by"),
)


def main() -> None:
    args = parse_arguments()
    rows = list(measured(args.files))
    if not rows:
        raise SystemExit("no line of JSON with peak_memory_gb was found; give the output of benchmarks/actor_update.py")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    worst = 0.0
    for row in rows:
        measured_gb, seconds = row["peak_memory_gb"], min(row["seconds"][1:])
        expected_gb, expected_seconds = estimate(row, args.sequence, args.gpu)
        worst = max(worst, abs(expected_gb / measured_gb - 1))
        backend = row["backend"].replace("|", "\\|")
        print(
            f"| {row['gpus']} | {row['model']} | {row['layers']} | `{backend}` | {options(row)} | "
            f"{row['micro_tokens']} | {measured_gb:.1f} | {expected_gb:.1f} | {expected_gb / measured_gb - 1:+.1%} | "
            f"{seconds:.2f} | {expected_seconds:.2f} | {expected_seconds / seconds - 1:+.0%} |"
        )
    print(f"\n{len(rows)} runs; the memory's worst estimate is off by {worst:.1%}")
    raise SystemExit(worst > args.tolerance)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="output of actor_update.py; without files: standard input")
    parser.add_argument("--sequence", type=int, default=4096, help="--sequence of the runs")
    parser.add_argument("--gpu", default="h200-141g", help="GPU of the runs")
    parser.add_argument("--tolerance", type=float, default=0.1, help="largest deviation, as a share of the peak")
    return parser.parse_args()


def measured(files: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the runs in `files`."""
    with fileinput.input(files or ("-",), encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("{") and '"peak_memory_gb": ' in line:
                yield json.loads(line)


def options(row: dict[str, Any]) -> str:
    """Return the recompute mode of a run and its other options, without the sections that they are in."""
    return " ".join([row["recompute"], *(override.rpartition(".")[2] for override in row.get("set", []))])


def estimate(row: dict[str, Any], sequence: int, gpu: str) -> tuple[float, float]:
    """Return the estimated peak of a rank's allocator in a run, in GB (1e9 bytes), and the seconds of a step."""
    config = engine_section(".", row["backend"], row["recompute"], row["micro_tokens"], row.get("set", []))
    parsed, model = parse_backend(row["backend"]), shape(row["model"], row["layers"])
    layout = with_stages(parsed, config.megatron)
    work = replace(engine_work(config, parsed.backend, sequence, row["tokens_per_step"] // sequence), n_fields=1)
    memory = [stage.allocated / 1e9 for stage in trainer_memory(layout, model, work)]
    together = ranks_together(from_node_start(layout, gpus_per_node=8), is_moe=model.is_moe)
    peak = max(memory) if "peak_memory_gb_by_rank" in row else memory[0]
    return peak, step_time(layout, model, work, find_gpu(gpu), together).total


def shape(model: str, n_layers: int) -> ModelShape:
    """Return the shape of the benchmark's model: the first `n_layers` layers of `model`."""
    whole = find_shape(model)
    moe, delta = whole.moe_layers[:n_layers], whole.delta_layers[:n_layers]
    return replace(whole, n_layers=n_layers, moe_layers=moe, delta_layers=delta)


if __name__ == "__main__":
    main()
