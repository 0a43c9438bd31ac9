"""What a session has sampled, as a tree: a completion continues the tokens of an earlier one where its text does.

    prompt ─ turn ─┬─ turn ─ turn        a leaf for each way: these are the sequences of the episode
                   └─ turn               an agent that went back, or asked several things at once
    prompt ─ turn                         a template that writes the past otherwise, or another agent's prompt

Texts are compared, tokens are kept: what was sampled is never encoded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.environments.transcript import Transcript
from fivefold.types import Completion, Effort, Episode, Move, StopReason, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Turn:
    """A completion, and the tokens before it that no earlier turn has."""

    before: Turn | None
    given: tuple[int, ...]
    completion: Completion
    before_text: str
    """All that comes before the completion."""
    sampled_text: str
    """The completion with its special tokens."""
    visible_text: str
    """The completion without them, as clients see it."""

    @property
    def path(self) -> list[Turn]:
        """All turns up to this one, the first one first."""
        return [*(self.before.path if self.before else ()), self]

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to its end."""
        before = self.before.token_ids if self.before else []
        return [*before, *self.given, *self.completion.token_ids.tolist()]


@dataclass(frozen=True)
class Continuation:
    """A text as tokens: an earlier turn's, and what comes after it."""

    text: str
    before: Turn | None
    given: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the text."""
        return [*(self.before.token_ids if self.before else ()), *self.given]


class Tree:
    """The turns of one session."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: str,
        prompt_ids: Sequence[int],
        expand: Callable[[Sequence[int]], tuple[int, ...]] = tuple,
    ) -> None:
        """Begin without a turn.

        Args:
            tokenizer: the model's tokenizer.
            prompt: the text of the row's prompt.
            prompt_ids: its tokens, which a text that begins with it has.
            expand: makes the tokens of another text that continues no turn, with as many as each image becomes.
        """
        self._tokenizer = tokenizer
        self._expand = expand
        self._prompt, self._prompt_ids = prompt, tuple(prompt_ids)
        self.turns: list[Turn] = []
        """In the order in which they were answered."""

    def continued(self, text: str, *, has_special_tokens: bool) -> Continuation:
        """Return a text as tokens: first the longest turn that it continues, as it was sampled.

        Args:
            text: all that comes before the next completion.
            has_special_tokens: whether special tokens are written in it, as a chat template does. Without them, a text
                continues a turn whose end token it does not show.
        """
        ends = [
            (len(turn.before_text + end), number)
            for number, turn in enumerate(self.turns)
            for end in ((turn.sampled_text,) if has_special_tokens else (turn.sampled_text, turn.visible_text))
            if text.startswith(turn.before_text + end)
        ]
        if ends:
            length, number = max(ends)
            return Continuation(text, self.turns[number], self._encoded(text[length:]))
        if text.startswith(self._prompt):
            return Continuation(text, None, (*self._prompt_ids, *self._encoded(text[len(self._prompt) :])))
        return Continuation(text, None, self._expand(self._encoded(text, add_special_tokens=not has_special_tokens)))

    def continued_ids(self, token_ids: Sequence[int]) -> Continuation:
        """Return tokens as the longest turn that they continue, and what comes after it."""
        asked = list(token_ids)
        turns = [turn for turn in self.turns if asked[: len(turn.token_ids)] == turn.token_ids]
        before = max(turns, key=lambda turn: len(turn.token_ids), default=None)
        given = asked[len(before.token_ids) if before else 0 :]
        return Continuation(str(self._tokenizer.decode(asked)), before, tuple(given))

    def add(self, asked: Continuation, completion: Completion) -> Turn:
        """Add what was sampled after `asked`."""
        sampled = completion.token_ids.tolist()
        turn = Turn(
            asked.before,
            asked.given,
            completion,
            asked.text,
            self._decoded_after(asked.token_ids, sampled, skip_special_tokens=False),
            self._decoded_after(asked.token_ids, sampled, skip_special_tokens=True),
        )
        self.turns.append(turn)
        return turn

    def episode(
        self, reason: StopReason, rewards: Sequence[Mapping[str, float]], states: Sequence[str] | None = None
    ) -> Episode:
        """Return the episode: a sequence for each leaf. A turn that several continue is trained in the first of them.

        Args:
            reason: why it ended.
            rewards: the rewards of each turn by name, in the order of `turns`.
            states: what each turn depended on, in the same order; None: the tokens before it.
        """
        inner = {id(turn.before) for turn in self.turns}
        places: dict[int, tuple[int, str]] = {}
        """Where each turn is trained, and in which state."""
        made: list[Trajectory] = []
        for leaf in (turn for turn in self.turns if id(turn) not in inner):
            path = leaf.path
            transcript, begin = Transcript(path[0].given), sum(len(each.tokens_T) for each in made)
            for turn in path:
                if turn is not path[0]:
                    transcript.given(turn.given)
                if id(turn) in places:
                    transcript.given(turn.completion.token_ids.tolist())
                else:
                    places[id(turn)] = (begin + len(transcript), transcript.state)
                    transcript.sampled(turn.completion)
            made.append(transcript.trajectory())
        moves = []
        for number, (turn, own) in enumerate(zip(self.turns, rewards, strict=True)):
            start, state = places[id(turn)]
            moves.append(Move(start, len(turn.completion.token_ids), own, states[number] if states else state))
        total: Counter[str] = Counter()
        for own in rewards:
            total.update(own)
        effort = Effort(given=sum(len(turn.given) for turn in self.turns))
        return Episode(tuple(made), reason, dict(total), len(self.turns), moves, effort)

    def _encoded(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens)) if text else ()

    def _decoded_after(self, before: list[int], sampled: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of sampled tokens; where tokenizers write the first word otherwise, as it is in its place."""

        def decoded(token_ids: list[int]) -> str:
            options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
            return str(self._tokenizer.decode(token_ids, **options))

        whole, start = decoded([*before, *sampled]), decoded(before)
        return whole[len(start) :] if whole.startswith(start) else decoded(sampled)
