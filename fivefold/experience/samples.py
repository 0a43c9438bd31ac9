"""Rewards of generated samples, and metrics of a step's samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import comb
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.data.sampler import Outcome
from fivefold.observe.sample_parts import TokenValues
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.remote_batch import RemoteBatch, read_columns
from fivefold.roles.reward_model import RewardModel
from fivefold.types import Sample

PERCENTILES = (10, 50, 90)
"""Percentiles of the lengths of responses that are reported."""


def judged(
    groups: Sequence[Sequence[Sample]], rewards: RewardSet, batch: RemoteBatch | None = None
) -> list[dict[str, float]]:
    """Compute the rewards of each sample of groups, by name, without those that a reward model gives.

    A sample that failed has none.

    Args:
        groups: the samples of each group.
        rewards: the recipe's rewards.
        batch: the sequences of all samples, whose tokens come to this process; None: no reward reads them.

    Raises:
        ValueError: a reward function failed, or returned anything but a finite number; see `compute_rewards`. Or an
            environment gave other rewards than the recipe names.
    """
    samples = [sample for group in groups for sample in group]
    whole = [sample for sample in samples if not sample.has_failed]
    for sample in whole:
        rewards.check_given(sample.prompt, sample.rewards)
    sizes = [n for group in groups if (n := sum(not sample.has_failed for sample in group))]
    texts: Sequence[str] = [sample.response_text for sample in whole]
    if batch is not None:
        texts = [
            text for text, sample in zip(_with_tokens(samples, batch), samples, strict=True) if not sample.has_failed
        ]
    values = iter(rewards.judge([sample.prompt for sample in whole], texts, sizes))
    return [{} if sample.has_failed else next(values) for sample in samples]


def _with_tokens(samples: Sequence[Sample], batch: RemoteBatch) -> list[str]:
    """Return the text of each sample, with its sampled tokens."""
    from fivefold.rewards.token_rewards import TokenizedText  # here, because most rewards read texts alone

    texts: list[str] = []
    for sample, columns in zip(samples, read_columns(batch, len(batch)), strict=True):
        (places,) = np.nonzero(columns["mask"])
        texts.append(TokenizedText(sample.response_text, columns["tokens"][places].tolist(), places.tolist()))
    return texts


def model_scores(
    samples: Sequence[Sample], batch: RemoteBatch, rewards: RewardSet, model: RewardModel
) -> dict[int, float]:
    """Return the reward model's scores of the samples of `batch` that it is for, by the index of the sample."""
    scored = rewards.scored_by_model([sample.prompt for sample in samples])
    scored = [index for index in scored if not samples[index].has_failed]
    return dict(zip(scored, model.scores(batch.select(scored)).tolist(), strict=True)) if scored else {}


def rewarded(
    samples: Sequence[Sample],
    judged: Sequence[Mapping[str, float]],
    rewards: RewardSet,
    scores: Mapping[int, float],
) -> list[Sample]:
    """Return samples with their rewards; those that failed stay as they are.

    Args:
        samples: samples without rewards.
        judged: the rewards of each, as `judged` returns them.
        rewards: the recipe's rewards.
        scores: the reward model's scores, by the index of the sample.

    Raises:
        ValueError: a score is not finite.
    """
    return [
        sample
        if sample.has_failed
        else sample.rewarded(
            rewards.complete(sample.prompt, sample.response_text, values, scores.get(index)),
            rewards.weights,
            rewards.scored_by(sample.prompt),
        )
        for index, (sample, values) in enumerate(zip(samples, judged, strict=True))
    ]


def idle_shares(rollout: Mapping[str, float], seconds: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return `idle/trainer` and `idle/rollout` of a step in which the sides take turns.

    Args:
        rollout: metrics of the rollout; `replica_busy/mean` is the share of its time in which a replica works.
        seconds: seconds of each phase.
        whole: seconds of the step.
    """
    generating = seconds.get("rollout", 0.0)
    busy = generating * rollout.get("replica_busy/mean", 1.0)
    waiting = generating + seconds.get("rewards", 0.0)
    return {"idle/trainer": waiting / whole, "idle/rollout": 1.0 - busy / whole}


def outcomes(samples: Sequence[Sample]) -> list[Outcome]:
    """Return what the completions of each prompt earned, in the form that samplers take."""
    groups: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.prompt.index].append(sample)
    return [Outcome(index, tuple(sample.reward for sample in own), accuracy(own)) for index, own in groups.items()]


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return accuracies (see below), response lengths in tokens, and the share of samples cut off at the limit.

    Of the lengths there are the mean, the largest, and percentiles as `response_length/p<percent>`.
    """
    lengths = [sample.n_sampled for sample in samples]
    return {
        "accuracy": accuracy(samples),
        **pass_at_k(samples),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        **{f"response_length/p{percent}": float(np.percentile(lengths, percent)) for percent in PERCENTILES},
        "truncated": sum(sample.is_truncated for sample in samples) / len(samples),
        **turn_metrics(samples),
    }


def turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return turns and sequences of episodes, what they took, and `episode/ended/<reason>`, the share of each reason.

    Without an environment there are none. What failed is in `episode/failed`, which the stream knows.
    """
    reasons = [sample.finish_reason for sample in samples if sample.finish_reason not in ("stop", "length")]
    if not reasons:
        return {}
    turns = [sample.n_turns for sample in samples]
    shares = {f"episode/ended/{reason}": reasons.count(reason) / len(samples) for reason in sorted(set(reasons))}
    return {
        "episode/turns/mean": fmean(turns),
        "episode/turns/max": float(max(turns)),
        "episode/sequences/mean": fmean(sample.n_sequences for sample in samples),
        **effort_metrics(samples),
        **shares,
    }


def effort_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the calls of tools, the seconds of the user's code and the tokens by origin, in the mean of episodes."""
    efforts = [sample.effort for sample in samples]
    calls = [effort.calls for effort in efforts if effort.calls is not None]
    return {
        **({"episode/calls/mean": fmean(calls)} if calls else {}),
        "episode/tool_seconds/mean": fmean(effort.seconds for effort in efforts),
        "episode/tool_seconds/max": max(effort.seconds for effort in efforts),
        "episode/tokens/model": fmean(sample.n_sampled for sample in samples),
        "episode/tokens/given": fmean(effort.given - effort.template for effort in efforts),
        "episode/tokens/template": fmean(effort.template for effort in efforts),
    }


def pass_at_k(samples: Sequence[Sample]) -> dict[str, float]:
    """Return `pass_at/<k>`, the mean over prompts of the chance that one of k completions is right.

    It is 1 - C(n - c, k) / C(n, k) for a prompt with c of n completions right, without bias (Chen et al. 2021, arXiv
    2107.03374, eq. 1). k is 2, 4, 8 and so on, up to the completions of the prompt that has the fewest.
    """
    groups: dict[int, list[bool]] = defaultdict(list)
    for sample in samples:
        groups[sample.prompt.index].append(sample.is_right)
    fewest = min(len(group) for group in groups.values())
    return {
        f"pass_at/{k}": fmean(1 - comb(len(group) - sum(group), k) / comb(len(group), k) for group in groups.values())
        for k in (2**power for power in range(1, fewest.bit_length()))
    }


def accuracy(samples: Sequence[Sample]) -> float:
    """Return the share of samples with full reward, by the reward that counts for each."""
    return sum(sample.is_right for sample in samples) / len(samples)


def reward_metrics(samples: Sequence[Sample], rewards: RewardSet, *, by_source: bool) -> dict[str, float]:
    """Return metrics of each of several rewards over the samples that it judged, and by data source.

    They are `reward/<name>/mean`, `reward/<name>/std`, `reward/<name>/min`, `reward/<name>/max` and
    `reward/source/<data_source>/mean`.

    Args:
        samples: the samples with their rewards.
        rewards: the recipe's rewards; one function alone has the metrics of the trained reward and no others.
        by_source: whether the prompts have several data sources, so that the trained reward is reported for each.
    """
    metrics: dict[str, float] = {}
    for name in rewards.weights:
        if values := [sample.rewards[name] for sample in samples if name in sample.rewards]:
            metrics[f"reward/{name}/mean"] = fmean(values)
            metrics[f"reward/{name}/std"] = pstdev(values)
            metrics[f"reward/{name}/min"] = min(values)
            metrics[f"reward/{name}/max"] = max(values)
    for source in sorted({sample.prompt.data_source for sample in samples}) if by_source else ():
        own = [sample.reward for sample in samples if sample.prompt.data_source == source]
        metrics[f"reward/source/{source}/mean"] = fmean(own)
    return metrics


def extremes(samples: Sequence[Sample]) -> list[Sample]:
    """Return the sample with the highest reward and the one with the lowest; one sample if all rewards are equal."""
    best = max(samples, key=lambda sample: sample.reward)
    worst = min(samples, key=lambda sample: sample.reward)
    return [best] if best.reward == worst.reward else [best, worst]


def are_shown(step: int, every: int | None) -> bool:
    """Return whether samples of step `step`, counted from 1, are shown: the first ones, then every `every` steps."""
    return every is not None and (step == 1 or step % every == 0)


def as_record(sample: Sample, **where: Any) -> dict[str, Any]:
    """Return a sample as one line of `samples.jsonl`; `where`, such as the step, comes first."""
    return {
        **where,
        "prompt_index": sample.prompt.index,
        "prompt": sample.prompt.text,
        "response": sample.shown_text,
        "ground_truth": sample.prompt.ground_truth,
        **({"data_source": sample.prompt.data_source} if sample.prompt.data_source else {}),
        "reward": sample.reward,
        **{f"reward/{name}": value for name, value in sample.rewards.items() if name in sample.weights},
        "finish_reason": sample.finish_reason,
        "n_tokens": sample.n_sampled,
        **({"n_turns": sample.n_turns} if sample.n_turns > 1 else {}),
        "oldest_weight_version": sample.versions[0],
        "weight_version": sample.versions[1],
    }


def no_signal(samples: Sequence[Sample], metrics: Mapping[str, float]) -> str | None:
    """Return what a step with a gradient of exactly 0 means, and where to look; None: it has a gradient."""
    if metrics.get("grad_norm") != 0.0:
        return None
    rewards = {sample.reward for sample in samples}
    if len(rewards) == 1:
        of_all = f"all {len(samples)} responses earned {rewards.pop():g}"
    else:
        of_all = "the responses of each prompt earned the same, or the algorithm makes nothing of the difference"
    return (
        f"the gradient was 0, so nothing was learned: {of_all}. Compare responses with their ground truths in "
        "samples.jsonl: the reward may not find the answer (reward.fn, reward.kwargs), responses may be cut off "
        "(gconfig.max_new_tokens; the metric truncated), or the prompts may be too hard or too easy. Later steps "
        "of this kind are not reported"
    )


MANY_SEQUENCES = 1.5
"""Sequences of an episode, in the mean, from which on a note says what they cost."""


def many_sequences(environment: EnvironmentConfig | None, metrics: Mapping[str, float]) -> str | None:
    """Return what it costs that episodes are trained as several sequences; None: they are not, or the recipe asks so.

    Args:
        environment: the recipe's section.
        metrics: metrics of a step.
    """
    n = metrics.get("episode/sequences/mean", 1.0)
    if environment is None or environment.memory is not None or n < MANY_SEQUENCES:
        return None
    keep = "" if environment.keep_thinking else "; environment.keep_thinking=true keeps all that the model wrote"
    return (
        f"an episode is trained as {n:.1f} sequences in the mean, each with all that was read before: the chat "
        f"template rewrites earlier turns, or the agent goes back (fivefold play shows where){keep}. Later steps are "
        "not reported"
    )


TRAINER = "old_logprobs"
REPLACEMENT = "\ufffd"
"""Stands in a token's text for bytes that are a part of a character."""
MOST_PARTS = 4
"""Most tokens that one character takes: its bytes in UTF-8."""


class TokenTexts:
    """Decodes single tokens, each of them once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token; of a character that several tokens make, the first has it, the others none."""
        texts: list[str] = []
        while len(texts) < len(token_ids):
            texts += self._next(token_ids, len(texts))
        return texts

    def whole(self, spans: list[list[int]]) -> list[str]:
        """Return the text of each of several spans of tokens."""
        return self._tokenizer.batch_decode(spans, clean_up_tokenization_spaces=False) if spans else []

    def _next(self, token_ids: Sequence[int], start: int) -> list[str]:
        """Return the texts of the token at `start` and of those that make one character with it."""
        for length in range(1, min(MOST_PARTS, len(token_ids) - start) + 1):
            text = self._decoded(tuple(token_ids[start : start + length]))
            if REPLACEMENT not in text:
                return [text] + [""] * (length - 1)
        return [self._decoded((token_ids[start],))]

    def _decoded(self, token_ids: tuple[int, ...]) -> str:
        if token_ids not in self._known:
            [text] = self._tokenizer.batch_decode([list(token_ids)], clean_up_tokenization_spaces=False)
            self._known[token_ids] = text
        return self._known[token_ids]


def token_values(batch: RemoteBatch, n: int, texts: TokenTexts) -> list[TokenValues]:
    """Return the values of the sampled tokens of the first `n` sequences of a batch, before its update."""
    found = []
    for index, columns in enumerate(read_columns(batch, n)):
        mask = columns["mask"]
        advantages = columns.get("advantages")
        if advantages is None and "advantages" in batch.scalars:
            advantages = np.full(len(mask), batch.scalars["advantages"][index], np.float32)
        found.append(
            TokenValues(
                tokens=texts.of(columns["tokens"][mask].tolist()),
                rollout_logprobs=columns["rollout_logprobs"][mask],
                trainer_logprobs=_masked(columns.get(TRAINER), mask),
                advantages=_masked(advantages, mask),
                versions=columns["versions"][mask],
                reads=_reads(columns["tokens"], mask, texts),
            )
        )
    return found


def _reads(tokens: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return what the model read between its turns, as `TokenValues` has it: all tokens between two sampled ones."""
    (sampled,) = np.nonzero(mask)
    gaps = np.flatnonzero(np.diff(sampled) > 1)
    between = [tokens[sampled[gap] + 1 : sampled[gap + 1]].tolist() for gap in gaps]
    return [{"at": int(gap) + 1, "text": text} for gap, text in zip(gaps, texts.whole(between), strict=True)]


def _masked(values: npt.NDArray[np.float32] | None, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32] | None:
    return None if values is None else values[mask]
