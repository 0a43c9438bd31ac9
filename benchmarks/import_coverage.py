"""Counts which of another framework's example files become recipes, and what the others need that Fivefold lacks.

    python benchmarks/import_coverage.py verl/examples --from verl --set DEVICE=gpu PET_NNODES=8
    python benchmarks/import_coverage.py ROLL/examples --from roll --suffixes .yaml --files

All YAML files and shell scripts below a folder are converted, one by one, as `fivefold import` does. A file counts as
*clean* with no unsupported key and no problem, as *unsupported* with such keys alone, and as a *problem* with one: a
part that was not read, or something that the recipe's command would refuse. *Refused* files describe no training that
is imported. Whether a file trains on Megatron-Core is read from its recipe.

The second table counts files and keys by the reason that the report gives, with names and numbers left out of it. The
last column counts files that nothing else holds up.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fivefold_import.framework import Framework
from fivefold_import.recipe import convert

SUFFIXES = (".yaml", ".yml", ".sh")
Outcome = Literal["clean", "unsupported", "problem", "refused"]
PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|(?:\.{0,2}/|\$)[\w./-]+|[\w-]+/[\w./-]+|\b\d[\d.,]*\b")
"""What differs from file to file in a reason: quoted words, paths, names of models, variables, numbers."""
LONGEST_REASON = 110


@dataclass(frozen=True)
class Row:
    """What became of one file."""

    file: str
    outcome: Outcome
    backend: str
    """The actor's backend; empty for a file that was refused."""
    reasons: tuple[tuple[str, str], ...]
    """A key, empty for a problem of the whole file, and why Fivefold does not do what it asks for."""

    @property
    def is_megatron(self) -> bool:
        """Whether the file trains on Megatron-Core."""
        return self.backend.startswith("megatron")


def rows_of(framework: Framework, folder: Path, suffixes: Sequence[str], environment: Mapping[str, str]) -> list[Row]:
    """Return a row for each file below `folder` that has one of the suffixes."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in suffixes and file.is_file())
    return [_row(framework, file, file.relative_to(folder), environment) for file in files]


def _row(framework: Framework, file: Path, name: Path, environment: Mapping[str, str]) -> Row:
    try:
        recipe, report = convert(framework, [file], [], environment)
    except ValueError as error:
        return Row(str(name), "refused", "", (("", str(error)),))
    reasons = (*((entry.key, entry.note) for entry in report.unsupported), *(("", each) for each in report.problems))
    outcome: Outcome = "problem" if report.problems else "unsupported" if reasons else "clean"
    return Row(str(name), outcome, _backend(recipe), reasons)


def _backend(recipe: Mapping[str, Any]) -> str:
    actor = recipe.get("actor", {})
    if isinstance(written := recipe.get("allocation_mode"), str):
        return "megatron" if "megatron" in written else written
    return str(actor.get("backend", "")) if isinstance(actor, Mapping) else ""


def counts(rows: Sequence[Row]) -> str:
    """Return the table of outcomes, of all files and of those on Megatron-Core."""
    lines = ["| files | " + " | ".join(get_args(Outcome)) + " |", "|---" * 5 + "|"]
    for title, some in ((f"{len(rows)}", rows), ("on Megatron-Core", [row for row in rows if row.is_megatron])):
        title = title if some is rows else f"{len(some)} {title}"
        numbers = [sum(row.outcome == outcome for row in some) for outcome in get_args(Outcome)]
        lines.append(f"| {title} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(lines)


def lacking(rows: Iterable[Row], most: int) -> str:
    """Return the table of reasons, the most frequent first."""
    keys: dict[str, int] = defaultdict(int)
    files: dict[str, list[Row]] = defaultdict(list)
    alone: dict[str, int] = defaultdict(int)
    for row in rows:
        found = [general(reason) for _, reason in row.reasons]
        for reason in found:
            keys[reason] += 1
        for reason in set(found):
            files[reason].append(row)
            alone[reason] += len(set(found)) == 1
    lines = ["| files | on Megatron-Core | keys | alone | what is lacking |", "|---" * 5 + "|"]
    for reason in sorted(files, key=lambda reason: (-len(files[reason]), reason))[:most]:
        megatron = sum(row.is_megatron for row in files[reason])
        lines.append(f"| {len(files[reason])} | {megatron} | {keys[reason]} | {alone[reason]} | {reason} |")
    return "\n".join(lines)


def general(reason: str) -> str:
    """Return a reason without what only one file has, on one line."""
    text = PARTICULAR.sub("...", " ".join(reason.split())).replace("|", "/")
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON].rsplit(" ", 1)[0] + " ..."


def main() -> None:
    """Convert the files, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the framework's example files")
    parser.add_argument("--from", dest="framework", required=True, choices=get_args(Framework))
    parser.add_argument("--suffixes", nargs="+", default=list(SUFFIXES), help="endings of the files' names")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="variables that scripts read")
    parser.add_argument("--most", type=int, default=40, help="rows of the second table")
    parser.add_argument("--files", action="store_true", help="list each file that is not clean, with its keys")
    parser.add_argument("--json", type=Path, help="file for a row of JSON for each file")
    given = parser.parse_args()
    if not given.folder.is_dir():
        parser.error(f"{given.folder} is no folder: give the one with the framework's examples")
    if unclear := [word for word in given.set if "=" not in word]:
        parser.error(f"--set {unclear[0]}: write NAME=VALUE")
    environment = {"HOME": "/root", **dict(word.split("=", 1) for word in given.set)}
    rows = rows_of(given.framework, given.folder, given.suffixes, environment)
    if given.json is not None:
        given.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    print(counts(rows))
    print()
    print(lacking((row for row in rows if row.outcome != "refused"), given.most))
    for row in rows if given.files else []:
        if row.outcome != "clean":
            print(f"\n{row.file}: {row.outcome} {row.backend}".rstrip())
            print("\n".join(f"    {key or '-'}: {' '.join(reason.split())}" for key, reason in row.reasons))


if __name__ == "__main__":
    main()
