"""Where asynchronous training pays: simulated gains over synchronous training, from 8 to 4,096 GPUs.

    python benchmarks/async_scale.py                          the rows of docs/async.md and larger ones, in some minutes
    python benchmarks/async_scale.py --gpus 32 512 --lengths runs/mine --batch 512

Qwen3-30B-A3B on H200s: recipes/qwen3-30b-a3b-4xh200.yaml with other numbers of GPUs, prompts and tokens. All times are
the plan's estimates; nothing is run. Prints a row for each number of GPUs and distribution of lengths.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from fivefold.config.load import load_any_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.planning.recipe_inputs import Changes, recipe_inputs
from fivefold.planning.simulation.lengths import parse_lengths
from fivefold.planning.simulation.look_ahead import AGES, Choice, LookAhead, look_ahead

RECIPE = Path(__file__).parents[1] / "recipes" / "qwen3-30b-a3b-4xh200.yaml"
PER_NODE = 8
SHORT, LONG = "mean=600,max=1024", "mean=6000,max=32768"
ROWS = (
    *((n_gpus, 512, SHORT) for n_gpus in (8, 32, 128, 512)),
    *((n_gpus, 512, LONG) for n_gpus in (8, 32, 128, 512, 4096)),
    (4096, 2048, LONG),
)
"""GPUs, prompts of a step and lengths."""


def main() -> None:
    args = parse_arguments()
    rows = ROWS
    if args.gpus:
        rows = tuple((n_gpus, args.batch, text) for text in args.lengths for n_gpus in args.gpus)
    ages = [f"η={age}" for age in AGES[1:]]
    columns = ("GPUs", "prompts", "response: mean, longest", "synchronous", *ages, "trainer : rollout", "oldest")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for n_gpus, batch, text in rows:
        began = time.perf_counter()
        result = simulated(n_gpus, batch, text, args.gpu)
        print(row(n_gpus, batch, result), flush=True)
        if args.times:
            print(f"    {time.perf_counter() - began:.0f} s, {result.n_splits} splits", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, help="numbers of GPUs; without it, the rows of docs/async.md")
    parser.add_argument("--lengths", nargs="+", default=[LONG], help="as `fivefold plan --lengths` takes them")
    parser.add_argument("--batch", type=int, default=512, help="prompts of a step, each with eight completions")
    parser.add_argument("--gpu", default="h200-141g", help="kind of GPU")
    parser.add_argument("--times", action="store_true", help="print how long each row takes")
    return parser.parse_args()


def simulated(n_gpus: int, batch: int, text: str, gpu: str) -> LookAhead:
    """Simulate the recipe on `n_gpus` GPUs."""
    lengths = parse_lengths(text)
    per_node = min(n_gpus, PER_NODE)
    overrides = [
        "actor.path=Qwen3-30B-A3B",
        f"cluster.n_gpus_per_node={per_node}",
        f"cluster.n_nodes={n_gpus // per_node}",
        f"actor.backend=megatron:d{n_gpus}e4",
        f"rollout.backend=vllm:d{n_gpus}",
        f"train_dataset.batch_size={batch}",
        f"gconfig.max_new_tokens={lengths.longest}",
    ]
    recipe = load_any_recipe(RECIPE, overrides)
    assert isinstance(recipe, TrainRecipe)
    return look_ahead(recipe, recipe_inputs(recipe, gpu, Changes()), lengths)


def row(n_gpus: int, batch: int, result: LookAhead) -> str:
    """Return a row of the table."""
    lengths = f"{result.lengths.mean:,.0f}, {result.lengths.longest:,}"
    if not result.choices:
        return f"| {n_gpus:,} | {batch:,} | {lengths} | does not fit |{' |' * (len(AGES) + 1)}"
    first, *later = result.choices
    best = max(result.choices, key=lambda choice: choice.gain)
    cells = (
        f"{n_gpus:,}",
        f"{batch:,}",
        lengths,
        f"{first.outcome.seconds:,.0f} s ({divided(first)})",
        *(f"{choice.gain:.2f}" for choice in later),
        divided(best),
        str(best.outcome.staleness_max),
    )
    return f"| {' | '.join(cells)} |"


def divided(choice: Choice) -> str:
    """Say how many GPUs train and how many generate."""
    split = choice.split
    return "in turn" if split.setting.shares_devices else f"{split.n_training:,} : {split.n_generating:,}"


if __name__ == "__main__":
    main()
