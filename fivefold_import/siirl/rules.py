"""siiRL, key by key: verl's rules, and those of the keys that siiRL adds."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import.draft import Rule
from fivefold_import.rules import off, unsupported
from fivefold_import.verl import rules as verl

NOT_EMBODIED = "models are language models"

RULES: Mapping[str, Rule] = {
    **verl.RULES,
    "dag.enable_perf": off("the seconds of each phase are in every step's metrics"),
    "dag.*": unsupported("the dataflow is fixed: rollout, rewards, advantages, update"),
    "actor_rollout_ref.embodied.*": unsupported(NOT_EMBODIED),
    "algorithm.embodied_sampling.*": unsupported(NOT_EMBODIED),
}
