"""A step has the same updates on any number of replicas, some of which may have no sequence, and those of its formula.

The step is the driver's whole half: advantages, log-probs, mini-batches, losses, experts, critic.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.algorithms.state import AlgorithmState
from fivefold.batch import Columns
from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.examples import Examples
from fivefold.data.sft import SFTExample
from fivefold.families.read import find_shape
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.devices import Models
from fivefold.roles.frozen import FrozenModel, HostedModel
from fivefold.roles.models import TrainedModel
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.types import Completion, Episode, Prompt, Sample
from fivefold.update.compose import policy_update
from fivefold.update.expert_examples import ExpertExamples
from fivefold.update.step import Skips, UpdateState, minibatches
from tests.unit.roles.replicas import RATE, VOCAB, Bigrams, trainer, without_object_store

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
N_GROUPS, N_SAMPLES = 4, 4
COMMON = (
    f"train_dataset.batch_size={N_GROUPS}", f"gconfig.n_samples={N_SAMPLES}", "gconfig.max_new_tokens=6",
    "gconfig.temperature=0.7", "actor.eps_clip=0.05",
)  # fmt: skip
EXPERT = json.dumps(
    {"path": "unread.jsonl", "response_key": "r", "batch_size": 2, "weight": 0.4, "token_weight": "phi"}
)
KL_IN_REWARD = ("actor.kl_ctl=0.2", "actor.kl_in=reward", "actor.kl_estimator=k3")

RECIPES: dict[str, tuple[str, ...]] = {
    "KL in the reward, whitened": (*KL_IN_REWARD, "actor.advantage=reinforce_pp", "actor.ppo_epochs=2"),
    "token baselines": ("actor.advantage=optimal_token_baseline", "actor.loss_aggregation=sequence_sum"),
    "pairs": ("algorithm=online_dpo", "actor.mask_truncated=true", "actor.positive_nll_coeff=0.2"),
    "critic": (*KL_IN_REWARD, "algorithm=ppo", "critic={path: package:tiny-moe, ppo_n_minibatches: 2}"),
    "covariances": ("algorithm=clip_cov", "actor.loss_kwargs={clip_cov_ratio: 0.2, clip_cov_lb: 0.0}"),
    "changes of the entropy": ("algorithm=clip_b", "actor.loss_kwargs={mu: 0.3}", "actor.c_clip=1.5"),
    "changes of the entropy less their expectation": (
        "algorithm=clip_v", "actor.loss_kwargs={mu: 0.3, max_share: 0.1}",
    ),
    "second moment": ("algorithm=m2po", "actor.rollout_correction.mask_above=0.3", "actor.ppo_n_minibatches=1"),
    "normalised weights": (
        "actor.rollout_correction={method: custom, weight: sequence, weight_cap: 1.5, weight_normalized: true}",
        "actor.ppo_n_minibatches=2",
    ),
    "sequences": ("algorithm=gspo", "actor.rollout_correction.method=seq_tis", "actor.entropy_coeff=0.1"),
    "distilled": (
        "actor.loss=reinforce", "actor.distill={coeff: 0.5, over: top_k, top_k: 3}", "teacher.path=package:tiny-moe",
        "actor.mask_truncated=true",
    ),
    "experts": (
        *KL_IN_REWARD, f"expert_dataset={EXPERT}", "actor.positive_nll_coeff=0.2", "actor.sample_weights.length=true",
        "actor.loss_aggregation=sequence_mean",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    without_object_store(monkeypatch)


def samples_of_a_step() -> tuple[list[Sample], Columns]:
    """Return groups of completions, some of them empty, cut off or all of one reward."""
    rng = random.Random(5)
    samples, trajectories = [], []
    for number in range(N_GROUPS):
        prompt = Prompt(3 * number, "", tuple(rng.choices(range(VOCAB), k=1 + number)), "")
        for index in range(N_SAMPLES):
            n = rng.choice([0, 1, 2, 3, 6])
            tokens, logprobs = rng.choices(range(VOCAB), k=n), [-2.0 - 0.2 * rng.random() for _ in range(n)]
            completion = Completion.of(tokens, logprobs, "length" if n == 6 else "stop", version=0)
            trajectories.append(Episode.single_turn(prompt, completion))
            reward = 1.0 if number == 0 else float(index % 2)
            length = len(prompt.token_ids) + n
            samples.append(Sample(prompt, "", completion.finish_reason, length, n, (0, 0), {"right": reward}))
    return samples, Columns.of(trajectories)


def gradients(overrides: tuple[str, ...], n_replicas: int, max_tokens: int = 20) -> list[torch.Tensor]:
    """Return the gradients of all updates of a step, the critic's behind the actor's."""
    recipe = load_recipe(QUICKSTART, [*COMMON, *overrides], TrainRecipe)
    policy, value = Bigrams(1), Bigrams(2, is_critic=True)
    actor = Actor(trainer(n_replicas, policy, Bigrams(3), max_tokens))
    further = (
        {} if recipe.critic is None else {"critic": TrainedModel(trainer(n_replicas, value, max_tokens=max_tokens))}
    )
    frozen = {} if recipe.teacher is None else {"teacher": FrozenModel(trainer(n_replicas, Bigrams(4)))}
    if recipe.actor.kl_ctl:
        frozen["ref"] = HostedModel(actor)
    expert, tokens = recipe.expert_dataset, range(4)
    examples = Examples(tuple(SFTExample((token,), (token + 1, token + 2)) for token in tokens), (1, 2, 3, 4), 4, 0)
    experts = None if expert is None else ExpertExamples.of(expert, examples, recipe.actor.ppo_n_minibatches, 1)
    update = policy_update(
        recipe,
        Models(actor, further, frozen),
        PhaseTimers(),
        replace(find_shape("package:tiny-moe"), vocab=VOCAB),
        experts,
    )
    state = UpdateState(AlgorithmState.of(recipe.actor), {role: Skips(role) for role in ("actor", "critic")})
    samples, columns = samples_of_a_step()
    update.run(update.prepare(1, samples, RemoteBatch.of(columns), (), state))
    return [*policy.gradients, *value.gradients]


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_has_the_same_updates_on_any_number_of_replicas(name: str) -> None:
    alone = gradients(RECIPES[name], 1, max_tokens=1000)
    assert all(gradient.norm() > 1e-3 for gradient in alone)
    # With 19, some have no sequence even of the whole step.
    for n_replicas in (3, 19):
        for mine, wanted in zip(gradients(RECIPES[name], n_replicas), alone, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def test_a_step_is_that_of_its_formula() -> None:
    """PPO on whitened rewards minus the KL to go, in two mini-batches, each of which moves the policy."""
    samples, columns = samples_of_a_step()
    policy, reference = Bigrams(1).weight, Bigrams(3).weight.detach()
    ends = np.cumsum(columns.lengths_N)
    tokens = [ids.tolist() for ids in np.split(columns.values["tokens"], ends[:-1])]
    trained = [range(sample.n_tokens - sample.n_sampled, sample.n_tokens) for sample in samples]

    def log_p(weight: torch.Tensor, index: int, place: int) -> torch.Tensor:
        row = weight[tokens[index][place - 1]] / 0.7
        return row[tokens[index][place]] - row.logsumexp(0)

    old = {(i, t): log_p(policy, i, t).item() for i, places in enumerate(trained) for t in places}
    kl = {(i, t): math.expm1(d) - d for i, t in old for d in [log_p(reference, i, t).item() - old[i, t]]}
    to_go = {(i, t): sum(kl[i, s] for s in trained[i] if s >= t) for i, t in old}
    raw = {key: samples[key[0]].reward - 0.2 * to_go[key] for key in old}
    mean = sum(raw.values()) / len(raw)
    std = math.sqrt(sum((value - mean) ** 2 for value in raw.values()) / (len(raw) - 1))

    def cost(key: tuple[int, int]) -> Any:
        advantage, ratio = (raw[key] - mean) / std, (log_p(policy, *key) - old[key]).exp()
        return -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.95, 1.28))

    wanted = []
    recipe = load_recipe(QUICKSTART, [], TrainRecipe)
    for indices in minibatches([sample.prompt.index for sample in samples], 2, f"{recipe.seed}-1-0"):
        keys = [(i, t) for i in indices for t in trained[i]]
        (gradient,) = torch.autograd.grad(sum(map(cost, keys)) / len(keys), policy)
        policy.data -= RATE * gradient
        wanted.append(gradient)
    got = gradients((*KL_IN_REWARD, "actor.advantage=reinforce_pp"), 3)
    assert len(got) == 2
    for mine, gradient in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, gradient, rtol=1e-4, atol=1e-5)
