"""Losses and advantages outside the package: how they are found, checked at the start, and sent to workers."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.algorithms.build import build_advantage, build_policy_loss, build_surrogate, method_at
from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.losses.sequence_ratios import GSPO
from fivefold.algorithms.losses.soft_clips import SAPO
from fivefold.algorithms.user_loss import UserLoss, _tokens
from fivefold.batch import Batch
from fivefold.config.methods import ADVANTAGES, LOSSES, Method
from fivefold.config.schema.roles import ActorConfig
from fivefold.config.schema.rollout import GenerationConfig

MODULE = """
import torch

class Fine:
    def __init__(self, eps_clip, strength=2.0):
        self.scale = strength * eps_clip

    def __call__(self, tokens):
        return -self.scale * tokens.advantages_T * tokens.logprobs_T, {}

class Coupled(Fine):
    def __call__(self, tokens):
        return (tokens.logprobs_T - tokens.logprobs_T.mean()) * tokens.advantages_T, {}

class Detached(Fine):
    def __call__(self, tokens):
        return tokens.advantages_T, {}

class Scalar(Fine):
    def __call__(self, tokens):
        return tokens.logprobs_T.sum(), {}

class Alone(Fine):
    def __call__(self, tokens):
        return tokens.logprobs_T * 1

class Broken(Fine):
    def __call__(self, tokens):
        raise SystemExit(tokens.no_such_thing)

class Infinite(Fine):
    def __call__(self, tokens):
        return tokens.logprobs_T / (tokens.logprobs_T - tokens.logprobs_T), {}

class Centred(Fine):
    # The mean of the old log-probs is over the whole mini-batch.

    def before(self, batch, gather):
        sums = torch.stack(gather(torch.stack([batch.fields["old_logprobs"].sum(), batch.mask_T.sum()]))).sum(0)
        return batch.with_fields(mean=(sums[0] / sums[1]).expand(len(batch.mask_T)))

    def __call__(self, tokens):
        return (tokens.logprobs_T - tokens.fields["mean"]) * tokens.advantages_T, {}

class Misnamed(Centred):
    before = 3

def needy(scores, k):
    return scores.rewards_N * k

def short(scores):
    return scores.rewards_N[:1]

def endless(scores):
    return scores.rewards_N / 0

number = 3
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def actor(**keys: Any) -> ActorConfig:
    return ActorConfig(path="m", **keys)


def test_a_loss_of_ones_own_gets_keys_and_options_and_travels_to_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = build_surrogate(actor(loss="own.py:Fine", loss_kwargs={"strength": 3.0}, eps_clip=0.5))
    assert isinstance(loss, UserLoss)
    sent = pickle.dumps(loss)
    monkeypatch.chdir("/")  # a worker may have another working folder
    tokens = _tokens([2, 3])
    cost_T, _ = pickle.loads(sent)(tokens)
    torch.testing.assert_close(cost_T, -1.5 * tokens.advantages_T * tokens.logprobs_T)


def test_a_loss_of_ones_own_may_compute_something_over_the_whole_mini_batch_first() -> None:
    loss = pickle.loads(pickle.dumps(build_surrogate(actor(loss="own.py:Centred"))))
    fields = {"old_logprobs": torch.tensor([-1.0, -3.0])}
    batch = Batch((2,), torch.zeros(2, dtype=torch.int64), torch.ones(2), fields)
    other = torch.tensor([-8.0, 4.0])  # the sum and the number of tokens of another replica
    assert loss.before(batch, lambda own: [own, other]).fields["mean"].tolist() == [-2.0, -2.0]
    policy = build_policy_loss(actor(loss="own.py:Centred"), GenerationConfig())
    assert policy.before is not None
    assert build_policy_loss(actor(loss="own.py:Fine"), GenerationConfig()).before is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss": "own.py:Misnamed"}, "failed on a batch of two sequences"),
        ({"loss": "own.py:Coupled"}, "depend on the sequences around it"),
        ({"loss": "own.py:Detached"}, "without a gradient"),
        ({"loss": "own.py:Scalar"}, r"returned \(\) for 5 tokens"),
        ({"loss": "own.py:Alone"}, "failed on a batch of two sequences"),
        ({"loss": "own.py:Broken"}, r"own.py.*no_such_thing"),
        ({"loss": "own.py:Infinite"}, "not finite"),
        ({"loss": "own.py:Missing"}, "defines no 'Missing'"),
        ({"loss": "own.py:number"}, "is a int, which cannot be called"),
        ({"loss": "no_such_module:Loss"}, "there is no module 'no_such_module'"),
        (
            {"loss": "own.py:Fine", "loss_kwargs": {"strenth": 1}},
            "strenth=1: there is no such option; .*Fine has strength",
        ),
        ({"loss": "sapo", "loss_kwargs": {"tau": 1}}, "there is no such option; actor.loss=sapo has tau_pos, tau_neg"),
        ({"loss": "sapo", "loss_kwargs": {"tau_pos": -1}}, "tau_pos=-1"),
        ({"loss": "ppo", "loss_kwargs": {"eps_clip": 0.1}}, "this option is the recipe's key actor.eps_clip"),
    ],
)
def test_a_loss_that_would_fail_or_mislead_is_refused_at_the_start(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)actor.loss.*{message}"):
        build_surrogate(actor(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"advantage": "own.py:needy"}, "needs the option k: give actor.advantage_kwargs.k"),
        ({"advantage": "own.py:needy", "advantage_kwargs": {"k": "x"}}, "failed on two groups of 4"),
        ({"advantage": "own.py:short"}, r"returned torch.float64 \(1,\)"),
        ({"advantage": "own.py:endless"}, "not finite"),
        ({"advantage": "rloo", "advantage_kwargs": {"k": 1}}, "there is no such option; actor.advantage=rloo has none"),
        ({"advantage": "opmd", "advantage_kwargs": {"tau": -1}}, "=opmd: tau=-1: Input should be greater than 0"),
        ({"advantage": "pass_at_k", "advantage_kwargs": {"k": "4"}}, "=pass_at_k: k='4': .* valid integer"),
        ({"advantage": "raft", "advantage_kwargs": {"full_reward": float("nan")}}, "=raft: .* finite number"),
        (
            {"advantage": "optimal_token_baseline", "advantage_kwargs": {"zero_tail": "no"}},
            "zero_tail='no': .* boolean",
        ),
    ],
)
def test_an_advantage_that_would_fail_is_refused_at_the_start(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)actor.advantage.*{message}"):
        build_advantage(actor(**keys), 4)


@pytest.mark.parametrize("row", [*LOSSES.values(), *ADVANTAGES.values()], ids=[*LOSSES, *ADVANTAGES])
def test_a_row_names_the_keys_that_only_some_methods_read(row: Method) -> None:
    parameters = inspect.signature(method_at(row)).parameters.keys() & ActorConfig.model_fields.keys()
    if row is ADVANTAGES["gae"]:  # its critic reads them: fivefold/update/critic.py
        parameters = {"discount", "gae_lambda", "gae_length_alpha"}
    assert {key.partition(".")[0] for key in row.reads} == parameters


def test_built_in_losses_get_the_keys_of_the_recipe() -> None:
    assert build_surrogate(actor(eps_clip=0.1, c_clip=3.0)) == PPO(0.1, None, 3.0)
    assert build_surrogate(actor(loss="gspo", eps_clip_higher=0.3)) == GSPO(0.2, 0.3)
    assert build_surrogate(actor(loss="sapo", loss_kwargs={"tau_neg": 2})) == SAPO(1.0, 2.0)


def test_a_name_that_is_no_loss_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="loss=gpso is none of ppo, reinforce, gspo"):
        actor(loss="gpso")
    with pytest.raises(ValueError, match="advantage=rlo is none of grpo, grpo_leave_one_out, gdpo, rloo"):
        actor(advantage="rlo")
