"""Errors in layouts: the rule that is broken, what to write instead, and the place in the string, if there is one."""

from __future__ import annotations

from typing import Literal

Part = Literal["dims", "attn", "ffn"]
WIDTH = 200
"""Most characters of a text that an error shows."""


class RuleError(ValueError):
    """Degrees that break a rule, whether they come from a string or from a program.

    `role`, `part` and `letter` name the degree, so that a parser can put its caret there.
    """

    def __init__(self, rule: str, fix: str, *, letter: str = "", part: Part = "dims", role: int = 0) -> None:
        super().__init__(f"{rule}; {fix}")
        self.rule = rule
        self.fix = fix
        self.letter = letter
        self.part: Part = part
        self.role = role


class AllocationError(ValueError):
    """An allocation string that cannot be read. The message has a caret under the character at fault:

    unknown backend `megatrn`
      megatrn:d4
      ^
    fix: write `megatron`
    """

    def __init__(self, rule: str, fix: str, text: str, position: int) -> None:
        line = "".join(character if character.isprintable() else " " for character in text)
        # A text that is too long for a line is cut to the part around the fault.
        start = max(0, position - WIDTH // 2) if len(line) > WIDTH else 0
        before, after = "... " * (start > 0), " ..." * (start + WIDTH < len(line))
        shown = f"{before}{line[start : start + WIDTH]}{after}"
        super().__init__(f"{rule}\n  {shown}\n  {' ' * (len(before) + position - start)}^\nfix: {fix}")
        self.rule = rule
        self.fix = fix
        self.text = text
        self.position = position
