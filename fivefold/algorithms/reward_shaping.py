"""What happens to rewards before they become advantages: penalties on length, a bias, a scale and a clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.config.schema.roles import ActorConfig
from fivefold.config.schema.rollout import GenerationConfig


@dataclass(frozen=True)
class RewardShaping:
    """Computes R' = clip((R - penalty + bias) * scaling, -clip, clip).

    With length l and limit L, both in tokens, the penalty is the sum of

        factor * min(1, max(0, (l - (L - overlong)) / overlong))     soft over-long punishment (DAPO: Yu et al. 2025,
                                                                     arXiv 2503.14476, eq. 13)
        length_penalty * l / L                                       linear in the length
    """

    limit: int
    """Most tokens of a completion."""
    bias: float = 0.0
    scaling: float = 1.0
    clip: float | None = None
    overlong: int | None = None
    """Tokens before the limit at which the over-long punishment begins; None: there is none."""
    factor: float = 1.0
    length_penalty: float = 0.0

    @staticmethod
    def of(config: ActorConfig, sampling: GenerationConfig) -> RewardShaping | None:
        """Return the shaping that a recipe asks for; None: rewards stay as they are."""
        limit = sampling.max_new_tokens
        # The paper has 4096 of 20480 tokens.
        overlong = config.overlong_tokens or max(1, limit // 5)
        shaping = RewardShaping(
            limit,
            config.reward_bias,
            config.reward_scaling,
            config.reward_clip,
            overlong if config.overlong_reward_penalty else None,
            config.overlong_penalty_factor,
            config.length_penalty,
        )
        return None if shaping == RewardShaping(limit, factor=shaping.factor) else shaping

    @property
    def has_penalty(self) -> bool:
        """Whether any penalty depends on the length."""
        return self.overlong is not None or self.length_penalty > 0

    def penalty(self, lengths_N: torch.Tensor) -> torch.Tensor:
        """Return float64 [N]: the penalty of completions of these lengths, at least 0."""
        lengths_N = lengths_N.double()
        penalty_N = self.length_penalty * lengths_N / self.limit
        if self.overlong is not None:
            beyond_N = lengths_N - (self.limit - self.overlong)
            penalty_N = penalty_N + self.factor * (beyond_N / self.overlong).clamp(0.0, 1.0)
        return penalty_N

    def __call__(self, rewards_N: torch.Tensor, lengths_N: torch.Tensor) -> torch.Tensor:
        """Shape rewards, float64 [N], of completions of these lengths, int64 [N]."""
        if self.has_penalty:
            rewards_N = rewards_N - self.penalty(lengths_N)
        return self.scaled(rewards_N)

    def scaled(self, rewards_N: torch.Tensor) -> torch.Tensor:
        """Return rewards, float64 [N], with bias, scale and clip alone."""
        shaped_N = (rewards_N + self.bias) * self.scaling
        return shaped_N if self.clip is None else shaped_N.clamp(-self.clip, self.clip)
