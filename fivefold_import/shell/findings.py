"""What is found in a script: the commands that it launches, and what of it is not read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fivefold_import.shell.commands import OVERRIDE
from fivefold_import.shell.expand import Text


@dataclass
class Script:
    """What is found in a script."""

    launches: list[list[Text]] = field(default_factory=list)
    """The arguments of each program that is started with `key=value` arguments."""
    programs: list[str] = field(default_factory=list)
    """The program of each launch: the module after `-m`, or the script's file."""
    problems: list[str] = field(default_factory=list)
    """What of the script is not read, though bash might run it, or would not run it as it is meant."""
    notes: list[str] = field(default_factory=list)
    """Notes on what depends on commands, which are not run."""
    exported: list[str] = field(default_factory=list)
    """Environment variables that the script sets for the program and does not read itself."""
    doubtful: dict[str, set[str]] = field(default_factory=dict)
    """Problems with variables alone, each with the notes of texts that depend on them."""

    def report(self, problem: str, notes: Iterable[str] = ()) -> None:
        """Add a problem; with `notes`, it is one only if an argument of a launch has one of them in the end."""
        self.problems.append(problem)
        if found := set(notes):
            self.doubtful.setdefault(problem, set()).update(found)

    def drop_unused(self) -> None:
        """Drop problems with variables that no argument of a launch depends on."""
        used = {note for launch in self.launches for word in launch for note in word.notes}
        unused = {problem for problem, notes in self.doubtful.items() if not notes & used}
        if self.launches:
            self.problems = [problem for problem in self.problems if problem not in unused]


def stray(words: Sequence[str], line: int) -> str:
    """Return the problem with arguments that begin a command, because the line before them does not continue."""
    keys = sum(bool(OVERRIDE.match(word) or word.startswith("--")) for word in words)
    others = f" and the {keys - 1} keys after it" if keys > 2 else " and the key after it" if keys == 2 else ""
    return (
        f"line {line}: bash runs `{words[0]}` as a command, so that it{others} are not read; a `\\` continues a line "
        "only as its last character, with no blank and no comment after it"
    )
