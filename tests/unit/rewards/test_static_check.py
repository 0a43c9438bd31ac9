"""Rewards that are checked without an import: the verdict is that of the import, and no code of the user runs."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards.resolve import resolve_reward
from fivefold.rewards.static_check import reward_problems
from tests.unit.rewards.conftest import Write

ARGUMENTS = "response, ground_truth, *, data_source, extra_info"
PLAIN = f"""
import functools
from os.path import join as joined

NUMBER = 3

def plain({ARGUMENTS}):
    return 1.0

async def waits({ARGUMENTS}):
    return 1.0

def with_default(response, truth, /, data_source="", extra_info=None, *rest, target=10, **others):
    return 1.0

def of_trl_with_prompts(prompts, completions, **kwargs):
    return [1.0 for _ in completions]

def own_completions({ARGUMENTS}, completions):
    return 1.0

def one_argument(response):
    return 1.0

def with_defaults(response, reference="none", *, scale=(1, 2)):
    return 1.0

if True:
    def conditional({ARGUMENTS}):
        return 1.0
else:
    pass

try:
    raise ImportError
except ImportError:
    handled = plain

@functools.cache
def decorated(response):
    return 1.0

first, (second, *third) = plain, (plain, plain)
typed: object = plain
"""


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("exact_match", {"numbers": True}, None),
        ("math", {}, None),
        ("exact_match", {"number": True}, "reward.kwargs has ['number'], but the reward 'exact_match' takes"),
        ("exact_match", {"ignore_case": [1]}, "reward.kwargs.ignore_case=[1]: Input should be a valid boolean"),
        ("exact_match", {"pattern": "("}, "reward.kwargs.pattern='(' is not a regular expression"),
        ("math", {"timeout_s": 0}, "reward.kwargs.timeout_s=0.0 must be greater than 0"),
        ("math", {"timeout_s": 1e9}, "must be greater than 0, and at most 86,400"),
        ("maths", {}, "reward.fn='maths' is neither one of ["),
        ("exact_mach", {}, "file.py:function; did you mean exact_match?"),
        (":plain", {}, "reward.fn=':plain' is neither one of"),
        ("plain_module:", {}, "reward.fn='plain_module:' is neither one of"),
        ("plain_module:plain", {}, None),
        ("plain_module:waits", {}, None),
        ("plain_module:with_default", {"target": 1, "more": 2}, None),
        ("plain_module:conditional", {}, None),
        ("plain_module:handled", {}, None),
        ("plain_module:first", {}, None),
        ("plain_module:second", {}, None),
        ("plain_module:typed", {}, None),
        ("plain_module.py:plain", {}, None),
        ("./plain_module.py:plain", {}, None),
        ("package.inner:plain", {}, None),
        ("json.decoder:nothing", {}, "decoder.py defines no 'nothing'"),
        ("plain_module:plane", {}, "plain_module.py defines no 'plane'; did you mean plain?"),
        ("plain_module:plain", {"target": 1}, "has the signature (response, ground_truth, *, data_source, extra_info)"),
        ("plain_module:plain", {"data_source": 1}, "reward.kwargs has ['data_source'], which each row"),
        ("plain_module:of_trl_with_prompts", {}, "TRL's functions judge lists of completions"),
        ("plain_module:own_completions", {"completions": 3}, None),
        ("plain_module:one_argument", {}, "has the signature (response), but it is called as"),
        ("plain_module:with_defaults", {}, "has the signature (response, reference='none', *, scale=(1, 2)), but"),
        ("no_such_module:plain", {}, "there is no module 'no_such_module', installed or in"),
        ("package.other:plain", {}, "there is no module 'package.other', installed or in"),
        ("plain_module.inner:plain", {}, "there is no module 'plain_module.inner'"),
        ("a b:plain", {}, "there is no module 'a b'"),
        ("no/such.py:plain", {}, "there is no Python file"),
        ("broken.py:plain", {}, "broken.py"),
    ],
)
def test_the_verdict_is_that_of_the_import(
    write_module: Write, name: str, kwargs: dict[str, Any], expected: str | None
) -> None:
    write_module("plain_module.py", PLAIN)
    write_module("package/__init__.py", "")
    write_module("package/inner.py", PLAIN)
    write_module("broken.py", "def plain(:\n")
    config = RewardConfig(fn=name, kwargs=kwargs)
    found = list(reward_problems(config))
    if expected is None:
        assert found == []
        resolve_reward(config)
        return
    assert len(found) == 1
    assert expected in found[0]
    with pytest.raises(ValueError, match=r"reward\."):
        resolve_reward(config)


@pytest.mark.parametrize(
    "code", ["from os.path import *", "globals()['word_count'] = len", "import sys\nexec('word_count = len')"]
)
def test_where_only_the_import_could_tell_nothing_is_said(write_module: Write, code: str) -> None:
    write_module("dynamic.py", code)
    assert list(reward_problems(RewardConfig(fn="dynamic:word_count"))) == []


def test_no_code_of_the_user_is_run(write_module: Write) -> None:
    write_module("loud/__init__.py", "raise SystemExit")
    write_module("loud/inner.py", "raise SystemExit\n" + PLAIN)
    before = (set(sys.modules), list(sys.path))
    assert list(reward_problems(RewardConfig(fn="loud.inner:plain"))) == []
    assert (set(sys.modules), list(sys.path)) == before


def test_modules_in_folders_without_init_files_are_found(write_module: Write) -> None:
    write_module("outer/middle/inner.py", PLAIN)
    assert not list(reward_problems(RewardConfig(fn="outer.middle.inner:plain")))
    (problem,) = reward_problems(RewardConfig(fn="outer.middle.other:plain"))
    assert "no module 'outer.middle.other'" in problem
