"""What to tell the user of a step without a signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fivefold.types import Sample


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
