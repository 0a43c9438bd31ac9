"""When the prompts of a stream may begin, so that each is young enough when its turn comes.

    prompt          0 1 2 3   4 5 6 7   8 9 ...        in the order of the data, batch_size=4
    turn            0         1         2              trained on weights of this version, in step turn + 1
    may begin from  0         0         1              version 0 on, 0 on, 1 on, with max_age=1

A prompt may begin once `turn - version <= max_age`. Versions only grow, so none of its tokens is sampled by weights
that are more than `max_age` updates older than those that are trained on it, however long its completions are. Prompts
are trained in their order: nothing is dropped, and no prompt waits longer than its own completions and those before it.

The rule is AReaL's (Fu et al. 2025, arXiv 2505.24298, section 4.2), there for prompts that are trained as they finish.
"""

from __future__ import annotations

from collections.abc import Iterable


class Turns:
    """Which prompts of a stream wait, run and are finished. Prompts are numbered as at the top of this file."""

    def __init__(
        self, batch_size: int, max_age: int, *, first_turn: int, last_turn: int, max_running: int | None = None
    ) -> None:
        """Begin with the first prompt of `first_turn`, and with weights of that version.

        Args:
            batch_size: prompts of a step.
            max_age: most versions between the weights that sample a token and those that are trained on it.
            first_turn: the first turn.
            last_turn: the last turn.
            max_running: most prompts that run at one time; None: all that are young enough.
        """
        self._batch_size = batch_size
        self._max_age = max_age
        self._max_running = max_running
        self._end = (last_turn + 1) * batch_size
        self._next = first_turn * batch_size
        self._running: set[int] = set()
        self._finished: set[int] = set()
        self.version = first_turn
        """Version of the weights that sample from here on."""

    @property
    def n_running(self) -> int:
        """Number of prompts that have begun and not finished."""
        return len(self._running)

    def turn_of(self, prompt: int) -> int:
        """Return the version of the weights that are trained on a prompt."""
        return prompt // self._batch_size

    def prompts_of(self, turn: int) -> range:
        """Return the prompts of a turn."""
        return range(turn * self._batch_size, (turn + 1) * self._batch_size)

    def begin(self) -> int | None:
        """Let the next prompt begin, and return it; None: none may begin yet."""
        while self._next in self._finished:
            self._next += 1
        prompt = self._next
        if prompt >= self._end or self.turn_of(prompt) - self.version > self._max_age:
            return None
        if self._max_running is not None and len(self._running) >= self._max_running:
            return None
        self._next += 1
        self._running.add(prompt)
        return prompt

    def finish(self, prompt: int) -> None:
        """Record that all completions of a running prompt are there."""
        self._running.remove(prompt)
        self._finished.add(prompt)

    def restore(self, prompts: Iterable[int]) -> None:
        """Record that prompts are finished already, as a checkpoint has them. None may have begun."""
        self._finished.update(prompts)

    def take(self, turn: int) -> None:
        """Record that the prompts of a turn are trained. All must be finished."""
        prompts = self.prompts_of(turn)
        self._finished.difference_update(prompts)
        self._next = max(self._next, prompts.stop)
