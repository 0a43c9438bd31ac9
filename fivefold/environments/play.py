"""Plays the episodes of many jobs at the same time against one engine.

    begin ─> a coroutine for each episode ─complete─> requests ─> engine ─> completions ─┐
                        ^                                                                │
                        └────────────────────────────────────────────────────────────────┘

Coroutines run between two slices of the engine, in its thread and in the order in which they were begun. What episodes
ask for, and in which order, is therefore the same in every run with the same completions.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from fivefold.environments.environment import Environment, Task
from fivefold.rollout.protocol import Begun, GenerationRequest, RolloutEngine, SamplingParams, turn_seed
from fivefold.types import Completion, Episode, Prompt

PAUSE_S = 0.005
"""Seconds after which the engine and the coroutines that wait for something else are each looked at again."""
SETTLE_S = 0.25
"""Seconds that an embedded engine waits for coroutines that have begun to wait for something else, such as a tool in a
thread, since the last one of them came to its next request. The requests of fast tools then share a batch in every
run."""


class Player:
    """Plays the episodes of jobs. Only one thread may use it."""

    def __init__(self, engine: RolloutEngine, environment: Environment, settle_s: float = SETTLE_S) -> None:
        """Begin without a job.

        Args:
            engine: answers the requests of episodes, and no others.
            environment: plays each episode.
            settle_s: as `SETTLE_S`; 0 for a server, whose batches differ in every run.
        """
        self._settle_s = settle_s
        self._environment = environment
        self._loop = asyncio.new_event_loop()
        weakref.finalize(self, self._loop.close)
        self._calls = _Calls(engine, self._loop)
        self._jobs: dict[int, list[_Session]] = {}
        """Sessions of the jobs that are not done, by the job's number."""
        self._slow: set[_Session] = set()
        """Sessions that wait for something else than the engine, for longer than `settle_s`."""
        self._lost: dict[int, list[GenerationRequest]] = {}
        self.waited_s = 0.0
        """Seconds in which all episodes waited for something else than the engine."""

    @property
    def n_running(self) -> int:
        """Number of episodes that have not ended."""
        return sum(not session.has_ended for sessions in self._jobs.values() for session in sessions)

    def begin(self, number: int, tasks: Sequence[Task]) -> None:
        """Begin the episodes of job `number`."""
        self._jobs[number] = sessions = [
            _Session(task, self._calls, (number, index)) for index, task in enumerate(tasks)
        ]
        for session in sessions:
            session.episode = self._loop.create_task(session.played(self._environment))

    def advance(self, seconds: float) -> list[tuple[int, list[Episode]]]:
        """Play until a job is done or lost, or about `seconds` have passed. What an environment raises is raised here.

        Returns:
            Each job that is done, by its number, with its episodes in the order of its tasks.
        """
        deadline, left = time.monotonic() + seconds, seconds
        self._run_coroutines()
        while True:
            self._settle()
            if done := self._take_done():
                return done
            self._calls.submit_waiting()
            waits_elsewhere = bool(self._waiting_elsewhere())
            if not waits_elsewhere and not self._calls.are_running:
                return []
            most = min(left, PAUSE_S) if waits_elsewhere else left
            began, is_idle = time.monotonic(), not self._calls.are_running
            if not self._calls.collect(most) and waits_elsewhere:
                self._loop.run_until_complete(asyncio.sleep(most))
            if is_idle:
                self.waited_s += time.monotonic() - began
            self._run_coroutines()
            self._forget_lost()
            if self._lost or (left := deadline - time.monotonic()) <= 0:
                return self._take_done()

    def unfinished(self) -> dict[int, list[GenerationRequest]]:
        """Return the jobs whose episodes another engine could continue: the first requests with their tokens so far.

        Those that `take_lost` has not returned are among them, and not those that would begin again.
        """
        asked = self._calls.unfinished()
        going = {number: jobs for number, jobs in self._jobs.items() if any(session.asks(asked) for session in jobs)}
        return self._lost | {number: [each.so_far(asked) for each in sessions] for number, sessions in going.items()}

    def take_lost(self) -> dict[int, list[GenerationRequest]]:
        """Return the jobs that were lost with the engine's requests since the last call, as `unfinished` does."""
        self._forget_lost()
        lost, self._lost = self._lost, {}
        return lost

    def _forget_lost(self) -> None:
        asked = self._calls.lose()
        lost = [number for number, sessions in self._jobs.items() if any(each.asks(asked) for each in sessions)]
        for number in lost:
            sessions = self._jobs.pop(number)
            self._lost[number] = [session.so_far(asked) for session in sessions]
            for session in sessions:
                session.episode.cancel()
                self._calls.forget(session.open)
        if lost:
            self._run_coroutines()  # in which those that were cancelled end

    def _settle(self) -> None:
        """Let coroutines that have just begun to wait for something else come to their next request or their end."""
        began = time.monotonic()
        deadline, before, is_idle = began + self._settle_s, 0, not self._calls.are_running
        while waiting := self._waiting_elsewhere() - self._slow:
            if len(waiting) != before:
                deadline, before = time.monotonic() + self._settle_s, len(waiting)
            elif time.monotonic() >= deadline:
                self._slow |= waiting
            self._loop.run_until_complete(asyncio.sleep(PAUSE_S / 10))
        self._slow &= self._waiting_elsewhere()
        if is_idle:
            self.waited_s += time.monotonic() - began

    def _waiting_elsewhere(self) -> set[_Session]:
        return {each for own in self._jobs.values() for each in own if each.waits_elsewhere}

    def _run_coroutines(self) -> None:
        """Run each coroutine that can run, until it waits."""
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()

    def _take_done(self) -> list[tuple[int, list[Episode]]]:
        sessions = [session for own in self._jobs.values() for session in own if session.has_ended]
        if failures := [error for session in sessions if (error := session.episode.exception()) is not None]:
            raise failures[0]
        numbers = [number for number, own in self._jobs.items() if all(session.has_ended for session in own)]
        return [(number, [session.episode.result() for session in self._jobs.pop(number)]) for number in numbers]


def tasks_of(prompt: Prompt, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Task]:
    """Return a task of each request of a prompt, whose images are read here, once for all.

    Raises:
        ValueError: an image's file is gone, or has changed since the data set was read.
    """
    if not prompt.images:
        return [Task(prompt, request, sampling) for request in requests]
    from fivefold.data.images import placed  # by those whose prompts have images

    images = placed(prompt.images)
    return [Task(prompt, request, sampling, images) for request in requests]


@dataclass(eq=False)
class _Session:
    """What an environment has of the engine while it plays one episode (`Client`)."""

    task: Task
    calls: _Calls
    place: tuple[int, int]
    """Number of its job, and its index there."""
    episode: asyncio.Task[Episode] = field(init=False)
    first_call: _Call | None = None
    """The first request; None: there was none."""
    open: set[_Call] = field(default_factory=set)
    """The requests that are not answered."""

    async def played(self, environment: Environment) -> Episode:
        """Return the episode, with its images if it has some."""
        episode = await environment.run(self.task, self)
        if not self.task.images or all(each.images for each in episode.trajectories):
            return episode
        from fivefold.vision.places import with_images  # by those whose prompts have images

        return with_images(episode, self.task.prompt, self.task.images)

    async def complete(self, token_ids: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        """Sample one completion (`Client`)."""
        images = self.task.images
        if images:
            from fivefold.vision.places import image_token, placed_among  # by those whose prompts have images

            images = placed_among(token_ids, images, image_token(self.task.prompt))
        request = replace(self.task.request, token_ids=tuple(token_ids), images=images)
        if self.first_call is not None:
            request = replace(request, seed=turn_seed(request.seed, request.token_ids), begun=None)
        call = self.calls.ask(self.place, request, sampling or self.task.sampling)
        self.first_call = self.first_call or call
        self.open.add(call)
        try:
            return await call.answer
        finally:
            self.open.discard(call)

    @property
    def has_ended(self) -> bool:
        """Whether the environment has returned the episode, or raised."""
        return self.episode.done()

    @property
    def waits_elsewhere(self) -> bool:
        """Whether it has not ended, and waits for something else than a request."""
        return not self.has_ended and not self.open

    def asks(self, asked: Mapping[int, GenerationRequest]) -> bool:
        """Return whether the episode waits for one of these requests at the engine."""
        return not self.has_ended and any(call.number in asked for call in self.open)

    def so_far(self, asked: Mapping[int, GenerationRequest]) -> GenerationRequest:
        """Return the task's request with what its completion has so far.

        An episode of several turns is played again after its first completion.

        Args:
            asked: requests at the engine, by number, with their tokens so far.
        """
        first = self.first_call
        if first is not None and first not in self.open and first.answer.done() and not first.answer.cancelled():
            whole = first.answer.result()
            begun = Begun(whole.token_ids, whole.logprobs, whole.versions, whole.finish_reason)
            return replace(self.task.request, begun=begun)
        number = None if first is None else first.number
        so_far = self.task.request if number is None else asked.get(number, self.task.request)
        return replace(so_far, token_ids=self.task.request.token_ids, images=())


@dataclass(eq=False)
class _Call:
    """A request of a session."""

    place: tuple[int, int]
    """The session's place, and with it the request's among those that wait."""
    request: GenerationRequest
    sampling: SamplingParams
    answer: asyncio.Future[Completion]
    number: int | None = None
    """Its number at the engine; None: the engine does not have it yet."""


class _Calls:
    """The requests that an engine has not answered."""

    def __init__(self, engine: RolloutEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._n_submitted = 0
        self._submitted: dict[int, _Call] = {}
        """The engine's requests, by number."""
        self._waiting: list[_Call] = []
        """Requests that the engine does not have yet, because it works or has no weights."""

    @property
    def are_running(self) -> bool:
        """Whether the engine has requests that are not answered."""
        return self._engine.n_running > 0

    def ask(self, place: tuple[int, int], request: GenerationRequest, sampling: SamplingParams) -> _Call:
        """Take a request for the next `submit_waiting`."""
        call = _Call(place, request, sampling, self._loop.create_future())
        self._waiting.append(call)
        return call

    def submit_waiting(self) -> None:
        """Give the engine what was asked for, in the order of the sessions, if it has weights."""
        if not self._engine.has_weights:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda call: call.place), []
        for number, call in enumerate(waiting, self._n_submitted):
            self._engine.submit(number, call.request, call.sampling)
            call.number, self._submitted[number] = number, call
        self._n_submitted += len(waiting)

    def collect(self, seconds: float) -> bool:
        """Let the engine work until a request is answered, or about `seconds` have passed; return whether one is."""
        done = self._engine.collect(seconds) if self.are_running else []
        for number, completion in done:
            self._submitted.pop(number).answer.set_result(completion)
        return bool(done)

    def forget(self, calls: Set[_Call]) -> None:
        """Forget requests that the engine does not have."""
        self._waiting = [call for call in self._waiting if call not in calls]

    def unfinished(self) -> dict[int, GenerationRequest]:
        """Return the engine's requests by number, with their tokens up to the last weights."""
        return self._engine.unfinished()

    def lose(self) -> dict[int, GenerationRequest]:
        """Forget the requests that the engine has lost; return them by number, with their tokens so far."""
        lost = self._engine.take_lost()
        for number in lost:
            del self._submitted[number]
        return lost
