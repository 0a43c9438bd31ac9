"""What router replay changes where the rollout's routers differ from the trainer's: the quickstart with noisy routers.

    python benchmarks/router_noise.py --noise 0.3 --steps 48 --seeds 1 2 3

After each update of weights, the rollout adds Gaussian noise to the weights of its routers, with a standard deviation
of `--noise` times their own: it stands for the difference between the kernels of a server in bfloat16 and the
trainer's. Each run is made without replay and with `actor.router_replay=rollout`. Further words are keys of the recipe.
The last lines are JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
SITE = '''
"""Adds noise to the routers of the embedded rollout engine, in the processes of a run."""
import importlib.abc, importlib.util, os, sys

TARGET = "fivefold.rollout.transformers_engine"

def patched(module):
    import torch
    receive, generator = module.receive_weights, torch.Generator().manual_seed(int(os.environ["NOISE_SEED"]))
    def noisy(tensors, weights):
        receive(tensors, weights)
        for name, tensor in tensors.items():
            if name.endswith("mlp.gate.weight"):
                weight = tensor.view()
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(noise * weight.std() * float(os.environ["NOISE"]))
    module.receive_weights = noisy

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (run(module), patched(module))
        return spec

sys.meta_path.insert(0, Finder())
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="router-noise-") as name:
        (Path(name) / "sitecustomize.py").write_text(SITE)
        for seed in args.seeds:
            for replay in ("none", "rollout"):
                print(json.dumps(run(Path(name), args, seed, replay, overrides)), flush=True)


def run(folder: Path, args: argparse.Namespace, seed: int, replay: str, overrides: list[str]) -> dict[str, object]:
    """Train once; return the accuracies and the means of the mismatch."""
    out = folder / f"{seed}-{replay}"
    command = [sys.executable, "-m", "fivefold", "train", str(ROOT / "recipes/quickstart.yaml"), "--quiet"]
    keys = {
        "cluster.fileroot": out,
        "total_train_steps": args.steps,
        "seed": seed,
        "actor.router_replay": replay,
        "recover.mode": "disabled",
    }
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "NOISE": str(args.noise), "NOISE_SEED": str(seed)}
    subprocess.run(
        [*command, *(f"{key}={value}" for key, value in keys.items()), *overrides],
        env=variables,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    [metrics] = out.glob("*/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    held_out = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    return {
        "noise": args.noise,
        "seed": seed,
        "router_replay": replay,
        "keys": overrides,
        "held_out": [round(value, 3) for value in held_out],
        "accuracy_last_8": round(fmean(row["accuracy"] for row in rows[-8:]), 3),
        "rollout_mismatch_kl": round(fmean(row["rollout_mismatch_kl"] for row in rows), 6),
        "replay/differs": round(fmean(row.get("replay/differs", 0.0) for row in rows), 4),
    }


if __name__ == "__main__":
    main()
