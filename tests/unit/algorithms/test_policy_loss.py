"""The parts that all policy losses share; their values and gradients are in test_golden_losses.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fivefold.algorithms.build import build_policy_loss
from fivefold.algorithms.corrections import RolloutCorrection
from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.metrics import merge_metrics, metric_values
from fivefold.algorithms.policy_loss import PolicyLoss, mismatch_metrics
from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.roles import ActorConfig
from fivefold.config.schema.rollout import GenerationConfig

LENGTHS = (5, 9, 3, 7, 4)
RESPONSES = (3, 6, 0, 6, 1)  # trained tokens of each sequence, at its end; the third has none

BASE = PolicyLoss(temperature=1.0, surrogate=PPO(0.2, 0.3))
VARIANTS = [
    BASE,
    replace(BASE, surrogate=PPO(0.2, 0.3, 1.4), aggregation="sequence_mean"),
    replace(BASE, entropy_coeff=0.05, kl_coeff=0.1, correction=RolloutCorrection("token", 1.05, "geometric", 1.2, 0.8)),
]


def raw_inputs(
    logprobs_T: torch.Tensor,
    entropy_T: torch.Tensor,
    mask_T: torch.Tensor,
    lengths: tuple[int, ...],
    fields: dict[str, torch.Tensor],
) -> LossInputs:
    return LossInputs({"logprobs": logprobs_T, "entropy": entropy_T}, mask_T, lengths, fields)


def make_batch(seed: int = 0) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Return a batch in float64 with ratios on both sides of the clips, current log-probs, and entropies."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    mask = [x for n, r in zip(LENGTHS, RESPONSES, strict=True) for x in [0.0] * (n - r) + [1.0] * r]
    logprobs = -1.5 + noise(0.5)
    fields = {
        "advantages": noise(1.0),
        "old_logprobs": logprobs + noise(0.4),
        "ref_logprobs": logprobs + noise(0.3),
        "rollout_logprobs": logprobs + noise(0.1),
    }
    batch = Batch(LENGTHS, torch.zeros(total, dtype=torch.int64), torch.tensor(mask, dtype=torch.float64), fields)
    return batch, logprobs, noise(1.0).abs()


def inputs_of(batch: Batch, logprobs_T: torch.Tensor, entropy_T: torch.Tensor) -> LossInputs:
    return raw_inputs(logprobs_T, entropy_T, batch.mask_T, batch.lengths, batch.fields)


@pytest.mark.parametrize("loss", [*VARIANTS, SFTLoss()])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4]], [[2], [4, 0], [3, 1]], [[4], [3], [2], [1], [0]]])
def test_sums_over_any_split_equal_the_whole(loss: PolicyLoss | SFTLoss, split: list[list[int]]) -> None:
    batch, logprobs, entropy = make_batch(seed=2)
    extended = batch.with_fields(logprobs=logprobs, entropy=entropy)
    whole, whole_metrics = loss(inputs_of(batch, logprobs, entropy))
    parts = [extended.select(indices) for indices in split]
    results = [loss(inputs_of(part, part.fields["logprobs"], part.fields["entropy"])) for part in parts]
    assert sum(value.item() for value, _ in results) == pytest.approx(whole.item(), rel=1e-12)
    of_parts = metric_values(merge_metrics(metrics for _, metrics in results))
    assert of_parts == pytest.approx(metric_values(whole_metrics), rel=1e-12)


def test_sequence_mean_gives_each_sequence_the_same_weight() -> None:
    loss = replace(BASE, aggregation="sequence_mean")
    batch, logprobs, entropy = make_batch()
    fields = {"advantages": torch.ones_like(logprobs)}
    logprobs.requires_grad_()
    total, _ = loss(raw_inputs(logprobs, entropy, batch.mask_T, batch.lengths, fields))
    total.backward()
    assert logprobs.grad is not None
    assert [grad.sum().item() for grad in batch.split(logprobs.grad)] == pytest.approx([-1, -1, 0, -1, -1])
    assert loss.normalizer(batch.totals()) == 4


def test_without_old_logprobs_the_gradient_is_the_policy_gradient() -> None:
    batch, logprobs, entropy = make_batch()
    logprobs.requires_grad_()
    fields = {"advantages": batch.fields["advantages"]}
    total, metrics = BASE(raw_inputs(logprobs, entropy, batch.mask_T, batch.lengths, fields))
    total.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -batch.fields["advantages"] * batch.mask_T, rtol=0, atol=0)
    assert metrics["ratio/max"].sum == 1
    assert metrics["clip_fraction"].sum == metrics["ppo_kl"].sum == 0


def test_values_of_masked_tokens_affect_neither_loss_nor_gradient() -> None:
    loss = replace(BASE, kl_coeff=0.1, entropy_coeff=0.1)
    batch, logprobs, entropy = make_batch()
    clean, clean_metrics = loss(inputs_of(batch, logprobs, entropy))

    def poison(values: torch.Tensor, bad: float) -> torch.Tensor:
        return torch.where(batch.mask_T.bool(), values, torch.full_like(values, bad))

    fields = {name: poison(value, math.nan) for name, value in batch.fields.items()}
    bad_logprobs = poison(logprobs, -math.inf).requires_grad_()
    bad_entropy = poison(entropy, math.nan).requires_grad_()
    total, metrics = loss(
        LossInputs({"logprobs": bad_logprobs, "entropy": bad_entropy}, batch.mask_T, batch.lengths, fields)
    )
    total.backward()
    assert total.item() == clean.item()
    assert metric_values(metrics) == metric_values(clean_metrics)
    for tensor in (bad_logprobs, bad_entropy):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert not tensor.grad[~batch.mask_T.bool()].any()


def test_loss_gradient_and_metrics_of_an_extreme_ratio_are_finite() -> None:
    logprobs = torch.tensor([-1.0, -2000.0, 0.0], requires_grad=True)
    fields = {"advantages": torch.tensor([0.0, -1.0, -1.0]), "old_logprobs": torch.tensor([0.0, -1.0, -900.0])}
    fields["ref_logprobs"] = torch.tensor([0.0, -1.0, -900.0])
    loss = replace(BASE, kl_coeff=0.1)
    total, metrics = loss(
        LossInputs({"logprobs": logprobs, "entropy": torch.zeros(3)}, torch.tensor([0.0, 1.0, 1.0]), (3,), fields)
    )
    total.backward()
    assert logprobs.grad is not None
    assert all(value.isfinite() for value in [total, *logprobs.grad])
    assert all(map(math.isfinite, metric_values(metrics).values()))


def test_metrics_equal_counts_by_hand() -> None:
    logprobs = torch.tensor([0.0, math.log(0.5), math.log(0.5), math.log(2.0), math.log(2.0)], dtype=torch.float64)
    zeros = torch.zeros_like(logprobs)
    fields = {
        "advantages": torch.tensor([9.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64),
        "old_logprobs": zeros,
        "rollout_logprobs": torch.tensor([7.0, 0.1, 0.0, -0.3, 0.0], dtype=torch.float64),
    }
    mask = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    _, metrics = replace(BASE, surrogate=PPO(0.2, 0.3, 1.5))(
        LossInputs({"logprobs": logprobs, "entropy": zeros + 2}, mask, (5,), fields)
    )
    sums = {name: float(metric.sum) for name, metric in metrics.items()}
    # By token: 0.5 is clipped to 0.8; 0.5 is not clipped; 2 is clipped to 1.3; 2 is dual-clipped to 1.5.
    assert sums["policy_loss"] == pytest.approx(0.8 - 0.5 - 1.3 + 1.5)
    assert sums["clip_fraction_lower"] == sums["clip_fraction_upper"] == sums["clip_fraction_dual"] == 1
    assert sums["clip_fraction"] == 3
    assert sums["entropy"] == 8
    assert sums["ratio"] == pytest.approx(5)
    assert sums["ratio/max"] == pytest.approx(2)
    assert sums["ppo_kl"] == pytest.approx(0)
    assert sums["ppo_kl_k3"] == pytest.approx(2 * (0.5 - 1 + math.log(2)) + 2 * (2 - 1 - math.log(2)))
    assert sums["rollout_mismatch"] == pytest.approx(0.4)
    assert sums["rollout_mismatch/max"] == pytest.approx(0.3)
    # KL(rollout || trainer), trainer / rollout = exp(-0.1) and exp(0.3).
    assert sums["rollout_mismatch_kl"] == pytest.approx(math.exp(-0.1) - 1 + 0.1 + math.exp(0.3) - 1 - 0.3)


def test_the_mismatch_is_over_the_tokens_whose_log_prob_the_rollout_gave() -> None:
    trainer, rollout = torch.tensor([-1.0, -2.0, -3.0, 0.0]), torch.tensor([-1.5, math.nan, -3.0, 0.0])
    metrics = mismatch_metrics(trainer, rollout, torch.tensor([True, True, True, False]))
    w = math.exp(0.5)
    assert metric_values(metrics) == pytest.approx(
        {
            "rollout_mismatch_share": 2 / 3,
            "rollout_mismatch": 0.5 / 2,
            "rollout_mismatch/max": 0.5,
            "rollout_mismatch_kl": (w - 1 - 0.5) / 2,
            # E_q[w log w] with the control variate w - 1.
            "rollout_mismatch_kl_reverse": (w * 0.5 - w + 1) / 2,
            "rollout_ratio": (w + 1) / 2,
            "rollout_ratio/max": w,
            "rollout_ess": (w + 1) ** 2 / (w**2 + 1) / 2,
        }
    )


def test_tokens_above_the_bound_on_entropy_have_no_bonus() -> None:
    batch, logprobs, entropy = make_batch()
    entropy.requires_grad_()
    most = float(entropy.detach()[batch.mask_T > 0].median())
    total, _ = replace(BASE, entropy_coeff=0.3, entropy_most=most)(inputs_of(batch, logprobs, entropy))
    [gradient] = torch.autograd.grad(total, entropy)
    has_bonus = (batch.mask_T > 0) & (entropy <= most)
    assert torch.equal(gradient, -0.3 * has_bonus.double())
    assert 0 < has_bonus.sum() < (batch.mask_T > 0).sum()


def test_a_kl_penalty_without_reference_is_an_error() -> None:
    batch, logprobs, entropy = make_batch()
    fields = {"advantages": batch.fields["advantages"]}
    with pytest.raises(ValueError, match=r"kl_ctl=0.1.*no `ref_logprobs`"):
        replace(BASE, kl_coeff=0.1)(
            LossInputs({"logprobs": logprobs, "entropy": entropy}, batch.mask_T, batch.lengths, fields)
        )


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 3}, {"min_new_tokens": 1}])
def test_log_probs_of_a_truncated_distribution_are_not_compared(truncation: dict[str, float]) -> None:
    batch, logprobs, entropy = make_batch()
    fields = {**batch.fields, "rollout_logprobs": logprobs.detach()}
    inputs = LossInputs({"logprobs": logprobs, "entropy": entropy}, batch.mask_T, batch.lengths, fields)
    actor = ActorConfig(path="m")
    _, metrics = build_policy_loss(actor, GenerationConfig())(inputs)
    _, truncated = build_policy_loss(actor, GenerationConfig.model_validate(truncation))(inputs)
    assert metrics.keys() - truncated.keys() == {
        "rollout_mismatch", "rollout_mismatch/max", "rollout_mismatch_kl", "rollout_mismatch_kl_reverse",
        "rollout_mismatch_share", "rollout_ratio", "rollout_ratio/max", "rollout_ess",
    }  # fmt: skip


def test_old_log_probs_may_be_the_rollouts() -> None:
    batch, logprobs, entropy = make_batch()
    actor = ActorConfig(path="m", recompute_logprob=False)
    fields = {name: batch.fields[name] for name in ("advantages", "rollout_logprobs")}
    loss = build_policy_loss(actor, GenerationConfig())
    total, metrics = loss(raw_inputs(logprobs, entropy, batch.mask_T, batch.lengths, fields))
    as_old = {"advantages": fields["advantages"], "old_logprobs": fields["rollout_logprobs"]}
    wanted, _ = replace(loss, old_is_rollout=False)(raw_inputs(logprobs, entropy, batch.mask_T, batch.lengths, as_old))
    on_policy, _ = replace(loss, old_is_rollout=False)(
        raw_inputs(logprobs, entropy, batch.mask_T, batch.lengths, {"advantages": fields["advantages"]})
    )
    assert total == wanted
    assert total != on_policy
    assert metrics["rollout_mismatch"].sum > 0


def test_from_config_reads_every_option() -> None:
    sampling = GenerationConfig(temperature=0.7)
    config = ActorConfig(
        path="m",
        eps_clip=0.1,
        c_clip=3.0,
        loss_aggregation="sequence_sum",
        entropy_coeff=0.2,
        kl_ctl=0.3,
        kl_estimator="k2",
        kl_clip=10.0,
    )
    wanted = PolicyLoss(
        0.7, PPO(0.1, None, 3.0), "sequence_sum", 1024, 0.2, kl_coeff=0.3, kl_estimator="k2", kl_clip=10.0
    )
    assert build_policy_loss(config, sampling) == wanted
    assert build_policy_loss(config, GenerationConfig(top_k=5)).rollout_is_truncated
    in_reward = config.model_copy(update={"kl_in": "reward", "eps_clip_higher": 0.28, "loss_length": 7})
    assert build_policy_loss(in_reward, sampling) == replace(
        wanted, surrogate=PPO(0.1, 0.28, 3.0), kl_coeff=0.0, length=7
    )
    assert build_policy_loss(config, sampling).entropy_gradient
    assert not BASE.entropy_gradient


def test_sft_loss_is_the_negative_log_likelihood_of_the_response() -> None:
    batch, logprobs, entropy = make_batch()
    loss = SFTLoss()
    total, metrics = loss(inputs_of(batch, logprobs, entropy))
    trained = [t for t in range(batch.n_tokens) if batch.mask_T[t]]
    assert total.item() / loss.normalizer(batch.totals()) == pytest.approx(
        -sum(logprobs[t].item() for t in trained) / len(trained)
    )
    assert metrics["nll"].sum == total
    assert float(metrics["entropy"].sum) == pytest.approx(sum(entropy[t].item() for t in trained))


@pytest.mark.parametrize("lengths", [(3,), ()])
def test_a_batch_without_trained_tokens_costs_nothing(lengths: tuple[int, ...]) -> None:
    n = sum(lengths)
    fields = {name: torch.ones(n) for name in ("advantages", "rollout_logprobs")}
    batch = Batch(lengths, torch.zeros(n, dtype=torch.int64), torch.zeros(n), fields)
    logprobs = torch.zeros(n, requires_grad=True)
    losses: list[PolicyLoss | SFTLoss] = [
        *(replace(BASE, aggregation=a) for a in ("token_mean", "sequence_mean", "sequence_sum")),
        SFTLoss(),
    ]
    for loss in losses:
        total, metrics = loss(inputs_of(batch, logprobs, torch.zeros(n)))
        assert metric_values(metrics) == {}, "no metric is over no token"
        assert total.item() == 0
        assert total.requires_grad
        assert loss.normalizer(batch.totals()) == 1


def test_a_sequence_is_masked_as_a_whole_if_its_tokens_have_different_advantages() -> None:
    """The mean drift of 1 is above 0.1; the mean advantage decides, and not each token's own."""
    for advantages, masked in (((-0.5, 0.25, -0.25), 3), ((0.5, -0.25, 0.25), 0)):
        logprobs_T = torch.zeros(3, requires_grad=True)
        fields = {"advantages": torch.tensor(advantages), "old_logprobs": torch.ones(3)}
        inputs = LossInputs({"logprobs": logprobs_T, "entropy": torch.zeros(3)}, torch.ones(3), (3,), fields)
        loss, metrics = PolicyLoss(1.0, PPO(), opsm_delta=0.1)(inputs)
        loss.backward()
        assert logprobs_T.grad is not None
        assert bool(logprobs_T.grad.any()) == (masked == 0)
        assert metrics["opsm_masked"].sum == masked
