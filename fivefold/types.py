"""What packages exchange about responses: prompts, completions, trajectories, episodes and samples.

                                 ┌─> Sample      what the driver knows: text, rewards, lengths
Prompt ──environment──> Episode ─┤
         Completion ...          └─> Columns     tokens, log-probs, versions: by reference to the trainer's processes,
                                 (batch.py)    where each data-parallel replica assembles a Batch of its rows

An episode is one row of a batch, however many sequences it has: advantages, divisors, mini-batches and steps count
rows. Only the model sees where one sequence of a row ends and the next begins (`cuts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length"]
"""Why a completion ended."""
StopReason = FinishReason | Literal["done", "turns", "context", "time", "parse", "failed"]
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
MOST_IN_A_BYTE = 128
"""Experts whose numbers, and -1 for those that are not known, take one byte in routes; of more, two."""
Routes = npt.NDArray[np.signedinteger[Any]]
"""Experts of tokens, [tokens, MoE layers, top_k]: int8 of up to `MOST_IN_A_BYTE` experts, else int16."""
ENVIRONMENT = "environment"
"""Name of an environment's reward that has no other name."""
FULL_REWARD = 1.0
"""Least reward of a completion that counts as right."""


@dataclass(frozen=True)
class ImagePart:
    """An image among the tokens of a prompt, and where it can be read."""

    source: str | bytes
    """Path of its file, or what the file holds."""
    processor: str
    """Folder or hub name of the model whose image processor makes patches of it."""
    digest: int
    """Number that follows from what the file holds, below 2**63."""
    start: int
    """Place of its first token among the prompt's."""
    rows: int
    """Rows of tokens that it becomes."""
    columns: int
    """Tokens in each row."""
    pixels: tuple[int, int] | None = None
    """Fewest and most pixels to which it is resized; None: as the model's image processor says."""

    @property
    def n_tokens(self) -> int:
        """Tokens that it becomes."""
        return self.rows * self.columns


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image among the tokens of a sequence, as a vision tower takes it."""

    patches_PC: npt.NDArray[np.float32]
    """[patches, values of a patch]: its pixels, the patches of a token one after another."""
    digest: int
    """As in `ImagePart`: images with the same one are the same."""
    start: int
    """Place of its first token in the sequence."""
    rows: int
    """Rows of tokens that it becomes."""
    columns: int
    """Tokens in each row."""

    @property
    def n_tokens(self) -> int:
        """Tokens that it becomes."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Prompt:
    """One problem of a data set, tokenized."""

    index: int
    """Row of the data set (after filtering); identifies the prompt in logs and resumes."""
    text: str
    """The prompt as the model sees it, chat template applied; `⟦image ...⟧` stands for an image."""
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
    images: tuple[ImagePart, ...] = ()
    """The images among its tokens, in their order."""

    @property
    def key(self) -> tuple[int, ...]:
        """What tells it from other prompts: its tokens, and with images the digests of these."""
        return (*self.token_ids, *(image.digest for image in self.images)) if self.images else self.token_ids

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
    images: tuple[PlacedImage, ...] = ()
    """The images among its tokens, in their order."""

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in ("tokens_T", "mask_T", "logprobs_T", "versions_T")}
        if self.routes_TLK is not None:
            lengths["routes_TLK"] = len(self.routes_TLK)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the arrays of a trajectory must have one length; these have {lengths}")

    @staticmethod
    def single_turn(prompt: Prompt, completion: Completion, images: tuple[PlacedImage, ...] = ()) -> Trajectory:
        """Return the trajectory of a prompt, with its images, and its one completion.

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
            images=images,
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


@dataclass(frozen=True, slots=True)
class Effort:
    """What an episode took besides the tokens that were sampled."""

    calls: int | None = None
    """Tools that the model called; None: it has none to call."""
    seconds: float = 0.0
    """Time in which the user's code worked, without its waits for the model."""
    given: int = 0
    """Tokens that the model did not sample, each of them once though several sequences have it: prompts, answers of
    tools and games, messages of users."""
    template: int = 0
    """Those among them that a chat template has written around the contents of messages."""


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
    effort: Effort = Effort()
    """What it took."""
    failure: str | None = None
    """What failed, of one that ended as `failed`."""

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise ValueError("an episode has no trajectory: an environment must return at least one")

    @staticmethod
    def single_turn(prompt: Prompt, completion: Completion, images: tuple[PlacedImage, ...] = ()) -> Episode:
        """Return the episode of a prompt and its one completion; see `Trajectory.single_turn` for its errors."""
        return Episode((Trajectory.single_turn(prompt, completion, images),), completion.finish_reason)

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
    n_sequences: int = 1
    """Number of sequences that it is trained as."""
    transcript: str | None = None
    """Of several turns: all that comes after the prompt, with the environment's answers in ⟦brackets⟧."""
    moves: Sequence[Move] = ()
    """As in `Episode`."""
    effort: Effort = Effort()
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
            self.n_sequences,
            self.transcript,
            self.moves,
            self.effort,
        )
