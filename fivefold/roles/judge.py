"""The model of the run that judges: its replicas, and who asks them.

threads that judge ──answer──> the thread "judge" ──> its RolloutStream ──> replicas
                   <──text────
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Self

from fivefold.config.paths import resolve_model_path
from fivefold.config.schema.rewards import JudgeConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.chats import render_chat
from fivefold.data.tokens import tokenize
from fivefold.engine.contract import Offloadable
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.asking import HostFailed, NoScore
from fivefold.rewards.judge import Sampling
from fivefold.roles.actor import Actor
from fivefold.roles.responses import Job
from fivefold.roles.rollout import Rollout
from fivefold.roles.rollout_stream import RolloutStream
from fivefold.rollout.chat_template import ChatTemplate
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, question_seed
from fivefold.rollout.tokenizer import fix_date, load_tokenizer
from fivefold.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = "a question to the judge"
"""What errors call it."""
ENDING_S = 30.0
"""Seconds that the thread has to end, which it does after a slice on the replicas."""


class JudgeReplicas:
    """The driver's handle of the replicas, and their turn on devices that they share."""

    def __init__(
        self, replicas: Rollout, *, rollout: Rollout | None, actor: Actor | None, makes_room: tuple[Offloadable, ...]
    ) -> None:
        """Take the replicas, which sleep if they share devices.

        Args:
            replicas: the replicas.
            rollout: the rollout if it is on the same devices.
            actor: the actor if it is on the same devices.
            makes_room: what the actor moves off them while the judge works.
        """
        self.replicas = replicas
        self._rollout, self._actor, self._makes_room = rollout, actor, makes_room

    @property
    def stops_rollout(self) -> bool:
        """Whether the rollout sleeps while the judge works, and has no weights afterwards."""
        return self._rollout is not None

    @property
    def takes_turns(self) -> bool:
        """Whether the judge works only inside `working`, because others have its devices otherwise."""
        return self.replicas.shares_devices

    @contextmanager
    def working(self) -> Iterator[None]:
        """Give the judge its devices inside the block. A server that has died while it slept is started again."""
        if not self.takes_turns:
            yield
            return
        if self._rollout is not None:
            self._rollout.sleep()
        if self._actor is not None:
            self._actor.offload(self._makes_room)
            self._actor.release()
        while not self.replicas.wake_weights():
            self.replicas.revive()
        self.replicas.wake()
        yield
        self.replicas.sleep()
        if self._actor is not None:
            self._actor.onload(self._makes_room)


class JudgeTexts:
    """Turns questions into the judge's tokens."""

    def __init__(self, config: JudgeConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the judge's tokenizer.

        Raises:
            ValueError: it has no chat template.
        """
        self._tokenizer, self._max_length = tokenizer, config.max_length
        ChatTemplate(variables=config.chat_template_kwargs).apply(tokenizer)
        if not tokenizer.chat_template:
            raise ValueError(
                f"reward.judge.path={config.path}: its tokenizer has no chat template, in which the judge is asked: "
                "name a model that has one (an instruct model)"
            )
        self.token_ids("?", 1)  # a template that refuses a user's only message is refused before the run

    def token_ids(self, question: str, max_tokens: int) -> tuple[int, ...]:
        """Return the tokens of a question as a user's only message.

        Raises:
            NoScore: the model cannot read them, or they leave no room for `max_tokens` of an answer.
            ValueError: the chat template refuses the message.
        """
        text = render_chat([{"role": "user", "content": question}], self._tokenizer, QUESTION)
        try:
            tokens = tokenize(text, self._tokenizer, add_special_tokens=False, at_most=self._max_length, where=QUESTION)
        except ValueError as error:  # half of a surrogate pair in a response
            raise NoScore(str(error)) from error
        if len(tokens) + max_tokens > self._max_length:
            raise NoScore(
                f"{QUESTION} of at least {len(tokens):,} tokens, with max_tokens={max_tokens} of the answer, is longer "
                f"than reward.judge.max_length={self._max_length}: raise it, or show less of the response"
            )
        return tuple(tokens)


def judge_texts(recipe: TrainRecipe, began: datetime | None = None) -> JudgeTexts:
    """Return what turns questions into tokens of the recipe's judge.

    Args:
        recipe: the recipe, which has a judge.
        began: time of the run's first start, whose date chat templates write; None: now.

    Raises:
        ValueError: the model has no usable tokenizer, or none with a chat template.
    """
    config = recipe.reward.judge
    assert config is not None, "the recipe has a judge"
    tokenizer = load_tokenizer(resolve_model_path(config.path), trust_remote_code=recipe.trust_remote_code)
    fix_date(tokenizer, began or datetime.now(UTC))
    return JudgeTexts(config, tokenizer)


class Judge:
    """Answers questions of any thread. It is a context manager, in whose block its thread runs."""

    def __init__(
        self,
        handle: JudgeReplicas,
        recipe: TrainRecipe,
        texts: JudgeTexts,
        timers: PhaseTimers,
        tell: Callable[[str], None],
    ) -> None:
        """Begin without a question.

        Args:
            handle: the replicas.
            recipe: the recipe, which has a judge.
            texts: turns questions into tokens.
            timers: name the phase in errors.
            tell: tells the user at once that a server was started again.
        """
        assert recipe.reward.judge is not None, "the recipe has a judge"
        self._handle, self._texts, self._timers, self._tell = handle, texts, timers, tell
        self._stream = RolloutStream(handle.replicas, recipe.reward.judge.max_batch_size)
        self._seed, self._timeout_s = recipe.seed, recipe.scheduler.timeout_s
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._numbers = count()
        self._new: list[Job] = []
        self._waiting: set[int] = set()
        """Numbers of the questions whose answer a thread waits for."""
        self._answers: dict[int, str] = {}
        self._failure: BaseException | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="judge", daemon=True)

    @property
    def takes_turns(self) -> bool:
        """Whether others have the judge's devices outside of `working`."""
        return self._handle.takes_turns

    @property
    def stops_rollout(self) -> bool:
        """Whether the rollout has no weights after `working`."""
        return self._handle.stops_rollout

    @contextmanager
    def working(self) -> Iterator[None]:
        """Give the judge its devices inside the block, in which rewards are computed.

        Raises:
            RunFailed: a process of the judge failed, or it did not answer in time.
        """
        with self._handle.working():
            try:
                yield
            except HostFailed as failure:
                raise failure.__cause__ or failure from None

    def answer(self, question: str, *, sampling: Sampling, attempt: int) -> str:
        """Return the model's answer; see `fivefold.rewards.judge.Host`.

        Its random numbers follow from the question, so that they do not depend on the order of questions.
        """
        token_ids = self._texts.token_ids(question, sampling.max_tokens)
        request = GenerationRequest(token_ids, question_seed(self._seed, token_ids, attempt), wants_logprobs=False)
        with self._changed:
            number = next(self._numbers)
            prompt = Prompt(number, question, token_ids, None)
            self._new.append(Job(number, prompt, [request], sampling_of(sampling)))
            self._waiting.add(number)
            self._changed.notify_all()
            is_done = self._changed.wait_for(lambda: number in self._answers or self._is_over, self._timeout_s)
            self._waiting.discard(number)
            if number in self._answers:
                return self._answers.pop(number)
        if is_done:
            raise HostFailed from self._failure or RunFailed("the judge was stopped")
        raise HostFailed from RunFailed(
            f"the judge did not answer within scheduler.timeout_s={self._timeout_s:g} s: see the logs of the judge; if "
            "its answers need longer, raise scheduler.timeout_s, or give it more replicas"
        )

    @property
    def _is_over(self) -> bool:
        return self._has_ended or self._failure is not None

    def _run(self) -> None:
        """Keep the replicas at work until the block ends."""
        try:
            while self._take_new():
                with self._timers.named("judge"):
                    done = self._stream.advance()
                for restart in self._stream.take_restarts():
                    self._tell(restart)
                with self._changed:
                    texts = {answer.number: answer.samples[0].response_text for answer in done}
                    self._answers |= {number: text for number, text in texts.items() if number in self._waiting}
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - `answer` raises it in the threads that wait
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _take_new(self) -> bool:
        """Wait for work, and hand new questions to the replicas; return False once the block has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._stream.has_work or self._has_ended)
            new, self._new = self._new, []
        self._stream.submit(new)
        return not self._has_ended

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._handle.replicas.gate.end()
        self._thread.join(ENDING_S)


def sampling_of(asked: Sampling) -> SamplingParams:
    """Return how the judge's answers are sampled: at temperature 0, the most likely tokens are taken."""
    return SamplingParams(
        max_new_tokens=asked.max_tokens,
        min_new_tokens=0,
        greedy=asked.temperature == 0,
        temperature=asked.temperature or 1.0,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop_token_ids=(),
        stop=(),
        seeded=asked.temperature > 0,
        logprob_share=0.0,
    )
