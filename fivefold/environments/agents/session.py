"""One episode of an agent, as the server sees it: requests become completions of its tree."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.environments.agents.parsing import Parser
from fivefold.environments.agents.tree import Continuation, Tree, Turn
from fivefold.environments.environment import Client, Task
from fivefold.rollout.protocol import SamplingParams
from fivefold.types import Episode, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "policy"
"""Name under which the model is served."""
_OF_RECIPE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What the recipe decides: the log-probs that are trained on belong to its distribution."""
_REFUSED = (
    *("logit_bias", "seed", "sampling_seed", "best_of", "echo", "suffix", "prompt_logprobs", "ignore_eos"),
    *("frequency_penalty", "presence_penalty", "json_schema", "regex", "ebnf", "stop_regex"),
)
_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
_NO_TOP_K = -1
"""SGLang's and vLLM's `top_k` for no top-k."""


class Refused(Exception):
    """A request that the session does not answer."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


def _expanding(task: Task) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return what makes the tokens of a chat with a task's images of its text's tokens."""
    if not task.images:
        return tuple
    from fivefold.vision.places import expanded, image_token  # by those whose prompts have images

    return partial(expanded, images=task.images, token=image_token(task.prompt))


class Session:
    """Answers the requests of one episode."""

    def __init__(
        self,
        task: Task,
        client: Client,
        tokenizer: PreTrainedTokenizerBase,
        config: EnvironmentConfig,
        parser: Parser,
    ) -> None:
        """Begin without a request.

        Args:
            task: the episode.
            client: samples completions.
            tokenizer: the model's tokenizer.
            config: the limits of the episode.
            parser: reads answers.
        """
        self._task = task
        self._client = client
        self._config = config
        self.keeps_thinking = config.keep_thinking
        self.max_length = config.max_length
        self.tokenizer = tokenizer
        self.parser = parser
        self.tree = Tree(tokenizer, task.prompt.text, task.prompt.token_ids, _expanding(task))
        self._answers: dict[str | tuple[int, ...], asyncio.Task[Turn]] = {}
        """The turn of each prompt that was asked for: who asks again, as after a lost connection, gets the same one."""
        self.ended_by: StopReason | None = None
        """The limit that the episode has reached; None: none."""
        self.n_calls: int | None = None
        """Tools that the model has called; None: it was offered none."""
        self._n_template = 0

    async def complete(
        self,
        text: str,
        body: Mapping[str, Any],
        *,
        has_special_tokens: bool,
        written: Callable[[Continuation], Sequence[str]] | None = None,
    ) -> Turn:
        """Return the turn after `text`.

        Args:
            text: all that comes before the turn.
            body: the request.
            has_special_tokens: whether special tokens are written in it.
            written: returns the contents of messages in the text's new tokens, where a template wrote all others; None:
                there is no template.

        Raises:
            Refused: a limit of the episode is reached, or the request asks for what cannot be trained on.
        """

        def continued() -> Continuation:
            asked = self.tree.continued(text, has_special_tokens=has_special_tokens)
            if written is not None:
                self._n_template += self._of_template(asked, written(asked))
            return asked

        return await self._turn(text, body, continued)

    def _of_template(self, asked: Continuation, contents: Sequence[str]) -> int:
        """Return how many new tokens of a request a template wrote: all but the contents of messages."""
        n_contents = sum(len(self.tokenizer.encode(content, add_special_tokens=False)) for content in contents)
        if asked.before is None:  # a token in a content stands for each image
            n_contents += sum(image.n_tokens - 1 for image in self._task.images)
        # Next to a template's text, a token may hold the end of one and the beginning of the other.
        return max(0, len(asked.given) - n_contents)

    async def complete_ids(self, token_ids: Sequence[int], body: Mapping[str, Any]) -> Turn:
        """Return the turn after tokens. Raises as `complete`."""
        return await self._turn(tuple(token_ids), body, lambda: self.tree.continued_ids(token_ids))

    async def _turn(
        self, key: str | tuple[int, ...], body: Mapping[str, Any], continued: Callable[[], Continuation]
    ) -> Turn:
        sampling = self._sampling(body)
        if key not in self._answers:
            if len(self._answers) >= self._config.max_turns:
                self.ended_by = "turns"
                raise Refused(
                    f"the episode has had its environment.max_turns={self._config.max_turns}", "max_turns_reached"
                )
            self._answers[key] = asyncio.ensure_future(self._sample(continued(), sampling))
        return await asyncio.shield(self._answers[key])

    def episode(
        self, reason: StopReason, rewards: Sequence[Mapping[str, float]], states: Sequence[str] | None = None
    ) -> Episode:
        """Return the episode, which ended for `reason` if it has not reached a limit; see `Tree.episode`."""
        made = self.tree.episode(self.ended_by or reason, rewards, states)
        effort = replace(made.effort, calls=self.n_calls, template=min(self._n_template, made.effort.given))
        return replace(made, effort=effort)

    def close(self) -> None:
        """Let go of what has not been answered."""
        for answer in self._answers.values():
            answer.cancel()

    async def _sample(self, asked: Continuation, sampling: SamplingParams) -> Turn:
        token_ids = asked.token_ids
        room = self._config.max_length - len(token_ids)
        if room <= 0:
            self.ended_by = "context"
            raise Refused(
                f"the prompt has {len(token_ids)} tokens, and an episode may have environment.max_length="
                f"{self._config.max_length}",
                "context_length_exceeded",
            )
        if not token_ids:
            raise Refused("the prompt has no tokens")
        return self.tree.add(asked, await self._client.complete(token_ids, sampling.within(room)))

    def _sampling(self, body: Mapping[str, Any]) -> SamplingParams:
        """Return how a request is sampled: as the recipe says, with at most as many tokens as it asks for."""
        own = self._task.sampling
        if strays := [name for name in _REFUSED if body.get(name)]:
            raise Refused(f"{strays[0]}={body[strays[0]]!r} is not supported: leave it out")
        if body.get("n") not in (None, 1):
            raise Refused(
                f"n={body['n']!r} is not supported: ask n times for one completion, or raise gconfig.n_samples"
            )
        for name in _OF_RECIPE if not own.greedy else ():  # a greedy evaluation draws nothing
            asked, given = body.get(name), getattr(own, name)
            if asked not in (None, given) and not (name == "top_k" and asked == _NO_TOP_K and given == 0):
                raise Refused(
                    f"{name}={asked!r} differs from gconfig.{name}={given!r}, which training needs: leave it out"
                )
        limits = [value for name in _LIMITS if (value := body.get(name)) is not None]
        if not all(isinstance(limit, int) and limit > 0 for limit in limits):
            raise Refused(f"max_tokens={limits[0]!r} must be a positive integer")
        stop_ids = body.get("stop_token_ids") or []
        if not isinstance(stop_ids, list) or not all(isinstance(token, int) for token in stop_ids):
            raise Refused(f"stop_token_ids={stop_ids!r:.80} must be a list of tokens")
        most = min([own.max_new_tokens, *limits])
        return replace(
            own,
            max_new_tokens=most,
            min_new_tokens=min(most, own.min_new_tokens),
            stop=tuple(dict.fromkeys((*own.stop, *stops_of(body)))),
            stop_token_ids=tuple(dict.fromkeys((*own.stop_token_ids, *stop_ids))),
        )


def stops_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts at which a request asks to stop.

    Raises:
        Refused: they are no texts.
    """
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise Refused(f"stop={stops!r:.80} must be a text, or a list of texts that are not empty")
    return tuple(stops)


def before_stop(text: str, body: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return what a client sees of a text, and the stop text that has ended it; None: none has.

    As everywhere, the client does not see the stop text. It stays among the tokens that were sampled, and with them in
    what the model reads later.
    """
    ends = [(place, stop) for stop in stops_of(body) if (place := text.find(stop)) >= 0]
    place, stop = min(ends, default=(len(text), None))
    return text[:place], stop
