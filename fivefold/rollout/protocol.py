"""What rollout engines are asked, and how they sample.

prompts ─group_requests─> GenerationRequest ... ──engine──> Completion ...
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from operator import add, sub
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fivefold.config.schema.rollout import GenerationConfig
from fivefold.config.schema.train import EvaluatorConfig, TrainRecipe
from fivefold.types import FinishReason, PlacedImage

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


MONITORED_SHARE = 1 / 8
"""Share of the prompts whose log-probs are asked for where they only tell how far rollout and trainer are apart."""


@dataclass(frozen=True)
class ServerCounts:
    """Tokens that a server has counted. All are 0 where it counts none, or does not tell."""

    drafted: int = 0
    """Drafted for the model to verify."""
    accepted: int = 0
    """Those among them that it accepted."""
    prompt: int = 0
    """Of prompts, each turn's with all turns before it."""
    cached: int = 0
    """Those among them that were in the server's cache of prefixes."""

    def __add__(self, more: ServerCounts) -> ServerCounts:
        return ServerCounts(*map(add, astuple(self), astuple(more)))

    def __sub__(self, earlier: ServerCounts) -> ServerCounts:
        return ServerCounts(*map(sub, astuple(self), astuple(earlier)))


@dataclass(frozen=True, eq=False)
class Begun:
    """What a completion has so far: n tokens, from which another server can continue."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """[n]: as in `Completion`; NaN where they were not asked for."""
    versions: npt.NDArray[np.int32]
    """[n]: version of the weights that sampled each token."""
    finish_reason: FinishReason | None
    """Why it has ended; None: it has not."""

    @staticmethod
    def joined(parts: Sequence[Begun]) -> Begun:
        """Return the parts of one completion, at least one, as one."""
        return Begun(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.versions for part in parts]),
            parts[-1].finish_reason,
        )


Prefix = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens, and the digests of the images among them."""


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample. A group is several requests with the same prompt and different seeds."""

    token_ids: tuple[int, ...]
    """The prompt."""
    seed: int
    """Decides every random choice of this completion, whichever replica and batch it lands in. A server gets it only if
    the sampling is `seeded`."""
    wants_logprobs: bool = True
    """Whether the log-probs of the sampled tokens are asked for. The embedded engine always gives them."""
    begun: Begun | None = None
    """What the completion has already, from which a server continues. The embedded engine starts over, with the same
    random numbers."""
    images: tuple[PlacedImage, ...] = ()
    """The images among the prompt's tokens."""

    @property
    def key(self) -> Prefix:
        """What tells its prompt from others: tokens, and the digests of images."""
        return self.token_ids, tuple(image.digest for image in self.images)


def n_begun(requests: Sequence[GenerationRequest]) -> int:
    """Return the number of tokens that completions have so far."""
    return sum(len(request.begun.token_ids) for request in requests if request.begun is not None)


NEVER = -1e9
"""Logit, or bias of one, of a token that is not sampled: its probability is 0 in float32. Servers take no infinity."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. All fields but the last two are documented on `GenerationConfig`."""

    max_new_tokens: int
    min_new_tokens: int
    greedy: bool
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    seeded: bool = True
    """Whether servers are given each request's seed."""
    logprob_share: float = 1.0
    """Share of the prompts for whose completions log-probs are asked; 0: for none."""

    def __post_init__(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}: "
                "lower the first or raise the second"
            )
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which every completion contains: remove it")

    @classmethod
    def from_config(cls, config: GenerationConfig) -> SamplingParams:
        """Return the sampling of the recipe's `gconfig`."""
        return cls(
            max_new_tokens=config.max_new_tokens,
            min_new_tokens=config.min_new_tokens,
            greedy=config.greedy,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=tuple(config.stop_token_ids),
            stop=tuple(config.stop),
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in config.logit_bias.items()),
            bad_token_ids=tuple(config.bad_token_ids),
            max_tokens=config.max_tokens,
        )

    def after(self, n_prompt: int) -> SamplingParams:
        """Return how a completion is sampled after a prompt of `n_prompt` tokens, fewer than `max_tokens`."""
        room = self.max_new_tokens if self.max_tokens is None else self.max_tokens - n_prompt
        return self.within(room)

    def within(self, room: int) -> SamplingParams:
        """Return this sampling with completions of at most `room` tokens, at least 1."""
        if self.max_new_tokens <= room:
            return self
        return replace(self, max_new_tokens=room, min_new_tokens=min(room, self.min_new_tokens))

    def never(self, token_ids: Iterable[int]) -> SamplingParams:
        """Return this sampling without some tokens; itself if there are none."""
        more = tuple(token for token in token_ids if token not in self.bad_token_ids)
        return replace(self, bad_token_ids=(*self.bad_token_ids, *more)) if more else self

    @property
    def bias(self) -> dict[int, float]:
        """What is added to the logits of tokens, by token id; those that are never sampled get `NEVER`."""
        return dict(self.logit_bias) | dict.fromkeys(self.bad_token_ids, NEVER)

    @property
    def of_servers(self) -> dict[str, Any]:
        """What servers are asked for under the same names, as far as it is not the default."""
        asked: dict[str, Any] = {}
        if self.min_p > 0 and not self.greedy:
            asked["min_p"] = self.min_p
        if self.repetition_penalty != 1:
            asked["repetition_penalty"] = self.repetition_penalty
        if self.bias:
            asked["logit_bias"] = self.bias
        return asked

    @classmethod
    def for_training(cls, recipe: TrainRecipe) -> SamplingParams:
        """Return the sampling of the prompts that are trained on."""
        share = recipe.rollout.logprob_share
        if share is None:
            share = 1.0 if recipe.loss_reads_rollout_logprobs else MONITORED_SHARE
        return replace(cls.from_config(recipe.gconfig), seeded=recipe.rollout.seeded, logprob_share=share)

    @classmethod
    def for_evaluation(cls, config: GenerationConfig, evaluator: EvaluatorConfig) -> SamplingParams:
        """Return the sampling of held-out prompts: `gconfig`, with the evaluator's own keys.

        Nothing reads the log-probs of an evaluation, and a greedy one makes no random choice that a seed would decide.
        """
        return replace(cls.from_config(evaluator.sampling(config)), seeded=not evaluator.greedy, logprob_share=0.0)


def group_requests(
    prompts: Sequence[Sequence[int]], n_samples: int, key: tuple[int | str, ...], logprob_share: float = 1.0
) -> list[GenerationRequest]:
    """Return `n_samples` requests for each prompt, a prompt's requests side by side.

    A request's seed is a hash of `key` (the run's seed, the phase, the step, ...), of the prompt's index in `prompts`
    and of the sample's index in its group. So that seeds do not depend on the number of replicas, make all requests
    first, and then distribute them.

    Log-probs are asked for the whole groups of `logprob_share` of the prompts, spread evenly over `prompts`, and for
    the first group at least unless the share is 0.
    """
    return [
        GenerationRequest(tuple(token_ids), _hash_seed(*key, row, sample), _is_in_share(row, logprob_share))
        for row, token_ids in enumerate(prompts)
        for sample in range(n_samples)
    ]


def turn_seed(seed: int, token_ids: tuple[int, ...]) -> int:
    """Return the seed of a later request of an episode, whose first has `seed`.

    It follows from the tokens before the completion, so that it does not depend on the order of requests in which an
    agent asks several things at once.
    """
    return _hash_seed("turn", seed, *token_ids)


def question_seed(seed: int, token_ids: tuple[int, ...], attempt: int) -> int:
    """Return the seed of an answer to a judge's question: the same question has the same answers in every run."""
    return _hash_seed("judge", seed, attempt, *token_ids)


def _is_in_share(row: int, share: float) -> bool:
    """Return whether row `row` belongs to a share that is spread evenly over all rows."""
    return math.ceil((row + 1) * share) > math.ceil(row * share)


def _hash_seed(*key: int | str) -> int:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


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
