"""The critic of frameworks that train with PPO and GAE: its section has the keys of an actor's, and so do its rules.

estimator `gae` ──gae──> actor.advantage        critic.optim.lr ──of_critic(the actor's rule)──> critic.optimizer.lr
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fivefold_import import reasons
from fivefold_import.draft import Draft, Role, Rule
from fivefold_import.values import Convert, number

ADVANTAGE = "actor.advantage"
WHITENS = "actor.whiten_advantages"
NOT_NORMALISED = "a critic learns rewards as they are, so they are not normalised; their advantages may be whitened"
PATH = "critic.path"
INFER_BUDGET_KEY = "actor.mb_spec.max_tokens_per_infer_mb"
REFERENCE_BUDGET_KEY = "ref.mb_spec.max_tokens_per_mb"
NOT_TRAINED = reasons.NO_CRITIC


class ForCritic(Draft):
    """A draft for rules of an actor's section: what they map to the actor, it maps to the critic."""

    def __init__(self, draft: Draft) -> None:
        self.__dict__ = draft.__dict__  # it is the same draft, under other names

    def target(self, to: str) -> str:
        """Return the critic's key in place of the actor's."""
        return f"critic.{to.removeprefix('actor.')}" if to.startswith("actor.") else to


def has_critic(draft: Draft) -> bool:
    """Return whether the recipe trains a critic."""
    return draft.recipe.get(ADVANTAGE) == "gae"


def infer_budgets(draft: Draft) -> Iterator[tuple[Role, str, Draft]]:
    """Yield each model that has passes without gradients: its role, the key of their budget, and the draft for both.

    The critic's key is the actor's, as its draft changes it.
    """
    yield "actor", INFER_BUDGET_KEY, draft
    if draft.compares_with_reference:
        yield "ref", REFERENCE_BUDGET_KEY, draft
    if has_critic(draft):
        yield "critic", INFER_BUDGET_KEY, ForCritic(draft)


def gae(draft: Draft, key: str, constants: Mapping[str, str]) -> None:
    """Convert an estimator that needs a critic.

    Args:
        draft: receives the recipe's values and the entries.
        key: the source's key of the estimator.
        constants: the source's keys of gamma and lambda, each with the recipe's.
    """
    draft.sets(key, ADVANTAGE, "gae")
    for source, to in constants.items():
        if draft.get(source) is not None:
            draft.mapped(source, to, draft.read(source, number))


def of_critic(rule: Rule) -> Rule:
    """Return an actor's rule for the same key in a critic's section; without a critic, the key is implied."""

    def of(draft: Draft, source: str) -> None:
        if has_critic(draft):
            rule(ForCritic(draft), source)
        else:
            draft.implied(source, NOT_TRAINED)

    return of


def only_with_critic(key: str, convert: Convert) -> Rule:
    """Map a key that only a critic reads to the recipe's `key`; without a critic, it is implied."""

    def rule(draft: Draft, source: str) -> None:
        if has_critic(draft):
            draft.mapped(source, key, convert(draft.get(source)))
        else:
            draft.implied(source, NOT_TRAINED)

    return rule


def complete(draft: Draft) -> None:
    """Give a critic what its source leaves to the actor's keys: the model, the number format, the updates."""
    if not has_critic(draft):
        return
    recipe = draft.recipe
    recipe.setdefault(PATH, recipe.get("actor.path", "${actor.path}"))
    engine = str(recipe.get("critic.backend", recipe.get("actor.backend", ""))).partition(":")[0]
    recomputes = [f"{name}.recompute" for name in ("megatron", "fsdp") if engine in ("", name)]
    for name in ("dtype", "ppo_epochs", "ppo_n_minibatches", "mb_spec.max_tokens_per_mb", *recomputes):
        if f"actor.{name}" in recipe:
            recipe.setdefault(f"critic.{name}", recipe[f"actor.{name}"])
