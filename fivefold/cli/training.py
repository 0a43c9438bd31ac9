"""`fivefold train`, `sft`, `dpo` and `rm`: the commands that train, which differ in the kind of their recipes."""

from __future__ import annotations

from collections.abc import Callable

import typer

from fivefold.cli.command import (
    FAILED,
    AsJson,
    Overrides,
    OverwriteRun,
    Quiet,
    RecipePath,
    reporting_errors,
    screen_kind,
)
from fivefold.cli.witness import WITNESSED, under_a_witness

TRAINING = {
    "train": """Train a model by reinforcement learning.

    Everything goes to runs/<experiment_name>/<trial_name>/: weights (Hugging Face format), metrics.jsonl, sample
    generations, TensorBoard logs, worker logs and summary.json.

    \b
    Examples:
      fivefold train recipes/quickstart.yaml
      fivefold train recipes/quickstart.yaml trial_name=lr-2e-6 actor.optimizer.lr=2e-6
      fivefold train recipes/quickstart.yaml cluster.n_gpus_per_node=1 actor.backend=megatron:d1
    """,
    "sft": """Train a model on given responses (supervised fine-tuning).

    \b
    Example:
      fivefold sft recipes/tiny-moe-sft.yaml trial_name=seed-2 seed=2
    """,
    "dpo": """Train a model on preferences (DPO, IPO, KTO).

    \b
    Example:
      fivefold dpo recipes/quickstart-dpo.yaml actor.loss_type=ipo trial_name=seed-2 seed=2
    """,
    "rm": """Train a reward model on preferences.

    \b
    Example:
      fivefold rm recipes/quickstart-rm.yaml trial_name=seed-2 seed=2
    """,
}
"""The help of each command, by its name."""


def training_command(name: str) -> Callable[..., None]:
    """Return the function of a command that trains."""

    def command(
        context: typer.Context,
        recipe: RecipePath,
        overrides: Overrides = None,
        overwrite: OverwriteRun = False,
        quiet: Quiet = False,
        as_json: AsJson = False,
    ) -> None:
        finished = under_a_witness(FAILED) if context.obj == WITNESSED else _nothing
        with reporting_errors() as running:
            from fivefold.config.load import load_recipe
            from fivefold.config.problems import COMMANDS

            [schema] = [schema for schema, words in COMMANDS.items() if words == f"fivefold {name}"]
            running.recipe = loaded = load_recipe(recipe, overrides or [], schema)
            from fivefold.api import trainer_of
            from fivefold.run.stepwise import to_the_end

            to_the_end(trainer_of(loaded, overwrite=overwrite, screen=screen_kind(quiet=quiet, as_json=as_json)))
        finished()

    return command


def _nothing() -> None:
    """Report nothing: a command that a test calls has no parent."""
