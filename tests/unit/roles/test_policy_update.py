"""What an update trains with: masks, whitening, an adapted KL weight, and corrections that begin by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.algorithms.batch_steps import InTurn
from fivefold.algorithms.corrections import RolloutCorrection
from fivefold.algorithms.gae import AdvantageMoments, Moments
from fivefold.algorithms.metrics import Metric
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.state import AlgorithmState
from fivefold.batch import Batch, Columns
from fivefold.config.load import load_recipe
from fivefold.config.problems import RecipeError
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.energies import Energies
from fivefold.engine.entropy_changes import EntropyChanges
from fivefold.engine.scores import Score
from fivefold.families.read import find_shape
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.devices import Models
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trainer_worker import UpdateResult
from fivefold.types import Prompt, Sample, StopReason
from fivefold.update import token_advantages
from fivefold.update.compose import policy_update
from fivefold.update.step import Skips, StepOutcome, UpdateState

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
ONE_UPDATE = "actor.ppo_n_minibatches=1"


class RecordingActor(Actor):
    """Keeps what it was given; each update measures `measured`."""

    def __init__(self, **measured: float) -> None:
        self.measured = measured
        self.losses: list[PolicyLoss] = []
        self.batches: list[RemoteBatch] = []
        self.changes: list[Any] = []
        self.scores: list[Score] = []

    @property
    def n_recomputed(self) -> int:
        return len(self.scores)

    def score(self, batch: RemoteBatch, what: Score) -> tuple[Piece, ...]:
        self.scores.append(what)
        return ()

    def advantage_moments(self, batch: RemoteBatch, moments: AdvantageMoments) -> list[Moments]:
        tokens = Batch(
            lengths=tuple(batch.trained_N.tolist()),
            tokens_T=torch.zeros(int(batch.trained_N.sum()), dtype=torch.int64),
            mask_T=torch.ones(int(batch.trained_N.sum())),
            fields={
                name: torch.from_numpy(np.repeat(values, batch.trained_N)) for name, values in batch.scalars.items()
            },
        )
        return moments(tokens)[0]

    def update(self, batch: RemoteBatch, loss: Any, change: Any = None) -> UpdateResult:
        self.losses.append(loss)
        self.batches.append(batch)
        self.changes.append(change)
        measured = {"lr": 1.0, **self.measured}
        return UpdateResult({name: Metric(value) for name, value in measured.items()}, skipped=False)


class FollowingReference(FrozenModel):
    """Tells no log-probs, and records the number of the actor's updates before each refresh of its weights."""

    def __init__(self) -> None:
        self.refreshed: list[int] = []

    def score(self, batch: RemoteBatch, what: Score) -> tuple[Piece, ...]:
        return ()

    def follow(self, actor: Any) -> None:
        self.refreshed.append(len(actor.losses))


def updates(
    actor: RecordingActor,
    *overrides: str,
    steps: int = 1,
    reference: FollowingReference | None = None,
    reasons: Sequence[StopReason] = ("stop", "length", "stop", "stop"),
    rewards: Sequence[float] = (0.0, 1.0, 0.0, 1.0),
) -> StepOutcome:
    """Return the outcome of the last step."""
    recipe = load_recipe(QUICKSTART, list(overrides), TrainRecipe)
    models = Models(actor, frozen={"ref": reference or FollowingReference()} if recipe.actor.kl_ctl else {})
    update = policy_update(recipe, models, PhaseTimers(), find_shape("package:tiny-moe"))
    prompts = [Prompt(i, "?", (1,), "", f"source {i}") for i in range(2)]
    samples = [Sample(prompts[i // 2], "", reasons[i], 4, 1 + i, (0, 0), {"r": rewards[i]}) for i in range(4)]
    batch = RemoteBatch(np.full(4, 5), np.array([1, 2, 3, 4]), ())
    outcome = StepOutcome(UpdateState(AlgorithmState.of(recipe.actor), {"actor": Skips()}))
    for step in range(1, steps + 1):
        outcome = update.run(update.prepare(step, samples, batch, (), outcome.state))
    return outcome


def test_the_correction_begins_in_the_step_after_the_mismatch_was_measured() -> None:
    measured = {"rollout_mismatch_kl": 0.01}
    actor = RecordingActor(**measured)
    outcome = updates(actor, ONE_UPDATE, steps=2)
    assert [loss.correction for loss in actor.losses] == [None, RolloutCorrection("token", 2.0)]
    assert outcome.state.algorithm.corrects_rollout
    assert outcome.news is None  # it was told after the step before
    first = updates(RecordingActor(**measured), ONE_UPDATE)
    assert first.news is not None
    assert "disagree by 0.01 nats a token, more than 0.001: from the next step on" in first.news
    share = updates(RecordingActor(**measured), ONE_UPDATE, "rollout.logprob_share=0.5")
    assert share.news is not None
    assert share.news.endswith("drop rollout.logprob_share")
    assert updates(RecordingActor(**measured), ONE_UPDATE, "actor.recompute_logprob=false").news is None
    for switch in ("actor.rollout_correction.method=none", "gconfig.top_p=0.9", "rollout.logprob_share=0.5"):
        actor = RecordingActor(**measured)
        updates(actor, ONE_UPDATE, switch, steps=2)
        assert [loss.correction for loss in actor.losses] == [None, None], switch
    actor = RecordingActor(rollout_mismatch_kl=1e-4)
    updates(actor, ONE_UPDATE, "actor.rollout_correction.method=mis", steps=1)
    wanted = RolloutCorrection("token", None, "token", 2.0, 0.0)
    assert actor.losses[0].correction == wanted
    actor = RecordingActor(rollout_mismatch_kl=1e-4)
    key = "actor.rollout_correction"
    updates(actor, ONE_UPDATE, f"{key}.method=seq_tis", f"{key}.weight_cap=3")
    assert actor.losses[0].correction == RolloutCorrection("sequence", 3.0)


def test_routes_are_recorded_with_old_log_probs_even_for_one_update() -> None:
    for replay, records in (("none", []), ("rollout", []), ("old_logprobs", [True])):
        actor = RecordingActor()
        updates(actor, ONE_UPDATE, f"actor.router_replay={replay}")
        assert [score.records_routes for score in actor.scores] == records
    with pytest.raises(RecipeError, match="records the pass that computes old log-probs"):
        updates(RecordingActor(), "actor.router_replay=old_logprobs", "actor.recompute_logprob=false")


def test_routes_that_no_router_would_choose_end_the_run() -> None:
    replay = ("actor.router_replay=rollout", "actor.router_replay_min_overlap=0.75")
    outcome = updates(RecordingActor(**{"replay/differs": 0.25}), *replay)
    assert outcome.problem is None
    # The model has 4 layers with 8 experts, of which 2 are chosen: one byte each.
    assert outcome.metrics["replay/bytes"] == 4 * 2 * 20
    problem = updates(RecordingActor(**{"replay/differs": 0.5}), *replay).problem
    assert problem is not None
    assert "only 50.0% of the replayed experts are those that the routers would choose" in problem


def test_an_adapted_weight_is_that_of_the_next_step() -> None:
    actor = RecordingActor(kl_ref=1.0)
    overrides = ("actor.kl_ctl=0.1", "actor.kl_target=0.1", "actor.kl_horizon=8")
    updates(actor, ONE_UPDATE, *overrides, steps=2)
    assert [loss.kl_coeff for loss in actor.losses] == pytest.approx([0.1, 0.1 * (1 + 0.2 * 4 / 8)])


def test_the_weight_of_the_entropy_falls_to_0_if_the_recipe_says_so() -> None:
    actor = RecordingActor()
    keys = ("actor.entropy_coeff=0.2", "actor.entropy_decay_steps=4")
    outcome = updates(actor, ONE_UPDATE, *keys, steps=6)
    assert [loss.entropy_coeff for loss in actor.losses] == pytest.approx([0.2, 0.15, 0.1, 0.05, 0.0, 0.0])
    assert outcome.metrics["entropy_coeff"] == 0.0
    actor = RecordingActor(entropy=2.1)
    updates(actor, ONE_UPDATE, *keys, "actor.entropy_target=2.0", steps=3)
    assert [loss.entropy_coeff for loss in actor.losses] == pytest.approx([0.2, 0.15, 0.1])
    assert [loss.entropy_most for loss in actor.losses] == [2.0] * 3


@pytest.mark.parametrize(
    ("keys", "refreshed"),
    [
        ([], []),
        (["ref.refresh_every=2"], [2, 4]),
        (["ref.refresh_every=3"], [3]),
        (["ref.ema_decay=0.5"], [1, 2, 3, 4, 5]),
        (["ref.ema_decay=0.5", "ref.refresh_every=4"], [4]),
    ],
)
def test_the_reference_follows_the_weights_after_every_so_many_steps(keys: list[str], refreshed: list[int]) -> None:
    reference = FollowingReference()
    updates(RecordingActor(kl_ref=1.0), ONE_UPDATE, "actor.kl_ctl=0.1", *keys, steps=5, reference=reference)
    assert reference.refreshed == refreshed


def test_completions_that_were_cut_off_are_not_trained_if_the_recipe_says_so() -> None:
    for masks in (False, True):
        actor = RecordingActor()
        updates(actor, ONE_UPDATE, f"actor.mask_truncated={str(masks).lower()}")
        assert actor.batches[0].trained_N.tolist() == [1, 0 if masks else 2, 3, 4]
        # The reward of the one that was cut off counts in its group.
        assert actor.batches[0].scalars["advantages"][0] < 0


def test_episodes_that_stopped_for_a_masked_reason_are_not_trained() -> None:
    for masked, trained in (("[]", [1, 2, 3, 4]), ("[time, turns]", [1, 2, 0, 0]), ("[turns]", [1, 2, 0, 4])):
        actor = RecordingActor()
        keys = ("environment.game=fivefold.environments.guess_digit:GuessDigit", f"environment.masked={masked}")
        reward = ("reward.fn=environment", "reward.kwargs={}")
        updates(actor, ONE_UPDATE, *keys, *reward, reasons=("done", "context", "turns", "time"))
        assert actor.batches[0].trained_N.tolist() == trained
        assert actor.batches[0].scalars["advantages"].all()


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        ([], [1, 2, 3, 4]),
        (["actor.group_mean_above=0.25", "actor.group_mean_below=0.75"], [1, 2, 3, 4]),
        (["actor.group_mean_above=0.5"], [0, 0, 3, 4]),
        (["actor.group_mean_below=0.6"], [1, 2, 0, 0]),
        (["actor.group_mean_below=0.6", "actor.mask_truncated=true"], [1, 0, 0, 0]),
        (["actor.group_mean_above=0.45", "actor.group_mean_of=accuracy"], [1, 2, 3, 4]),
        (["actor.group_mean_above=0.55", "actor.group_mean_of=accuracy"], [0, 0, 3, 4]),
    ],
)
def test_prompts_outside_a_range_of_mean_rewards_are_not_trained(keys: list[str], trained: list[int]) -> None:
    """The groups have mean rewards of 0.5 and, but for the first case, 1."""
    rewards = (0.0, 1.0, 0.0, 1.0) if "actor.group_mean_above=0.25" in keys else (0.0, 1.0, 1.0, 1.0)
    actor = RecordingActor()
    updates(actor, ONE_UPDATE, *keys, rewards=rewards)
    assert actor.batches[0].trained_N.tolist() == trained
    if "kept" in actor.batches[0].scalars:
        assert actor.batches[0].scalars["kept"].tolist() == [float(n > 0) for n in trained]


def test_advantages_are_clipped_after_whitening() -> None:
    actor = RecordingActor()
    updates(actor, ONE_UPDATE, "actor.whiten_advantages=true", "actor.advantage_clip=0.75")
    change = actor.changes[0]
    advantages = torch.tensor([-3.0, -0.1, 0.1, 3.0])
    batch = Batch(
        tokens_T=torch.zeros(4, dtype=torch.int64),
        mask_T=torch.ones(4),
        lengths=(4,),
        fields={"advantages": advantages},
    )
    clipped = change(batch).fields["advantages"]
    whitened = InTurn(change.changes[:-1])(batch).fields["advantages"]
    assert whitened.abs().max() > 0.75
    assert clipped.tolist() == [max(-0.75, min(0.75, value)) for value in whitened.tolist()]


def test_samples_are_weighted_by_their_shaped_rewards() -> None:
    actor = RecordingActor()
    # The rewards 0, 1, 0 and 1 are shaped to 1, 3, 1 and 3.
    shaping = ("actor.reward_bias=0.5", "actor.reward_scaling=2")
    updates(actor, ONE_UPDATE, *shaping, "actor.sample_weights.reward=power")
    assert actor.batches[0].scalars["sample_weight"].tolist() == pytest.approx([0.2, 1.8, 0.2, 1.8])
    updates(actor, ONE_UPDATE, *shaping)
    assert "sample_weight" not in actor.batches[1].scalars


def test_reinforce_pp_whitens_the_advantages_of_tokens() -> None:
    actor = RecordingActor()
    updates(actor, ONE_UPDATE, "algorithm=reinforce_pp")
    advantages_N = torch.from_numpy(actor.batches[0].scalars["advantages"])
    assert advantages_N.tolist() == [0, 1, 0, 1]
    lengths = (1, 2, 3, 4)
    tokens_T = torch.repeat_interleave(advantages_N, torch.tensor(lengths))
    batch = Batch(lengths, torch.zeros(10, dtype=torch.int64), torch.ones(10), {"advantages": tokens_T})
    white_T = actor.changes[0](batch).fields["advantages"]
    torch.testing.assert_close(white_T, (tokens_T - tokens_T.mean()) / tokens_T.std())
    plain = RecordingActor()
    updates(plain, ONE_UPDATE)
    assert plain.changes == [None]


def test_sources_are_whitened_apart_if_the_recipe_says_so() -> None:
    actor = RecordingActor()
    keys = ("actor.whiten_advantages=true", "actor.whiten_by_source=true", "actor.reward_norm.mean_level=none")
    updates(actor, ONE_UPDATE, *keys, "actor.reward_norm.std_level=none", rewards=(0.0, 1.0, 5.0, 9.0))
    advantages_T = torch.tensor([0.0, 1, 1, 5, 5, 5, 9, 9, 9, 9])
    batch = Batch(
        (1, 2, 3, 4),
        torch.zeros(10, dtype=torch.int64),
        torch.ones(10),
        {"advantages": advantages_T, "source": torch.tensor([0.0] * 3 + [1.0] * 7)},
    )
    parts = advantages_T.split([3, 7])
    expected_T = torch.cat([(part - part.mean()) / part.std() for part in parts])
    torch.testing.assert_close(actor.changes[0](batch).fields["advantages"], expected_T)


def test_whitening_is_on_or_off_as_the_recipe_says_whatever_the_advantage() -> None:
    for algorithm in ("grpo", "reinforce_pp"):
        for whitens in (False, True):
            actor = RecordingActor()
            updates(actor, ONE_UPDATE, f"algorithm={algorithm}", f"actor.whiten_advantages={str(whitens).lower()}")
            assert [change is not None for change in actor.changes] == [whitens], algorithm


def test_losses_that_choose_tokens_get_old_log_probs_and_numbers_of_sequences_of_each_step() -> None:
    actor, again = RecordingActor(), RecordingActor()
    for one in (actor, again):
        updates(one, ONE_UPDATE, "algorithm=clip_cov", steps=2)
    assert actor.n_recomputed == 2
    numbers = [batch.scalars["sequence_number"].tolist() for batch in actor.batches]
    assert [len(set(own)) for own in numbers] == [4, 4]
    assert not set(numbers[0]) & set(numbers[1]), "another step draws tokens of other places"
    assert numbers == [batch.scalars["sequence_number"].tolist() for batch in again.batches]
    plain = RecordingActor()
    updates(plain, ONE_UPDATE)
    assert plain.n_recomputed == 0


def test_losses_that_look_at_the_entropy_get_its_changes_with_the_old_log_probs() -> None:
    for algorithm, less_expected in (("clip_b", False), ("clip_v", True)):
        actor = RecordingActor()
        updates(actor, ONE_UPDATE, f"algorithm={algorithm}", "gconfig.temperature=0.5")
        assert actor.scores == [EntropyChanges(0.5, less_expected=less_expected)]
        for key in ("recompute_logprob=false", "advantage=optimal_token_baseline"):
            with pytest.raises(RecipeError, match=f"actor.loss={algorithm}"):
                updates(actor, ONE_UPDATE, f"algorithm={algorithm}", f"actor.{key}")


def test_samples_of_older_weights_are_corrected_from_the_first_step_on() -> None:
    stale = "rollout.max_head_offpolicyness=1"
    actor = RecordingActor(rollout_mismatch_kl=0.01)
    assert updates(actor, ONE_UPDATE, stale).news is None
    assert [loss.correction for loss in actor.losses] == [RolloutCorrection("token", 2.0)]
    assert actor.n_recomputed == 0, "with one update, the policy before the step is the current one"
    quantized = RecordingActor(rollout_mismatch_kl=1e-5)
    assert updates(quantized, ONE_UPDATE, "rollout.quantization=fp8_per_block").news is None
    assert [loss.correction for loss in quantized.losses] == [RolloutCorrection("token", 2.0)]
    several = RecordingActor()
    updates(several, "actor.ppo_n_minibatches=2", stale)
    assert several.n_recomputed == 1
    interpolating = RecordingActor()
    updates(interpolating, "actor.ppo_n_minibatches=2", stale, "actor.prox_logp_method=loglinear", steps=2)
    assert interpolating.n_recomputed == 0, "no forward pass of its own"
    assert [(loss.version, loss.max_age) for loss in interpolating.losses] == [(0, 1)] * 2 + [(1, 1)] * 2
    for method, correction in {"none": None, "decoupled": RolloutCorrection("token")}.items():
        chosen = RecordingActor()
        updates(chosen, ONE_UPDATE, stale, f"actor.rollout_correction.method={method}")
        assert [loss.correction for loss in chosen.losses] == [correction], method


def test_the_optimal_token_baseline_is_that_of_the_groups_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # The columns themselves take the place of references to them.
    for name in ("put", "fetch"):
        monkeypatch.setattr(token_advantages, name, lambda columns: columns)

    class Actor(RecordingActor):
        def score(self, batch: RemoteBatch, what: Score) -> tuple[Piece, ...]:
            assert isinstance(what, Energies)
            self.scores.append(what)
            nan = np.nan
            rows = [[nan, nan, nan, nan, 0.5], [nan, nan, nan, 0.2, 0.3], [nan, nan, 1, 1, 1], [nan, 2, 2, 2, 2]]
            order = [2, 0, 3, 1]  # a replica has any sequences
            values = np.concatenate([rows[index] for index in order]).astype(np.float32)
            idle = Columns(np.empty(0, np.int32), {"energies": np.empty(0, np.float32)})
            return (
                Piece(Columns(np.full(4, 5, np.int32), {"energies": values}), np.array(order)),
                Piece(idle, np.empty(0, np.int64)),  # there may be more replicas than sequences
            )

    actor = Actor()
    updates(actor, ONE_UPDATE, "actor.advantage=optimal_token_baseline")
    (piece,) = [one for one in actor.batches[0].pieces if "advantages" in one.columns.values]
    got = piece.columns.values["advantages"].reshape(4, 5)[np.argsort(piece.sequences_M)]
    # Rewards are 0 and 1 in each group. At the first token of the first group, 0.2 of 0.7 is on the path with reward 1.
    wanted = [
        [0, 0, 0, 0, -0.2 / 0.7],
        [0, 0, 0, 1 - 0.2 / 0.7, 1],
        [0, 0, *[-2 / 3] * 3],
        [0, *[1 / 3] * 3, 1],
    ]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert actor.n_recomputed == 1, "the energies come with the old log-probs"
