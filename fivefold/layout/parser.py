"""Parses allocation strings: the backend of each role, its degrees, and the roles that share devices.

    sglang:d4t4+megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)        16 devices generate, 16 train
    vllm[rollout]:d*|megatron[actor]:d4t2                    both on the same 8 devices, in turn

    allocation := group ("+" group)*         "+": separate devices
    group      := role ("|" role)*           "|": the same devices, in turn; binds tighter
    role       := backend ["[" name "]"] ":" (degrees | hybrid)
    hybrid     := "(" "attn" ":" degrees "|" "ffn" ":" degrees ")"
    degrees    := (letter number)+           d data, t tensor, p pipeline, c context, e expert, v virtual stages;
                                             `d*`: as many replicas as there are devices left

`parse` reads a string. `str()` of its result prints it, and the printed form parses to an equal value.

The parser is a recursive descent, with one method for each rule of the grammar.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from fivefold.layout.allocation import NAME, Allocation, RoleAllocation, refused_letter
from fivefold.layout.backends import BACKENDS, NOT_OFFERED, backend_names
from fivefold.layout.errors import AllocationError, Part, RuleError
from fivefold.layout.parallel import ParallelLayout

ATTENTION_LETTERS = "dtpcv"
EXPERT_LETTERS = "dtepv"
DIGITS = "0123456789"
MOST_DIGITS = 6
MOST_CHARACTERS = 10_000
MOST_SHOWN = 40
"""Most characters of a word in a message."""
MEANING = {"d": "data", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert", "v": "virtual stages"}


@dataclass(frozen=True)
class Degrees:
    """Letters and numbers as written; None stands for `*`."""

    values: Mapping[str, int | None]
    positions: Mapping[str, int]

    def get(self, letter: str) -> int:
        """Return the degree, which is 1 if it is not written. An open `d` has none."""
        value = self.values.get(letter, 1)
        assert value is not None, "only d may be open"
        return value

    def says(self, letter: str) -> bool:
        """Whether the letter is written with a number."""
        return self.values.get(letter) is not None


def parse(text: str) -> Allocation:
    """Return the allocation that `text` describes.

    Raises:
        AllocationError: a text that breaks the grammar or a rule, with a caret under the character at fault.
    """
    return AllocationParser(text).allocation()


def parse_role(text: str) -> RoleAllocation:
    """Return the role in a string such as `actor.backend`, which has no `+` and no name; `d*` is kept open.

    Raises:
        AllocationError: see `parse`.
    """
    return AllocationParser(text).single_role()


def parse_backend(text: str) -> ParallelLayout:
    """Return the layout in one role's string.

    Raises:
        AllocationError: a string that cannot be read, or that has `d*`.
    """
    return parse_role(text).resolve()


class AllocationParser:
    """Reads one string. Every error carries the position of the character at fault."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            rule = f"{len(text):,} characters are more than the {MOST_CHARACTERS:,} of the longest layout"
            raise AllocationError(rule, "write the roles and their degrees alone", text, MOST_CHARACTERS)
        self._text = text
        self._at = 0
        self._role_positions: list[int] = []
        self._degree_positions: list[dict[tuple[Part, str], int]] = []

    def allocation(self) -> Allocation:
        """allocation := group ("+" group)*"""
        groups = [self._group()]
        while self._take("+"):
            groups.append(self._group())
        self._expect_end()
        try:
            return Allocation(tuple(groups))
        except RuleError as error:
            self._fail_rule(error)

    def single_role(self) -> RoleAllocation:
        """Read one role and nothing else."""
        role = self._role()
        if self._peek() in ("+", "|"):
            self._fail(
                "this string lays out one role, so it has no `+` or `|`",
                "give each role its own `backend`, or set `allocation_mode`",
            )
        self._expect_end()
        if role.name is not None:
            self._fail("the key names the role already", f"drop [{role.name}]", self._text.index("["))
        return role

    def _group(self) -> tuple[RoleAllocation, ...]:
        """group := role ("|" role)*"""
        roles = [self._role()]
        while self._take("|"):
            roles.append(self._role())
        return tuple(roles)

    def _role(self) -> RoleAllocation:
        """role := backend ["[" name "]"] ":" (degrees | hybrid)"""
        self._skip_blanks()
        self._role_positions.append(self._at)
        self._degree_positions.append({})
        backend = self._backend()
        name = self._name() if self._take("[") else None
        if not self._take(":"):
            self._fail(f"a `:` follows the backend {backend}", f"write its degrees, such as {backend}:d1")
        try:
            role = self._hybrid(backend) if self._peek() == "(" else self._plain(backend)
            return replace(role, name=name)
        except RuleError as error:
            self._fail_rule(error, len(self._role_positions) - 1)

    def _backend(self) -> str:
        start = self._at
        word = self._word()
        if word in NOT_OFFERED:
            self._fail(f"the {word} backend is not offered", f"train with {backend_names(trains=True)}", start)
        if word not in BACKENDS:
            close = difflib.get_close_matches(word.lower(), list(BACKENDS), n=1)
            rule = f"unknown backend `{_short(word)}`" if word else "a backend is expected here"
            self._fail(rule, f"write `{close[0]}`" if close else f"write one of {', '.join(BACKENDS)}", start)
        return word

    def _name(self) -> str:
        start = self._at
        name = self._word()
        if not name:
            self._fail(
                "a role's name is expected here",
                "start with a letter; continue with letters, digits, `_` and `-`",
                start,
            )
        if not self._take("]"):
            self._fail("the `[` of the name is not closed", "add `]` after the name")
        return name

    def _plain(self, backend: str) -> RoleAllocation:
        degrees = self._degrees(backend, BACKENDS[backend].letters, "dims")
        return RoleAllocation(
            backend,
            dp=degrees.values.get("d", 1),
            tp=degrees.get("t"),
            pp=degrees.get("p"),
            cp=degrees.get("c"),
            vpp=degrees.get("v"),
            ep=degrees.get("e"),
        )

    def _hybrid(self, backend: str) -> RoleAllocation:
        """hybrid := "(" "attn" ":" degrees "|" "ffn" ":" degrees ")" """
        if not BACKENDS[backend].folds_experts:
            self._fail(
                f"{backend} has one layout for all layers",
                f"write {backend}:d..., or use megatron for attn and ffn layouts",
            )
        self._take("(")
        attn = self._part("attn", ATTENTION_LETTERS)
        if not self._take("|"):
            self._fail("`|ffn:...` follows the attention part", "write (attn:...|ffn:...)")
        ffn = self._part("ffn", EXPERT_LETTERS)
        if not self._take(")"):
            self._fail("the `(` is not closed", "add `)` after the ffn part")
        return self._folded(backend, attn, ffn)

    def _part(self, part: Part, letters: str) -> Degrees:
        start = self._skip_blanks()
        word = self._word()
        if word != part or not self._take(":"):
            self._fail(f"`{part}:` is expected here", "write (attn:...|ffn:...), in this order", start)
        return self._degrees(part, letters, part)

    def _folded(self, backend: str, attn: Degrees, ffn: Degrees) -> RoleAllocation:
        """Join the two parts: they share p and v and fill the same ranks, so one part's d follows from the other's."""
        for letter in "pv":
            if ffn.says(letter) and ffn.get(letter) != attn.get(letter):
                raise RuleError(
                    f"attention and experts share the pipeline, "
                    f"but attn has {letter}{attn.get(letter)} and ffn {letter}{ffn.get(letter)}",
                    f"leave {letter} out of ffn, or make the two equal",
                    letter=letter,
                    part="ffn",
                )
        experts, replica = ffn.get("t") * ffn.get("e"), attn.get("t") * attn.get("c")
        dp = attn.values.get("d", 1)
        if ffn.says("d"):
            ranks = ffn.get("d") * experts
            if dp is None and ranks % replica == 0:
                dp = ranks // replica
            elif dp is None or dp * replica != ranks:
                d = "*" if dp is None else str(dp)
                raise RuleError(
                    f"the two parts must fill the same ranks of a stage, "
                    f"but attn has d*t*c = {d}*{attn.get('t')}*{attn.get('c')}"
                    f" and ffn d*t*e = {ffn.get('d')}*{ffn.get('t')}*{ffn.get('e')} = {ranks}",
                    "leave d out of ffn: it follows from the others",
                    letter="d",
                    part="ffn",
                )
        return RoleAllocation(
            backend,
            dp=dp,
            tp=attn.get("t"),
            pp=attn.get("p"),
            cp=attn.get("c"),
            vpp=attn.get("v"),
            ep=ffn.get("e"),
            etp=ffn.get("t"),
        )

    def _degrees(self, owner: str, letters: str, part: Part) -> Degrees:
        """degrees := (letter number)+"""
        self._skip_blanks()
        values: dict[str, int | None] = {}
        positions: dict[str, int] = {}
        while self._peek_here().isalpha():
            start, letter = self._at, self._peek_here()
            if letter not in MEANING:
                if self._text.startswith(("attn:", "ffn:"), start):
                    self._fail(
                        "a layout of two parts stands in parentheses",
                        f"write {owner}:(attn:...|ffn:...), in a shell in quotes",
                    )
                known = ", ".join(f"{key} {meaning}" for key, meaning in MEANING.items() if key in letters)
                self._fail(f"unknown dimension `{letter}`", f"{owner} takes {known}")
            self._at += 1
            number = self._number(letter)
            # A degree of 1 splits nothing, so that every backend takes it.
            if letter not in letters and number != 1:
                self._refuse_letter(owner, letter, letters, part, start)
            if letter in values:
                self._fail(f"`{letter}` ({MEANING[letter]}) is given twice", "keep one of the two", start)
            values[letter] = number
            positions[letter] = start
            self._degree_positions[-1][part, letter] = start
        if not values:
            self._fail(f"{owner}: degrees are expected here", f"write at least one, such as {owner}:d1")
        return Degrees(values, positions)

    def _refuse_letter(self, owner: str, letter: str, letters: str, part: Part, position: int) -> NoReturn:
        if part == "dims":
            error = refused_letter(owner, letter)
            self._fail(error.rule, error.fix, position)
        fixes = {
            "c": "context parallelism splits attention: write it in attn",
            "e": "experts are in the ffn part: write it there",
        }
        self._fail(f"{part} takes {', '.join(letters)} only, not `{letter}`", fixes[letter], position)

    def _number(self, letter: str) -> int | None:
        start = self._at
        if self._peek_here() == "*":
            if letter != "d":
                self._fail(
                    f"`*` (what is left) goes with d only, not with `{letter}`", f"write a number after {letter}"
                )
            self._at += 1
            return None
        while self._peek_here() and self._peek_here() in DIGITS:
            self._at += 1
        digits = self._text[start : self._at]
        if not digits:
            self._fail(f"a number is missing after `{letter}`", f"write, for example, {letter}2", start)
        if digits[0] == "0":
            self._fail(
                f"`{letter}{_short(digits)}`: a degree is 1 or more, without leading zeros",
                f"write {letter}{_short(digits.lstrip('0') or '1')}",
                start,
            )
        if len(digits) > MOST_DIGITS:
            self._fail(f"a degree has at most {MOST_DIGITS} digits", "write the number of ranks that is meant", start)
        return int(digits)

    def _word(self) -> str:
        match = NAME.match(self._text, self._skip_blanks())
        if match is None:
            return ""
        self._at = match.end()
        return match.group()

    def _skip_blanks(self) -> int:
        while self._peek_here().isspace():
            self._at += 1
        return self._at

    def _peek_here(self) -> str:
        return self._text[self._at : self._at + 1]

    def _peek(self) -> str:
        self._skip_blanks()
        return self._peek_here()

    def _take(self, character: str) -> bool:
        if self._peek() != character:
            return False
        self._at += 1
        return True

    def _expect_end(self) -> None:
        found = self._peek()
        if found == ")":
            self._fail("this `)` closes nothing", "drop it, or open a hybrid with `(attn:`")
        if found:
            self._fail(f"`{found}` does not belong here", "join roles with `+` (own devices) or `|` (shared devices)")

    def _fail_rule(self, error: RuleError, role: int | None = None) -> NoReturn:
        index = error.role if role is None else role
        known = self._degree_positions[index]
        # Rules about experts name the letter of the plain form; in a hybrid it is in one of the two parts.
        candidates = [(error.part, error.letter), ("ffn", error.letter), ("attn", error.letter)]
        position = next((known[key] for key in candidates if key in known), self._role_positions[index])
        raise AllocationError(error.rule, error.fix, self._text, position) from error

    def _fail(self, rule: str, fix: str, position: int | None = None) -> NoReturn:
        raise AllocationError(rule, fix, self._text, self._at if position is None else position)


def _short(word: str) -> str:
    return word if len(word) <= MOST_SHOWN else f"{word[:MOST_SHOWN]}..."
