"""Find wording in code, tests and pages that a native engineer would not use, and say what to write.

    .venv/bin/python scripts/check_english.py [PATH ...]

A line that needs such words, to quote a library or to mean them literally, ends with the comment `english: ok`.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PHRASES: dict[str, str] = {
    r"\b(?:that|those) of\b": "repeat the noun",
    r"\bof which\b": "whose, or a new sentence",
    r"\b(?:is|are|was|were|be) told\b": "gets, receives, or knows",
    r"\bgo(?:es)? on\b|\bwent on\b|\bgoing on\b": "continues",
    r"\banew\b": "again, or from scratch",
    r"\bbeside\b": "next to, alongside, while, or in parallel with",
    r"\bof (?:its|their|his|our|your) own\b": "its own, or separate",
    r"\b(?:groundwork|standstill|forgoes|henceforth|whereof|thereof|wherein|amongst|whilst)\b": "the plain word",
    r"\bmoving weights\b": "EMA",
    r"\bliving (?:server|replica)": "alive",
    r"\bbegun? anew\b": "restarted",
    r"\bstands? still\b": "pauses",
    r"\blearnt\b": "learned",
    r"\bnot (?:told|said) (?:of|about)\b": "not reported",
    r"\bhas done with\b": "is done with",
    r"\bnothing but\b": "only",
}
PATTERNS = {re.compile(pattern, re.IGNORECASE): advice for pattern, advice in PHRASES.items()}
SKIPPED = ("CHANGELOG.md", "LICENSE", "benchmarks/results/", "fivefold/report/assets/", "scripts/check_english.py")
NOT_YET = ("benchmarks/", "tests/")
"""Folders whose wording is still to be mended; name their files to see it."""


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that are written for people, with their numbers: strings and comments of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    kinds = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            yield from enumerate(token.string.splitlines(), token.start[0])


def findings(path: Path) -> Iterator[str]:
    """Yield what is to be written in another way, by line."""
    allowed = {n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if "english: ok" in line}
    for number, line in prose(path):
        for pattern, advice in PATTERNS.items():
            if number not in allowed and (found := pattern.search(line)):
                yield f"{path}:{number}: {found[0]!r}: {advice}"


def main() -> None:
    """Print all findings, and fail if there are any."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md", "*.yaml"], capture_output=True, text=True, check=True)
    paths = sys.argv[1:] or [path for path in listed.stdout.splitlines() if not path.startswith(SKIPPED + NOT_YET)]
    found = [finding for path in paths if Path(path).is_file() for finding in findings(Path(path))]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
