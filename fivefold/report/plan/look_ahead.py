"""The table of a simulated look-ahead on a terminal."""

from __future__ import annotations

from dataclasses import astuple, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fivefold.planning.context_groups import ContextGroups
from fivefold.planning.simulation.look_ahead import Choice, LookAhead

COLUMNS = ("η", "GPUs that train", "that generate", "s a step", "gain", "trainer idle", "rollout idle", "age", "oldest")


def print_look_ahead(console: Console, result: LookAhead) -> None:
    """Print the best division of the GPUs for each age, and its gain."""
    lengths = result.lengths
    console.print()
    console.print(Text("Asynchronous training, simulated with estimated times", style="bold"))
    console.print(f"responses of {lengths.mean:,.0f} tokens on average, {lengths.longest:,} at most")
    if lengths.turns > 1:
        console.print(f"in {lengths.turns:.3g} turns on average, with {lengths.read:,.0f} tokens to read between two")
    if result.context is not None:
        console.print(_context_groups(result.context), soft_wrap=True)
    if not result.choices:
        console.print(Text("No division of the GPUs between actor and rollout fits.", style="bold red"))
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for choice in result.choices:
        table.add_row(*row(choice))
    console.print(table)
    best = max(result.choices, key=lambda choice: choice.gain)
    console.print(f"\nη={best.max_age}: {keys(best)}; {_times(best)}", soft_wrap=True)
    console.print(
        Text(
            "η is rollout.max_head_offpolicyness; the gain is over the fastest synchronous split. Decoding, updates "
            "and new weights are estimates, so compare with a run before you rely on small gains (docs/async.md).",
            style="dim",
        )
    )


def _context_groups(context: ContextGroups) -> str:
    ranks = ", ".join(f"{share:.0%} on {size}" for size, share in context.shares.items())
    return (
        f"Sequences on as few ranks of cp as hold them ({ranks} of the tokens) would lower the exchange of keys from "
        f"{context.exchanging:.2f} to {context.left:.2f} s of an update's {context.step:.1f} s, at most "
        f"{context.gain:.2f} times as fast. Fivefold splits every sequence over all ranks of cp."
    )


def row(choice: Choice) -> tuple[str, ...]:
    """Return the table cells of one age."""
    split, outcome = choice.split, choice.outcome
    shares = split.setting.shares_devices
    return (
        str(choice.max_age),
        str(split.n_training),
        "the same" if shares else str(split.n_generating),
        f"{outcome.seconds:.1f}",
        f"{choice.gain:.2f}",
        f"{outcome.idle_trainer:.0%}",
        f"{outcome.idle_rollout:.0%}",
        f"{outcome.staleness_mean:.1f}",
        str(outcome.staleness_max),
    )


def keys(choice: Choice) -> str:
    """Return the recipe keys for a split and an age."""
    split = choice.split
    return (
        f"rollout.max_head_offpolicyness={choice.max_age} actor.backend='{replace(split.actor, name=None)}' "
        f"rollout.backend={replace(split.rollout, name=None)} "
        f"rollout.colocate={str(split.setting.shares_devices).lower()}"
    )


def _times(choice: Choice) -> str:
    setting, overlapped = choice.split.setting, choice.overlapped
    full = setting.token_seconds[-1]
    weights = f"{setting.update_seconds:.1f} s"
    if overlapped is not None:
        weights = (
            f"{sum(astuple(overlapped)):.1f} s ({overlapped.copy_seconds:.1f} s of it the trainer waits, and "
            f"{overlapped.swap_seconds:.1f} s the replicas)"
        )
    return (
        f"an update takes {setting.train_seconds:.1f} s and new weights {weights}, and a replica "
        f"decodes {setting.slots / full:,.0f} tokens/s with {setting.slots} sequences"
    )
