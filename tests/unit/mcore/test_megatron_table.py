"""Every field of Megatron-Core's configuration classes is either a key of the recipe or refused with a reason."""

from __future__ import annotations

import json
import runpy
import typing
from dataclasses import replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import ValidationError

from fivefold.config.library_names import REFUSED
from fivefold.config.schema.engine import EngineConfig, OptimizerConfig
from fivefold.config.schema.megatron import (
    MegatronConfig,
    MegatronDDPFields,
    MegatronFields,
    MegatronOptimizerFields,
    MegatronTransformerFields,
)
from fivefold.families.megatron_release import RELEASES, installed_release, release_of
from fivefold.families.read import find_shape
from fivefold.layout.parallel import with_stages
from fivefold.layout.parser import parse_backend
from fivefold.mcore import settings

SECTIONS: dict[str, tuple[type[MegatronFields], type]] = {
    "transformer": (MegatronTransformerFields, TransformerConfig),
    "ddp": (MegatronDDPFields, DistributedDataParallelConfig),
    "optimizer": (MegatronOptimizerFields, MegatronOptimizerConfig),
}
ROOT = Path(__file__).resolve().parents[3]
MOE = "Qwen3-30B-A3B"
LAYOUT = "megatron:(attn:d2p2v2t2|ffn:e4)"


def test_the_section_divides_layers_where_the_layout_does_not() -> None:
    plain, uneven = parse_backend("megatron:p2"), {"num_layers_in_first_pipeline_stage": 3}
    config = MegatronConfig.model_validate({"transformer": uneven})
    divided = with_stages(plain, config)
    assert divided.split.first == 3
    assert with_stages(divided, config) == divided == with_stages(divided, MegatronConfig())
    other = MegatronConfig.model_validate({"transformer": {"num_layers_in_first_pipeline_stage": 2}})
    with pytest.raises(ValueError, match="keep one of them"):
        with_stages(divided, other)


def test_the_table_of_fields_is_that_of_the_installed_megatron_core() -> None:
    module = runpy.run_path(str(ROOT / "scripts/megatron_fields.py"))
    assert module["text"]() == installed_release().fields_file.read_text(), "run: python scripts/megatron_fields.py"


def test_a_release_that_was_never_tried_is_refused() -> None:
    assert release_of("0.19.2") is RELEASES["0.19"]
    with pytest.raises(
        ValueError, match=r"megatron-core 0\.17\.1 is installed, and Fivefold runs on 0\.16 and 0\.19: run"
    ):
        release_of("0.17.1")


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_of_every_release_is_a_key_or_has_a_reason(section: str) -> None:
    keys, config = SECTIONS[section]
    tables = [json.loads(release.fields_file.read_text())[keys.owner] for release in RELEASES.values()]
    taken, refused = set(keys.model_fields) - keys.added, set(REFUSED[keys.owner])
    assert keys.owner == config.__name__
    assert taken | refused == {name for table in tables for name in table}
    assert not taken & refused
    assert all(taken <= table.keys() for table in tables)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_refused_field_says_why(section: str) -> None:
    keys, _ = SECTIONS[section]
    for name, reason in REFUSED[keys.owner].items():
        with pytest.raises(ValidationError) as error:
            keys.model_validate({name: 1})
        assert f"{name} of Megatron-Core's {keys.owner} cannot be set in a recipe: {reason}" in str(error.value)


# A key without an entry here has a value that shows that it arrives: the other one of true and false, or this number.
STAGES = "Et*6|t*14|t*14|t*14L"
VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "recompute_method": ("block", {"recompute": "full"}),
    "recompute_num_layers": (3, {"recompute": "full"}),
    "recompute_modules": (["moe_act", "layernorm"], {"recompute": "selective"}),
    "microbatch_group_size_per_vp_stage": (4, {}),
    "num_layers_in_first_pipeline_stage": (20, {}),
    "num_layers_in_last_pipeline_stage": (20, {}),
    "pipeline_model_parallel_layout": (STAGES, {}),
    "moe_deepep_num_sms": (24, {}),
    "bucket_size": (12345, {}),
    "exp_avg_dtype": ("bfloat16", {}),
    "exp_avg_sq_dtype": ("bfloat16", {}),
    "moe_aux_loss_coeff": (0.25, {}),
    "moe_router_load_balancing_type": ("seq_aux_loss", {}),
    "moe_router_num_groups": (8, {}),
    "moe_router_group_topk": (2, {}),
    "moe_z_loss_coeff": (0.25, {}),
    "moe_router_bias_update_rate": (0.25, {}),
    "decoupled_lr": (0.25, {}),
    "decoupled_min_lr": (0.25, {}),
}
BESIDE: dict[str, dict[str, Any]] = {
    "moe_router_num_groups": {"moe_router_group_topk": 2},
    "moe_router_group_topk": {"moe_router_num_groups": 4},
    "decoupled_min_lr": {"decoupled_lr": 0.5},
}
"""Keys of the same section that a key needs."""
_LAYOUT = "pipeline_model_parallel_layout"


def _stages(*sizes: int) -> str:
    chunks = [["decoder"] * size for size in sizes]
    return str([["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]])


ELSEWHERE = {
    "moe_layer_recompute": ("recompute_modules", ["moe"]),
    # All ways to divide layers become one.
    "num_layers_in_first_pipeline_stage": (_LAYOUT, _stages(10, 14, 10, 14)),
    "num_layers_in_last_pipeline_stage": (_LAYOUT, _stages(14, 10, 14, 10)),
    "account_for_embedding_in_pipeline_split": (_LAYOUT, _stages(11, 12, 12, 12)),
    "account_for_loss_in_pipeline_split": (_LAYOUT, _stages(12, 12, 12, 11)),
    _LAYOUT: (_LAYOUT, _stages(6, 14, 14, 14)),
    # Each of the 2 tensor parallel ranks weights its part, after Megatron-Core has divided the weight by their number,
    # and some releases have multiplied it by this number again.
    "moe_z_loss_coeff": ("moe_z_loss_coeff", 0.25 if installed_release().weighs_z_loss else 0.5),
    **{key: (name, VALUES[key][0]) for key, name in installed_release().renamed.items()},
}
"""Fields that take another form on their way: (field, value)."""


@pytest.mark.parametrize(
    ("section", "key"),
    [(section, key) for section, (keys, _) in SECTIONS.items() for key in keys.model_fields if key not in keys.added],
)
def test_every_key_reaches_its_field(section: str, key: str) -> None:
    value, others = VALUES.get(key, (not SECTIONS[section][0].model_fields[key].default, {}))
    megatron = MegatronConfig.model_validate({section: {key: value, **BESIDE.get(key, {})}, **others})
    config = EngineConfig(path="unused", backend=LAYOUT, megatron=megatron)
    layout, shape = with_stages(parse_backend(LAYOUT), megatron), find_shape(MOE)
    if key.startswith("account_for"):
        shape = replace(shape, n_layers=47, moe_layers=shape.moe_layers[:47])
    got: Any = {
        "transformer": lambda: settings.transformer_config(config, layout, shape),
        "ddp": lambda: settings.ddp_config(megatron, layout),
        "optimizer": lambda: settings.optimizer_config(config, OptimizerConfig()),
    }[section]()
    name, wanted = ELSEWHERE.get(key, (key, value))
    assert settings.effective_values(got)[name] == wanted


@pytest.mark.parametrize(
    ("section", "key"),
    [(section, key) for section, (keys, _) in SECTIONS.items() for key in keys.model_fields if key not in keys.added],
)
def test_every_key_has_the_type_of_its_field(section: str, key: str) -> None:
    keys, config = SECTIONS[section]
    megatrons = _kinds(typing.get_type_hints(config)[key])
    ours = _kinds(typing.get_type_hints(keys)[key])
    # The default of a field may be left to the engine, as null.
    assert ours - {type(None)} <= megatrons, f"{ours} are not among {megatrons}"


def _kinds(annotation: Any) -> set[Any]:
    """Return the simple types, or the literal values, that an annotation allows; number formats are texts."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _kinds(arguments[0])
    if origin in (Union, UnionType):
        return set().union(*map(_kinds, arguments))
    if origin is Literal or annotation in (str, torch.dtype):
        return {str}
    return {list if origin is list else float if annotation in (int, float) else annotation}
