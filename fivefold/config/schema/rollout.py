"""Generation: the rollout engine and the sampling of completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from fivefold.config.schema.fields import (
    ONE_LINE,
    Fraction,
    ModelDtype,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Sequences,
    Staleness,
)
from fivefold.config.schema.generator import GeneratorConfig
from fivefold.config.schema.rules import OfServers, Rule, above_0, reads_if, rule

TokenId = Annotated[str, BeforeValidator(str), Field(pattern="^[0-9]+$")]
"""A token id as the key of a mapping, which is a text in JSON."""


class GenerationConfig(Section):
    """How completions are sampled.

    Log-probs of sampled tokens belong to the distribution that they are drawn from, with all of these keys. The trainer
    reads `temperature` alone: keys that change the distribution otherwise make sampled tokens off-policy.
    """

    n_samples: Sequences = 8
    """Completions of each prompt; together they are the prompt's group."""
    max_new_tokens: Positive = 1024
    """Most tokens of a completion."""
    max_tokens: Positive | None = None
    """Most tokens of a prompt and its completion together: a long prompt leaves a completion less than
    `max_new_tokens`. null: no bound. Episodes with an `environment` have `environment.max_length`."""
    min_new_tokens: NonNegative = 0
    """Fewest tokens of a completion: before them, no end token and no stop token is sampled."""
    greedy: bool = False
    """Always take the most likely token. It is for `fivefold generate`; training needs samples."""
    temperature: PositiveFloat = 1.0
    """Divides the logits, both in sampling and in every log-prob that training computes."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens that together have this probability; 1: among all."""
    top_k: NonNegative = 0
    """Sample among this many of the most likely tokens; 0: among all."""
    min_p: Fraction = 0.0
    """Sample among the tokens with at least this share of the most likely token's probability; 0: among all."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Divides positive logits of tokens that the prompt or the completion has already, and multiplies negative ones
    (Keskar et al. 2019); SGLang looks at the completion alone. 1: no penalty."""
    logit_bias: dict[TokenId, float] = {}
    """Numbers that are added to the logits of tokens, by token id, before the penalty and the temperature."""
    bad_token_ids: list[NonNegative] = []
    """Tokens that are never sampled."""
    stop_token_ids: list[NonNegative] = []
    """A completion ends after any of these tokens, as after the model's own end-of-sequence tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """A completion ends after any of these texts."""

    @property
    def alterations(self) -> tuple[str, ...]:
        """Names of the keys that make the log-probs of the sampling distribution differ from the model's."""
        return tuple(name for name in _ALTERING if getattr(self, name) != type(self).model_fields[name].default)

    @rule
    def _lengths(self) -> Iterator[str]:
        if self.min_new_tokens > self.max_new_tokens:
            yield (
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}: "
                "lower the first or raise the second"
            )


_ALTERING = ("top_p", "top_k", "min_p", "min_new_tokens", "repetition_penalty", "logit_bias", "bad_token_ids")


_AHEAD = reads_if(above_0("max_head_offpolicyness"))


class ReplayBufferConfig(Section):
    """Samples that are trained again in later steps, besides the new ones (docs/async.md).

    The groups with the largest priority are chosen: the version of the weights that sampled a group, minus `decay`
    times the number of steps that have trained it.
    """

    batch_size: Positive
    """Most groups that a step trains again, in addition to the `train_dataset.batch_size` new ones."""
    max_age: Staleness
    """Most training steps by which the weights that sampled a token may be older than those that are trained on it
    again; older groups leave the buffer."""
    max_uses: Annotated[int, Field(ge=2, le=1000)] = 3
    """Most steps that train a group, the first one among them."""
    cooldown_steps: Positive = 1
    """Steps from one use of a group to the next, at least."""
    decay: NonNegativeFloat = 2.0
    """How many versions of the weights one use counts for in the priority."""
    sigma: NonNegativeFloat = 0.0
    """Standard deviation of noise that is added to the priority."""

    @rule
    def _reach(self) -> Iterator[str]:
        if self.cooldown_steps > self.max_age:
            yield (
                f"cooldown_steps={self.cooldown_steps} is above max_age={self.max_age}, so that no group would be "
                "trained again: lower the first or raise the second"
            )


class SpeculativeConfig(Section):
    """Speculative decoding: a server drafts tokens cheaply, and one pass of the model verifies them
    (docs/rollout.md#speculative-decoding). The tokens have the model's own distribution."""

    method: Literal["mtp", "ngram"]
    """What drafts: the layers for multi-token prediction in the model's folder, as they are there (`mtp`), or what
    followed the same tokens before (`ngram`, for vLLM)."""
    n_tokens: Annotated[int, Field(ge=1, le=32)] = 1
    """Tokens that are drafted before each pass."""


class RolloutConfig(GeneratorConfig):
    """The engine that generates, and where it runs."""

    dtype: ModelDtype | None = None
    """Dtype of the engine's weights; null: `actor.dtype`."""
    max_head_offpolicyness: Staleness = 0
    """Most training steps by which the weights that sample a token may be older than those that are trained on it
    (docs/async.md). Above 0, the next steps' prompts are answered while a step is trained; 0: one after the other."""
    max_concurrent_rollouts: Annotated[Sequences | None, _AHEAD] = None
    """Most prompts that are answered at one time with `max_head_offpolicyness` above 0, on all replicas together; null:
    all that are young enough."""
    recompute_kv_cache: Annotated[bool | None, _AHEAD] = None
    """When weights change while completions are sampled, compute keys and values of their tokens again; otherwise they
    continue with the old ones, which SGLang cannot, nor vLLM on shared devices. null: servers do, the embedded engine
    does not (docs/async.md)."""
    new_tokens_per_chunk: Annotated[Positive | None, _AHEAD, OfServers()] = None
    """Most tokens of a completion that a server is asked for at one time with `max_head_offpolicyness` above 0, so that
    those before them outlive the server and are in checkpoints; null: all (docs/async.md)."""
    colocate: bool | None = None
    """Share the actor's devices, in turn; null: only if the cluster has too few devices for both."""
    quantization: Annotated[Literal["fp8_per_block", "fp8_per_tensor"] | None, OfServers()] = None
    """Let vLLM quantize each layer's weights to FP8 whenever new ones arrive, by blocks of 128 x 128 or a whole matrix.
    The actor stays as it is, and `actor.rollout_correction.method=auto` corrects from the first step on. null: not."""
    speculative: Annotated[SpeculativeConfig | None, OfServers()] = None
    """Speculative decoding. null: the model samples one token at a time."""
    seeded: Annotated[bool, OfServers("seeds each request")] = False
    """Send a server a seed with each training request. It costs vLLM a quarter of its speed, and its completions still
    depend on the batch. The embedded engine is always seeded, and so is an evaluation that samples."""
    logprob_share: Annotated[Annotated[float, Field(gt=0, le=1)] | None, OfServers("gives every log-prob")] = None
    """Share of a step's prompts for which a server is asked for the log-probs of sampled tokens, which cost it time.
    `rollout_mismatch` is measured over this share. null: all where the loss reads them, which it does too once
    `actor.rollout_correction.method=auto` corrects it, otherwise an eighth."""
    weight_transport: Annotated[str, Field(pattern=ONE_LINE)] = "auto"
    """How weights reach the engine: `folder` (through host memory), `ipc` (CUDA IPC, on shared GPUs), `nccl` (between
    GPUs). `auto`: the first of `ipc`, `nccl` and `folder` that the placement allows and that has been measured with
    the engine (docs/rollout.md). `adapter`: the adapters of `actor.lora` alone, through host memory, which each replica
    merges into the weights of the model's files. `served_adapter`: likewise, and a server keeps them next to its
    weights, unmerged (docs/lora.md)."""
    sync_freq_steps: Positive = 1
    """Training steps from one update of the rollout's weights to the next, which `max_head_offpolicyness` must allow:
    it is at least one less. An evaluation and a run that resumes update them too."""
    replay_buffer: Annotated[
        ReplayBufferConfig | None,
        Rule(
            above_0("max_head_offpolicyness"),
            why="trains on samples of older weights, which a synchronous run does not correct for",
        ),
    ] = None
    overlap_weight_sync: bool | None = None
    """Let the trainer begin its next step while the engines take a copy of its weights from host memory, with
    `max_head_offpolicyness` above 0 and separate devices. null: if weights go through host memory anyway, with
    `weight_transport: folder`."""
    verify_weights: bool = False
    """Compare a checksum of the weights that arrived with one of those that were sent, at every update."""

    @rule
    def _updates(self) -> Iterator[str]:
        if self.sync_freq_steps > self.max_head_offpolicyness + 1:
            yield (
                f"sync_freq_steps={self.sync_freq_steps} makes weights up to {self.sync_freq_steps - 1} training steps "
                f"old, and max_head_offpolicyness={self.max_head_offpolicyness} allows fewer: raise the second to "
                f"{self.sync_freq_steps - 1}, or lower the first"
            )

    @rule
    def _buffer(self) -> Iterator[str]:
        buffer, age = self.replay_buffer, self.max_head_offpolicyness
        if buffer is not None and 0 < age >= buffer.max_age:
            yield (
                f"replay_buffer.max_age={buffer.max_age} must be above max_head_offpolicyness={age}, because groups "
                "are up to so old when they are trained first: raise the first"
            )

    @property
    def oldest(self) -> int:
        """Most training steps by which the weights that sampled a token may be older than those trained on it."""
        return self.max_head_offpolicyness if self.replay_buffer is None else self.replay_buffer.max_age

    @property
    def takes_turns(self) -> bool | None:
        """Whether the rollout shares the actor's devices, in turn."""
        return self.colocate

    def keeps_cache(self, *, is_server: bool) -> bool:
        """Return whether running completions continue with the keys and values that they have when weights change."""
        return not (is_server if self.recompute_kv_cache is None else self.recompute_kv_cache)

    @property
    def omits_logprobs(self) -> bool:
        """Whether the recipe itself leaves log-probs out that a server could give."""
        return self.logprob_share is not None and self.logprob_share < 1
