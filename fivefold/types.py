"""The data that packages exchange: prompts, trajectories, samples and ragged batches.

                                 ┌─> Sample      what the driver knows: text, rewards, lengths
Prompt ──environment──> Episode ─┤
         Completion ...          └─> Columns     tokens, log-probs, versions: by reference to the trainer's processes,
                                               where each data-parallel replica assembles a Batch of its rows

An episode is one row of a batch, however many sequences it has: advantages, divisors, mini-batches and steps count
rows. Only the model sees where one sequence of a row ends and the next begins (`cuts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

FinishReason = Literal["stop", "length"]
"""Why a completion ended."""
StopReason = FinishReason | Literal["done", "turns", "context", "time", "failed"]
"""Why an episode ended. One of a single turn ends as its completion does; of several turns: the environment said so
(`done`), it had as many turns as it may have (`turns`), no room for another one (`context`), no time (`time`), or the
environment raised an error (`failed`), and the episode leaves its group."""

TRUNCATED: tuple[StopReason, ...] = ("length", "context")
"""Why an episode ended that a limit on tokens cut off."""

Cuts = tuple[tuple[int, ...], ...]
"""Tokens of each sequence of each row; a row's sequences lie end to end."""

NOT_SAMPLED = -1
"""Weight version of a token that the policy did not sample, but that is part of a prompt or of a tool's answer."""
UNKNOWN_EXPERT = -1
"""Stands in routes for the experts of a token that are not known, such as a completion's last one, which no model was
given."""
ROUTES = "routes"
"""Name of the column, and of the field, of routes."""
Routes = npt.NDArray[np.signedinteger[Any]]
"""Experts of tokens, [tokens, MoE layers, top_k]: int8 of up to 128 experts, else int16."""
ENVIRONMENT = "environment"
"""Name of an environment's reward that has no other name."""
FULL_REWARD = 1.0
"""Least reward of a completion that counts as right."""


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
    """The data set's value with which the reward function compares a completion, of any type."""
    data_source: str = ""
    """Name of the data set or task the prompt comes from; rewards may dispatch on it."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The data set's `extra_info` column, handed to the reward function unchanged."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The chat messages from which `text` was made; None: it was a text."""

    @property
    def chat(self) -> tuple[Mapping[str, Any], ...]:
        """The prompt as chat messages: a text is one message of a user."""
        return self.messages or ({"role": "user", "content": self.text},)


@dataclass(frozen=True, eq=False)
class Completion:
    """A rollout engine's answer to one request: n sampled tokens."""

    token_ids: npt.NDArray[np.int32]
    """[n]: the tokens, the end-of-sequence token included where one was sampled."""
    logprobs: npt.NDArray[np.float32]
    """[n]: log p(token) under the distribution that was sampled from (after temperature, top-k, top-p)."""
    versions: npt.NDArray[np.int32]
    """[n]: version of the weights that sampled each token, which is the number of training steps behind them."""
    finish_reason: FinishReason
    """`stop`: an end or stop token was sampled. `length`: the token limit was reached."""
    routes: Routes | None = None
    """[prompt + n, MoE layers, top_k]: experts of each token of prompt and completion, `UNKNOWN_EXPERT` where they are
    not known; None: the engine does not report them."""

    @staticmethod
    def of(token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, finish_reason: FinishReason, version: int) -> Completion:
        """Return a completion without routes. One version of the weights has sampled all its tokens.

        Args:
            token_ids: integers [n].
            logprobs: numbers [n].
            finish_reason: why the completion ended.
            version: version of the weights.
        """
        tokens = np.asarray(token_ids, dtype=np.int32)
        versions = np.full(len(tokens), version, dtype=np.int32)
        return Completion(tokens, np.asarray(logprobs, dtype=np.float32), versions, finish_reason)


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One sequence of T tokens: a prompt, and in one turn or several what the policy and its environment added.

    tokens     p p p  r r r  t t  r r        prompt, response, a tool's answer, response
    mask       0 0 0  1 1 1  0 0  1 1
    logprobs   0 0 0  x x x  0 0  x x
    versions  -1-1-1  7 7 7 -1-1  8 8
    """

    tokens_T: npt.NDArray[np.int32]
    mask_T: npt.NDArray[np.bool_]
    """True on tokens that the policy sampled, which are the trained ones."""
    logprobs_T: npt.NDArray[np.float32]
    """Log-probs of the distribution that was sampled from; 0 where nothing was sampled."""
    versions_T: npt.NDArray[np.int32]
    """Version of the weights that sampled each token; `NOT_SAMPLED` elsewhere."""
    routes_TLK: Routes | None = None
    """Experts of each token, by MoE layer; `UNKNOWN_EXPERT` where they are not known. None: the engine does not report
    them."""

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("tokens_T", "mask_T", "logprobs_T", "versions_T")}
        if self.routes_TLK is not None:
            lengths["routes_TLK"] = len(self.routes_TLK)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the arrays of a trajectory must have one length; these have {lengths}")

    @staticmethod
    def single_turn(prompt: Prompt, completion: Completion) -> Trajectory:
        """Return the trajectory of a prompt and its one completion.

        Raises:
            ValueError: a prompt without tokens, or log-probs, versions or routes that do not match the completion's
                tokens.
        """
        n_prompt, n_sampled = len(prompt.token_ids), len(completion.token_ids)
        if n_prompt == 0:
            raise ValueError(
                f"prompt {prompt.index} has no tokens, so nothing predicts the first token of its completion: "
                "a prompt needs at least one token"
            )
        routes = completion.routes
        for name, values in {"log-probs": completion.logprobs, "versions": completion.versions}.items():
            if len(values) != n_sampled:
                raise ValueError(
                    f"a completion of prompt {prompt.index} has {n_sampled} tokens, "
                    f"but {len(values)} {name}: the engine must give one for each token"
                )
        if routes is not None and len(routes) != n_prompt + n_sampled:
            raise ValueError(
                f"prompt {prompt.index} and its completion have {n_prompt} and {n_sampled} tokens, "
                f"but {len(routes)} routes: the engine must give one for each token of both"
            )
        return Trajectory(
            tokens_T=np.concatenate((np.array(prompt.token_ids, np.int32), completion.token_ids)),
            mask_T=np.repeat((False, True), (n_prompt, n_sampled)),
            logprobs_T=_after(n_prompt, 0, completion.logprobs),
            versions_T=_after(n_prompt, NOT_SAMPLED, completion.versions),
            routes_TLK=routes,
        )


def _after(n_prompt: int, filling: int, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return values [n, ...] after the tokens of a prompt, whose values are all `filling`."""
    return np.concatenate((np.full((n_prompt, *values.shape[1:]), filling, values.dtype), values))


@dataclass(frozen=True, slots=True)
class Move:
    """A completion of an episode of several turns, for credit by turn."""

    start: int
    """Place of its first token among the tokens of all sequences of the episode."""
    n_tokens: int
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by name that the environment gave for it; they are part of the episode's."""
    state: str = ""
    """Names the state in which it was made: moves of a group in the same state can be compared."""


@dataclass(frozen=True, eq=False)
class Episode:
    """What an environment makes of one task."""

    trajectories: tuple[Trajectory, ...]
    """At least one. Several, if the model saw a prompt that does not continue the one before, such as after a template
    that drops earlier thoughts."""
    finish_reason: StopReason
    """Why it ended."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by name that the environment gives; reward functions add theirs."""
    n_turns: int = 1
    """Number of completions."""
    moves: Sequence[Move] = ()
    """Its completions in the order in which they were made; empty: there is but one turn."""
    failure: str | None = None
    """What failed, of one that ended as `failed`."""

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise ValueError("an episode has no trajectory: an environment must return at least one")

    @staticmethod
    def single_turn(prompt: Prompt, completion: Completion) -> Episode:
        """Return the episode of a prompt and its one completion; see `Trajectory.single_turn` for its errors."""
        return Episode((Trajectory.single_turn(prompt, completion),), completion.finish_reason)

    @staticmethod
    def failed(prompt: Prompt, failure: str) -> Episode:
        """Return an episode that ended by an error: its prompt alone, and nothing that is trained."""
        nothing = Completion.of((), (), "stop", NOT_SAMPLED)
        return Episode((Trajectory.single_turn(prompt, nothing),), "failed", n_turns=0, failure=failure)

    @property
    def n_tokens(self) -> int:
        """Tokens of all trajectories."""
        return sum(len(trajectory.tokens_T) for trajectory in self.trajectories)

    @property
    def sampled_versions(self) -> npt.NDArray[np.int32]:
        """Version of the weights that sampled each sampled token."""
        return np.concatenate([trajectory.versions_T[trajectory.mask_T] for trajectory in self.trajectories])

    @property
    def sampled_tokens(self) -> npt.NDArray[np.int32]:
        """The sampled tokens."""
        return np.concatenate([trajectory.tokens_T[trajectory.mask_T] for trajectory in self.trajectories])


@dataclass(frozen=True, slots=True)
class Sample:
    """An episode as the driver knows it. Its tokens and log-probs are in the object store (see `Columns`)."""

    prompt: Prompt
    response_text: str
    """The sampled tokens, decoded without special tokens."""
    finish_reason: StopReason
    n_tokens: int
    """Tokens of the whole episode."""
    n_sampled: int
    """Tokens that the policy sampled."""
    versions: tuple[int, int]
    """Oldest and newest version of the weights that sampled its tokens."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by name, as their functions returned them."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Factors of the rewards in their sum, by name; a name that is missing has 1."""
    accuracy_of: str | None = None
    """Name of the reward by which the completion counts as right; None: the sum."""
    n_turns: int = 1
    """Number of completions of the episode."""
    transcript: str | None = None
    """Of several turns: all that comes after the prompt, with the environment's answers in ⟦brackets⟧."""
    moves: Sequence[Move] = ()
    """As in `Episode`."""

    @property
    def reward(self) -> float:
        """The weighted sum of all rewards, which is trained on."""
        return sum(self.weights.get(name, 1.0) * value for name, value in self.rewards.items())

    @property
    def shown_text(self) -> str:
        """What logs and screens show after the prompt."""
        return self.response_text if self.transcript is None else self.transcript

    @property
    def has_failed(self) -> bool:
        """Whether its environment raised an error, which the transcript says; it has no rewards."""
        return self.finish_reason == "failed"

    @property
    def is_truncated(self) -> bool:
        """Whether a limit on its tokens ended it."""
        return self.finish_reason in TRUNCATED

    @property
    def score(self) -> float:
        """The reward by which the completion counts as right."""
        return self.reward if self.accuracy_of is None else self.rewards[self.accuracy_of]

    @property
    def is_right(self) -> bool:
        """Whether the completion counts as right."""
        return self.score >= FULL_REWARD

    def rewarded(
        self, rewards: Mapping[str, float], weights: Mapping[str, float] | None = None, accuracy_of: str | None = None
    ) -> Sample:
        """Return a copy with further rewards, with the weights of all and the reward that `score` returns."""
        # dataclasses.replace would take most of the driver's time in a step of tens of thousands of samples.
        return Sample(
            self.prompt,
            self.response_text,
            self.finish_reason,
            self.n_tokens,
            self.n_sampled,
            self.versions,
            {**self.rewards, **rewards},
            self.weights if weights is None else weights,
            accuracy_of or self.accuracy_of,
            self.n_turns,
            self.transcript,
            self.moves,
        )


@dataclass(frozen=True, eq=False)
class Columns:
    """Per-token values of N rows laid end to end, T tokens in all. The object store shares arrays uncopied."""

    lengths_N: npt.NDArray[np.int32]
    """Tokens of each row; they sum to T."""
    values: Mapping[str, npt.NDArray[Any]]
    """Arrays [T, ...], by name."""
    cuts: Cuts | None = None
    """Tokens of each sequence of each row; None: each row is one sequence."""

    @staticmethod
    def of(episodes: Sequence[Episode]) -> Columns:
        """Lay episodes end to end, a row each. There is a column `routes` if a trajectory has routes.

        Raises:
            ValueError: no episode.
        """
        if not episodes:
            raise ValueError("there are no episodes to lay end to end: give at least one")
        trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
        values: dict[str, npt.NDArray[Any]] = {
            "tokens": np.concatenate([t.tokens_T for t in trajectories]),
            "mask": np.concatenate([t.mask_T for t in trajectories]),
            "rollout_logprobs": np.concatenate([t.logprobs_T for t in trajectories]),
            "versions": np.concatenate([t.versions_T for t in trajectories]),
        }
        if known := [t.routes_TLK for t in trajectories if t.routes_TLK is not None]:
            unknown = np.full((1, *known[0].shape[1:]), UNKNOWN_EXPERT, known[0].dtype)
            values[ROUTES] = np.concatenate(
                [unknown.repeat(len(t.tokens_T), 0) if t.routes_TLK is None else t.routes_TLK for t in trajectories]
            )
        return Columns(np.array([e.n_tokens for e in episodes], dtype=np.int32), values, cuts_of(episodes))


def cuts_of(episodes: Sequence[Episode]) -> Cuts | None:
    """Return the tokens of each trajectory of each episode; None: each episode has one trajectory."""
    if len(episodes) == sum(len(episode.trajectories) for episode in episodes):
        return None
    return tuple(tuple(len(t.tokens_T) for t in episode.trajectories) for episode in episodes)


def joined_cuts(parts: Sequence[tuple[Sequence[int], Cuts | None]]) -> Cuts | None:
    """Return the cuts of the rows of several parts, one part after the other; None: each row is one sequence.

    Args:
        parts: lengths and cuts of the rows of each part.
    """
    if all(cuts is None for _, cuts in parts):
        return None
    return tuple(row for lengths, cuts in parts for row in (cuts or ((int(length),) for length in lengths)))


@dataclass(frozen=True)
class Totals:
    """Sizes of a whole mini-batch, over all data-parallel replicas: what losses are divided by."""

    n_sequences: int
    n_tokens: int
    """All tokens, prompts included."""
    n_trained_tokens: int
    n_trained_sequences: int
    """Sequences with at least one trained token."""


@dataclass(frozen=True)
class Batch:
    """Rows laid end to end without padding. A row is a sequence, or the sequences of one episode.

    A per-token field holds, at token t, what belongs to *predicting token t* from the tokens before it:
    `logprobs[t] = log p(token[t] | token[<t])` in its sequence. The first token of a sequence is predicted by nothing,
    so its mask is 0 and its other fields are ignored.

        tokens   p p p r r r | p p r r          lengths (6, 4)
        mask     0 0 0 1 1 1 | 0 0 1 1
    """

    lengths: tuple[int, ...]
    """Tokens of each row; they sum to T."""
    tokens_T: torch.Tensor
    """int64 [T]: token ids."""
    mask_T: torch.Tensor
    """float32 [T]: 1 on tokens that are trained (the response), else 0."""
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[T, ...] each, by name: `advantages`, `old_logprobs`, `rollout_logprobs`, `ref_logprobs`, `versions`, ..."""
    cuts: Cuts | None = None
    """Tokens of each sequence of each row; None: each row is one sequence."""

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        tensors = {"tokens_T": self.tokens_T, "mask_T": self.mask_T, **self.fields}
        for name, tensor in tensors.items():
            flat = name in ("tokens_T", "mask_T")
            if tensor.shape[:1] != (total,) or (flat and tensor.ndim != 1):
                wanted = f"({total},)" if flat else f"({total}, ...)"
                raise ValueError(
                    f"Batch.{name} has shape {tuple(tensor.shape)}; the lengths sum to {total}, so it must be {wanted}"
                )

        if self.cuts is not None and tuple(map(sum, self.cuts)) != self.lengths:
            raise ValueError(
                f"Batch.cuts={self.cuts} do not sum to the lengths {self.lengths}: give the tokens of each sequence of "
                "each row"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, which attends to itself alone; they sum to T."""
        return self.lengths if self.cuts is None else tuple(length for row in self.cuts for length in row)

    @property
    def n_tokens(self) -> int:
        """All tokens, prompts included."""
        return self.tokens_T.numel()

    def totals(self) -> Totals:
        """Return the sizes of this batch, which must be a whole mini-batch if a loss is to be divided by them."""
        trained = [int(mask.sum()) for mask in self.split(self.mask_T)]
        return Totals(len(self), self.n_tokens, sum(trained), sum(count > 0 for count in trained))

    def offsets(self) -> list[int]:
        """Return the start of each row, and T at the end: len(self) + 1 entries."""
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        return offsets

    def select(self, indices: Sequence[int]) -> Batch:
        """Return the rows at `indices`, in that order."""
        offsets = self.offsets()
        rows = [torch.arange(offsets[i], offsets[i + 1]) for i in indices]
        tokens = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        return Batch(
            lengths=tuple(self.lengths[i] for i in indices),
            tokens_T=self.tokens_T[tokens],
            mask_T=self.mask_T[tokens],
            fields={name: value[tokens] for name, value in self.fields.items()},
            cuts=None if self.cuts is None else tuple(self.cuts[i] for i in indices),
        )

    def without(self, name: str) -> Batch:
        """Return the batch without a field; the batch itself if it has no such field."""
        if name not in self.fields:
            return self
        return replace(self, fields={other: value for other, value in self.fields.items() if other != name})

    def to(self, device: torch.device) -> Batch:
        """Return a copy on `device`."""
        fields = {name: value.to(device, non_blocking=True) for name, value in self.fields.items()}
        return Batch(
            self.lengths,
            self.tokens_T.to(device, non_blocking=True),
            self.mask_T.to(device, non_blocking=True),
            fields,
            self.cuts,
        )

    def with_fields(self, **fields: torch.Tensor) -> Batch:
        """Return a copy with per-token fields added or replaced."""
        return replace(self, fields={**self.fields, **fields})

    def split(self, values_T: torch.Tensor) -> list[torch.Tensor]:
        """Split a per-token tensor [T, ...] into one tensor for each row."""
        return list(values_T.split(list(self.lengths)))


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    learning_rate: float
    """Learning rate of this step."""
    skipped: bool
    """Whether no weight was changed, because the gradient was not finite."""
    non_finite: tuple[str, ...] = ()
    """The first few parameters whose gradient is not finite, if the step was skipped. Empty for a skipped step: all
    gradients are finite, but their norm exceeds float32."""
