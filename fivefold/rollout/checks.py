"""Checks of a request against a model's config, before the model gets it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.rollout.protocol import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_request(request: GenerationRequest, sampling: SamplingParams, config: PreTrainedConfig) -> None:
    """Refuse a request that the model cannot answer.

    Raises:
        ValueError: a token outside the model's vocabulary, a prompt without tokens, or a prompt and a completion that
            could exceed the model's positions.
    """
    length, vocabulary = len(request.token_ids), config.vocab_size
    if strays := [token for token in sampling.stop_token_ids if not 0 <= token < vocabulary]:
        raise ValueError(
            f"gconfig.stop_token_ids holds {strays[0]}, but the model's vocabulary has {vocabulary} tokens: "
            f"give ids from 0 to {vocabulary - 1}"
        )
    if length == 0:
        raise ValueError("a prompt has no tokens; the model needs at least one to continue from")
    if length + sampling.max_new_tokens > config.max_position_embeddings:
        raise ValueError(
            f"a prompt of {length} tokens with max_new_tokens={sampling.max_new_tokens} exceeds the model's "
            f"{config.max_position_embeddings} positions: lower max_new_tokens, or shorten the prompt"
        )
    if strays := [token for token in request.token_ids if not 0 <= token < vocabulary]:
        raise ValueError(
            f"a prompt holds token {strays[0]}, but the model's vocabulary has {vocabulary}: "
            "tokenizer and model do not belong together"
        )
