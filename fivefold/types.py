"""What travels between the rooms: prompts, completions, samples and ragged batches.

Prompt ──rollout──> Completion ──reward──> Sample ──pack──> Batch ──> engine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One problem of a data set, tokenized."""

    index: int
    """Row of the data set (after filtering); identifies the prompt in logs and resumes."""
    text: str
    """The prompt as the model sees it, chat template applied."""
    token_ids: tuple[int, ...]
    """`text`, tokenized."""
    ground_truth: Any
    """What the reward function compares with; whatever the data set holds."""
    data_source: str = ""
    """Name of the data set or task the prompt comes from; rewards may dispatch on it."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The data set's `extra_info` column, handed to the reward function unchanged."""


@dataclass(frozen=True)
class Completion:
    """One sampled answer to one prompt."""

    token_ids: tuple[int, ...]
    """Sampled tokens, the end-of-sequence token included where one was sampled."""
    logprobs: tuple[float, ...]
    """log p(token) under the distribution that was sampled from (after temperature, top-k, top-p)."""
    finish_reason: FinishReason
    """`stop`: an end or stop token was sampled. `length`: the token limit was reached."""
    weight_version: int
    """Version of the weights that sampled it: the training steps they had seen."""


@dataclass(frozen=True)
class Sample:
    """A prompt with one completion and its reward."""

    prompt: Prompt
    completion: Completion
    response_text: str
    """The completion, decoded without special tokens."""
    reward: float

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.prompt.token_ids) + len(self.completion.token_ids)


@dataclass(frozen=True)
class Batch:
    """Sequences laid end to end without padding.

    A per-token field holds, at token t, what belongs to *predicting token t* from the tokens before it:
    `logprobs[t] = log p(token[t] | token[<t])`. The first token of a sequence is predicted by nothing, so its
    mask is 0 and its other fields are ignored.

        tokens   p p p r r r | p p r r          lengths (6, 4)
        mask     0 0 0 1 1 1 | 0 0 1 1
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence; they sum to T."""
    tokens_T: torch.Tensor
    """int64 [T]: token ids."""
    mask_T: torch.Tensor
    """float32 [T]: 1 on tokens that are trained (the response), else 0."""
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """float32 [T] each, by name: `advantages`, `old_logprobs`, `rollout_logprobs`, `ref_logprobs`, ..."""

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        for name, tensor in {"tokens_T": self.tokens_T, "mask_T": self.mask_T, **self.fields}.items():
            if tensor.shape != (total,):
                raise ValueError(
                    f"Batch.{name} has shape {tuple(tensor.shape)}; "
                    f"the lengths sum to {total}, so it must be ({total},)"
                )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def n_tokens(self) -> int:
        """All tokens, prompts included."""
        return self.tokens_T.numel()

    def offsets(self) -> list[int]:
        """Start of each sequence, and T at the end: len(self) + 1 entries."""
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        return offsets

    def select(self, indices: Sequence[int]) -> Batch:
        """The sequences at `indices`, in that order."""
        offsets = self.offsets()
        rows = [torch.arange(offsets[i], offsets[i + 1]) for i in indices]
        tokens = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        return Batch(
            lengths=tuple(self.lengths[i] for i in indices),
            tokens_T=self.tokens_T[tokens],
            mask_T=self.mask_T[tokens],
            fields={name: value[tokens] for name, value in self.fields.items()},
        )

    def to(self, device: torch.device) -> Batch:
        """A copy on `device`."""
        fields = {name: value.to(device, non_blocking=True) for name, value in self.fields.items()}
        return Batch(
            self.lengths,
            self.tokens_T.to(device, non_blocking=True),
            self.mask_T.to(device, non_blocking=True),
            fields,
        )

    def with_fields(self, **fields: torch.Tensor) -> Batch:
        """A copy with per-token fields added or replaced."""
        return Batch(self.lengths, self.tokens_T, self.mask_T, {**self.fields, **fields})

    def split(self, values_T: torch.Tensor) -> list[torch.Tensor]:
        """A per-token tensor [T] as one tensor a sequence."""
        return list(values_T.split(list(self.lengths)))


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    learning_rate: float
    """Rate of this step."""
    skipped: bool
    """The gradient was not finite, and no weight was changed."""
    non_finite: tuple[str, ...] = ()
    """Of a skipped step: parameters whose gradient is not finite, the first few."""
