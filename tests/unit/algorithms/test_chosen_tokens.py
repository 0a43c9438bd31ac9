"""The tokens that losses and masks choose of a mini-batch, against a loop, however replicas share it."""

from __future__ import annotations

import random
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch

from fivefold.algorithms.batch_steps import BatchStep
from fivefold.algorithms.corrections import KEPT_TOKENS, SecondMomentMask, largest_kept
from fivefold.algorithms.losses.covariance import CHOSEN, CovarianceChoice, KLCov, random_numbers
from fivefold.algorithms.losses.entropy_clips import CLIPPED, ClipB, ClipV
from fivefold.batch import Batch
from tests.unit.algorithms.random_batches import random_split, sample


def chosen_by(choice: BatchStep, batch: Batch, split: list[list[int]], field: str = CHOSEN) -> list[bool]:
    """Return on which tokens `field` is 1 if one thread a replica has the sequences that `split` gives it."""
    barrier, given = Barrier(len(split)), [torch.empty(0)] * len(split)

    def run(replica: int) -> Batch:
        def gather(own: torch.Tensor) -> list[torch.Tensor]:
            given[replica] = own
            barrier.wait(120)
            everything = list(given)
            barrier.wait(120)
            return everything

        return choice(batch.select(split[replica]), gather)

    with ThreadPoolExecutor(len(split)) as pool:
        parts = list(pool.map(run, range(len(split))))
    rows: dict[int, list[bool]] = {}
    for part, indices in zip(parts, split, strict=True):
        rows |= dict(zip(indices, [row.bool().tolist() for row in part.split(part.fields[field])], strict=True))
    return [is_chosen for index in range(len(batch)) for is_chosen in rows[index]]


@pytest.mark.parametrize("at_random", [False, True])
def test_the_choice_is_that_of_the_whole_mini_batch_on_any_number_of_replicas(at_random: bool) -> None:
    rng = random.Random(3)
    for _ in range(80):
        batch = sample(rng).batch
        low, high = (-0.2, 0.5) if at_random else (-float("inf"), float("inf"))
        choice = CovarianceChoice(0.3, low, high, at_random)
        trained = [t for t in range(batch.n_tokens) if batch.mask_T[t]]
        if not trained:
            continue
        old, a = ([batch.fields[name][t].item() for t in trained] for name in ("old_logprobs", "advantages"))
        covariance = [(x - statistics.mean(old)) * (y - statistics.mean(a)) for x, y in zip(old, a, strict=True)]
        if len(covariance) < 3 or len({round(c, 9) for c in covariance}) < len(covariance):
            continue  # rounding would decide between equals
        inside = [i for i, c in enumerate(covariance) if low <= c <= high]
        numbers = random_numbers(batch).tolist()
        score = [numbers[t] for t in trained] if at_random else covariance
        best = sorted(inside, key=lambda i: -score[i])[: max(1, int(0.3 * len(trained)))]
        wanted = {trained[i] for i in best}
        if rng.random() < 0.5:
            old_T = batch.fields["old_logprobs"]
            others = {name: value for name, value in batch.fields.items() if name != "old_logprobs"}
            batch = replace(batch, fields={**others, "rollout_logprobs": old_T})
        for split in ([list(range(len(batch)))], random_split(rng, len(batch))):
            got = chosen_by(choice, batch, split)
            assert {t for t, is_chosen in enumerate(got) if is_chosen} == wanted


def test_clip_b_and_clip_v_leave_out_bad_tokens_that_lower_the_entropy_on_any_number_of_replicas() -> None:
    rng, n_left_out = random.Random(7), {ClipB: 0, ClipV: 0}
    for _ in range(120):
        batch, mu = sample(rng).batch, rng.choice([0.0, 0.3, 1.0])
        trained = [t for t in range(batch.n_tokens) if batch.mask_T[t]]
        if not trained:
            continue
        changes, a = ({t: batch.fields[name][t].item() for t in trained} for name in ("entropy_changes", "advantages"))
        mean, deviation = statistics.fmean(changes.values()), statistics.pstdev(changes.values())
        for loss, least, most in (
            (ClipB(mu=mu), mean - mu * deviation, len(trained)),
            (ClipV(mu=mu, max_share=0.3), -mu * deviation, max(1, int(0.3 * len(trained)))),
        ):
            low = [t for t in trained if a[t] < 0 and changes[t] < least] if deviation > 1e-12 else []
            wanted = set(sorted(low, key=lambda t: changes[t])[:most])
            n_left_out[type(loss)] += len(wanted)
            for split in ([list(range(len(batch)))], random_split(rng, len(batch))):
                got = chosen_by(loss.before, batch, split, CLIPPED)
                assert {t for t, is_left_out in enumerate(got) if is_left_out} == wanted
    assert min(n_left_out.values()) > 50


def test_kl_cov_chooses_no_token_of_a_mini_batch_without_signal() -> None:
    rng = random.Random(4)
    for _ in range(20):
        batch = sample(rng).batch
        equal_T = torch.full_like(batch.fields["advantages"], 0.5)
        split = random_split(rng, len(batch))
        assert not any(chosen_by(KLCov(0.3).before, batch.with_fields(advantages=equal_T), split))


def test_of_tokens_of_equal_covariance_no_more_are_chosen_than_the_share() -> None:
    """Tokens of probability 1 have the log-prob 0: in the sequences of the largest advantage, all are equal."""
    lengths, rng = (100, 100, 100, 100), random.Random(6)
    logprobs_T = torch.where(torch.arange(400) % 4 == 0, -2.0, 0.0)
    fields = {
        "old_logprobs": logprobs_T,
        "advantages": torch.repeat_interleave(torch.tensor([1.0, -1.0, 1.0, -1.0]), 100),
        "sequence_number": torch.repeat_interleave(torch.arange(4.0), 100),
    }
    batch = Batch(lengths, torch.zeros(400, dtype=torch.int64), torch.ones(400), fields)
    whole = chosen_by(KLCov(0.1).before, batch, [list(range(4))])
    assert sum(whole) == 40
    # Covariances are 0.5 * 1 where the log-prob is 0 and A is 1, and 1.5 * 1 where it is -2 and A is -1.
    assert {t for t, is_chosen in enumerate(whole) if is_chosen} <= {t for t in range(400) if t % 4 == 0}
    most = chosen_by(KLCov(0.25).before, batch, [list(range(4))])
    wanted = {t for t in range(400) if t % 4 == 0 and (t // 100) % 2}
    assert sum(most) == 100
    assert wanted < {t for t, is_chosen in enumerate(most) if is_chosen}
    for share, expected in ((0.1, whole), (0.25, most)):
        assert chosen_by(KLCov(share).before, batch, random_split(rng, 4)) == expected


def test_random_numbers_are_spread_evenly() -> None:
    lengths = (500,) * 8
    number_T = torch.repeat_interleave(torch.arange(8.0), 500)
    batch = Batch(lengths, torch.zeros(4000, dtype=torch.int64), torch.ones(4000), {"sequence_number": number_T})
    numbers_T = random_numbers(batch)
    assert numbers_T.unique().numel() == 4000
    counts = torch.histc(numbers_T, 10, 0, 1)
    assert counts.min() > 330
    assert counts.max() < 470


def test_the_second_moment_of_the_kept_tokens_is_below_its_bound_and_no_further_one_could_be_kept() -> None:
    rng = random.Random(5)
    for _ in range(80):
        batch, bound = sample(rng).batch, rng.choice([1e-5, 0.01, 0.1, 10.0])
        old_T, rollout_T = batch.fields["old_logprobs"], batch.fields["rollout_logprobs"]
        squares = {t: (old_T[t] - rollout_T[t]).item() ** 2 for t in range(batch.n_tokens) if batch.mask_T[t]}
        smallest = sorted(squares, key=lambda t: squares[t])
        wanted: set[int] = set()
        for t in smallest:
            if sum(squares[other] for other in {*wanted, t}) / (len(wanted) + 1) > bound:
                break
            wanted.add(t)
        for split in ([list(range(len(batch)))], random_split(rng, len(batch))):
            got = chosen_by(SecondMomentMask(bound), batch, split, KEPT_TOKENS)
            assert {t for t, is_kept in enumerate(got) if is_kept} == wanted


def test_tokens_of_equal_weights_are_kept_or_left_out_together() -> None:
    assert largest_kept(torch.tensor([1.0, 1.0, 0.0, 1.0]).double(), 0.6) == 0.0
    assert largest_kept(torch.tensor([1.0, 1.0, 0.0, 1.0]).double(), 0.75) == 1.0
    assert largest_kept(torch.tensor([2.0, 2.0]).double(), 1.0) == -float("inf")
