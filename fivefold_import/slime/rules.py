"""slime's table, and the rules of single flags that take more than a lookup."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold_import import agents, megatron, reasons
from fivefold_import.corrections import bypass
from fivefold_import.draft import Draft, Rule
from fivefold_import.settings import TRACKERS, ask_as_user, min_lr, warmup
from fivefold_import.tables import Table, read_tables
from fivefold_import.values import flag, number, positive, top_k

NONZERO = "check_reward_nonzero_std"
"""The end of the name of the filter that leaves out groups of equal rewards."""
JUDGES = ("math", "deepscaler")
REMOTE = "remote_rm"
"""The rule that asks a service."""
SENT = {"prompt": "prompt", "response": "response", "label": "ground_truth"}
"""What slime sends to it, by the names of the reward `http`."""
"""Judges of mathematics by the final answer."""


def updates_of_run(draft: Draft) -> int | None:
    """Return the optimizer's updates of the whole run; None if its steps are not known."""
    steps = draft.get("num_rollout")
    return steps * draft.recipe.get("actor.ppo_n_minibatches", 1) if isinstance(steps, int) and steps > 0 else None


def least_rate(rate: str) -> Rule:
    """Map the rate at the end of the decay to a share of the key `rate`."""
    return lambda draft, source: min_lr(draft, source, rate)


def _warmup(draft: Draft, source: str) -> None:
    warmup(draft, source, updates_of_run(draft))


def _decay(draft: Draft, source: str) -> None:
    if draft.get("lr_decay_style", "linear") == "constant":
        draft.implied(source, "the learning rate is constant")
    elif draft.get(source) == updates_of_run(draft):
        draft.implied(source, "the rate decays over all steps")
    draft.unsupported(source, "the rate decays over all steps")


# Rollout


def _filter(draft: Draft, source: str) -> None:
    if str(draft.get(source)).endswith(NONZERO):
        draft.mapped(source, "actor.dynamic_sampling", True)
    draft.unsupported(source, "groups of equal rewards are replaced (actor.dynamic_sampling), and no others")


def _server_option(draft: Draft, source: str) -> None:
    """Map an option that slime hands on to SGLang: all of them are one list."""
    if draft.get(source) in (False, None, ""):
        draft.implied(source, "it is switched off")
    draft.mapped(source, "rollout.server_args", draft.recipe.get("rollout.server_args", []))


def server_arguments(draft: Draft, rules: Mapping[str, Rule]) -> None:
    """Collect what slime hands on to SGLang's command line, but for what keys of the recipe say."""
    arguments: list[str] = []
    for key in draft.keys("sglang_*"):
        if key in rules or key.startswith(
            ("sglang_enable_dp_", "sglang_router_", "sglang_log_", "sglang_disaggregation_", "sglang_speculative_")
        ):
            continue
        value, name = draft.get(key), "--" + key.removeprefix("sglang_").replace("_", "-")
        if value is True:
            arguments.append(name)
        elif isinstance(value, list):
            arguments += [name, *map(_text, value)]
        elif value not in (None, False, ""):
            arguments.append(f"{name}={_text(value)}")
    if arguments:
        draft.recipe["rollout.server_args"] = arguments


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _offload(draft: Draft, source: str) -> None:
    if draft.get(source) is True:
        draft.mapped(source, "actor.offload.params", True, reasons.PLAN_OFFLOADS)
    draft.implied(source, reasons.PLAN_OFFLOADS)


def _colocate(draft: Draft, source: str) -> None:
    draft.mapped(source, "rollout.colocate", flag(draft.get(source)))


def _interval(draft: Draft, source: str) -> None:
    """Map the steps between two updates of the rollout's weights, which only the asynchronous program has."""
    steps = positive(draft.get(source))
    if "rollout.max_head_offpolicyness" in draft.recipe and steps > 1:
        draft.mapped(source, "rollout.sync_freq_steps", steps)
    draft.implied(source, "weights are updated after every step")


# Data and rewards


def _template(draft: Draft, source: str) -> None:
    if draft.get(source) is True:
        if draft.writes("prompt_data"):
            ask_as_user(draft, "slime")
        draft.mapped(source, "train_dataset.apply_chat_template", True)
    else:
        draft.mapped(source, "train_dataset.apply_chat_template", False)


def _template_variables(draft: Draft, source: str) -> None:
    value = draft.get(source)
    if not isinstance(value, dict):
        draft.unsupported(source, f"{value!r} is no mapping of variables")
    draft.mapped(source, "chat_template_kwargs", value)


def _judge(draft: Draft, source: str) -> None:
    """Convert the name of what judges an answer."""
    if draft.get("custom_rm_path") is not None:
        draft.implied(source, "custom_rm_path is in its place")
    name = str(draft.get(source)).removeprefix("boxed_")
    if name == REMOTE:
        draft.recipe["reward.kwargs.fields"] = SENT
        if (score := draft.get("reward_key")) is not None:
            draft.recipe["reward.kwargs.score"] = score
        draft.mapped(source, "reward.fn", "http")
    if name in JUDGES:
        draft.mapped(source, "reward.fn", "math", f"by math-verify, in the place of slime's rule {name}")
    draft.unsupported(source, f"the rule {name!r} is slime's own: write it as reward.fn=file.py:function")


def _service(draft: Draft, source: str) -> None:
    if draft.get("rm_type") != REMOTE:
        draft.implied(source, f"only rm_type={REMOTE} reads this")
    draft.mapped(source, "reward.kwargs.url", draft.get(source))


def _own_reward(draft: Draft, source: str) -> None:
    draft.unsupported(
        source, "it is called with slime's samples: write it as reward.fn=file.py:function (docs/rewards.md)"
    )


def _own_value(draft: Draft, source: str) -> None:
    draft.unsupported(source, reasons.OWN_VALUES)


# Evaluation


def held_out(draft: Draft) -> None:
    """Convert the held-out sets, `name path name path ...`."""
    written = draft.get("eval_prompt_data")
    items = [str(item) for item in written] if isinstance(written, list) else []
    pairs = dict(zip(items[::2], items[1::2], strict=False))
    if len(pairs) == 1:
        draft.recipe["valid_dataset.path"] = next(iter(pairs.values()))
    for name, path in pairs.items() if len(pairs) > 1 else ():
        draft.recipe[f"valid_datasets.{name}.path"] = path
    temperature = draft.read("eval_temperature", number, draft.read("rollout_temperature", number, 1.0))
    if pairs and temperature > 0:
        draft.recipe["evaluator.greedy"] = False
        draft.sets("eval_temperature", "evaluator.temperature", temperature)
        for name, convert in (("top_p", number), ("top_k", top_k)):
            if draft.get(f"eval_{name}") not in (None, draft.get(f"rollout_{name}")):
                draft.sets(f"eval_{name}", f"evaluator.{name}", draft.read(f"eval_{name}", convert))


def _held_out(draft: Draft, source: str) -> None:
    keys = [key for key in draft.recipe if key.startswith("valid_dataset") and key.endswith(".path")]
    if not keys:
        return draft.unsupported(source, "held-out sets are a name and a file each, in turn")
    return draft.mapped(source, keys[0], draft.recipe[keys[0]], f"{len(keys)} sets" if len(keys) > 1 else "")


def _held_out_file(draft: Draft, source: str) -> None:
    draft.unsupported(source, "write the sets of this file as valid_datasets, by name (docs/data.md)")


def _column(name: str) -> Rule:
    """Map a column of the held-out sets, where it is another one than the training set's."""

    def rule(draft: Draft, source: str) -> None:
        for key in [key for key in draft.recipe if key.startswith("valid_dataset") and key.endswith(".path")]:
            draft.sets(source, f"{key.removesuffix('path')}{name}", draft.get(source))
        draft.implied(source, "without held-out prompts, nothing is evaluated")

    return rule


def _late(draft: Draft, source: str) -> None:
    draft.mapped(source, "evaluator.before_training", not flag(draft.get(source)))


# Algorithm and run


def _whitens(draft: Draft, source: str) -> None:
    draft.mapped(source, "actor.whiten_advantages", flag(draft.get(source)))


def _saved_weights(draft: Draft, source: str) -> None:
    steps = draft.get("save_interval")
    if isinstance(steps, int) and steps > 0:
        draft.recipe.setdefault("saver.max_to_keep", None)
        draft.mapped(source, "saver.freq_steps", steps, "weights are saved as often as checkpoints are written")
    draft.implied(source, reasons.LAST_WEIGHTS)


def _first_weights(draft: Draft, source: str) -> None:
    """Report the checkpoint of Megatron-Core from which the run starts: the model's own weights, by its name."""
    model = Path(str(draft.get("hf_checkpoint", ""))).name
    if model and Path(str(draft.get(source))).name.lower().startswith(model.lower()):
        draft.implied(source, "the weights are read from hf_checkpoint's folder, without a conversion")
    draft.unsupported(
        source,
        "by its name, this is another model than hf_checkpoint: convert it (docs/converting.md), and name it in "
        "actor.path or ref.path",
    )


def _whole(draft: Draft, source: str) -> None:
    draft.unsupported(source, reasons.WHOLE_CHECKPOINTS)


def _trackers(draft: Draft, source: str) -> None:
    on = [name for name in TRACKERS if draft.get(f"use_{name}") not in (None, False)]
    if draft.get(source) is False:
        draft.implied(source, "it is switched off")
    draft.mapped(source, "stats.trackers", on)


TABLES: Mapping[str, Table] = read_tables(
    "slime", {**globals(), **vars(agents), "bypass": bypass}, {"megatron": megatron.TABLES}
)
ANY = "*"
"""Megatron-Core's row for every other option, which would be for all flags that slime does not have either."""
RULES = Table({key: row for key, row in TABLES["top"].rows.items() if key != ANY})
