"""Count what one training step enters: the modules, lines of functions and lines of files, by room, in all processes.

    .venv/bin/python scripts/step_reach.py                      # the third step of recipes/quickstart.yaml
    .venv/bin/python scripts/step_reach.py RECIPE key=value ... --step 2

Every Python process of the run loads a hook that puts a call at the head of each function of Fivefold, which notes the
function if the driver is in that step. A profiler would not see the threads in which Ray calls an actor.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRIVER = """
import sys
from pathlib import Path
from fivefold.cli.main import app
from fivefold.run import steps

begun, step = Path(sys.argv[1]), int(sys.argv[2])
sys.argv = ["fivefold", *sys.argv[3:]]
inner = steps.Loop.step

def traced(self, state):
    if state.step + 1 == step:
        begun.touch()
    try:
        return inner(self, state)
    finally:
        begun.unlink(missing_ok=True)

steps.Loop.step = traced
app()
"""
HOOK = '''
import ast, builtins, os
from importlib.machinery import SourceFileLoader

_BEGUN, _FOUND, _ROOT = (os.environ[f"STEP_REACH_{name}"] for name in ("BEGUN", "FOUND", "ROOT"))
_seen = set()

def _note(file, line):
    """Note a function's first call in the step. One that was noted costs a look into a set."""
    if (file, line) not in _seen and os.path.exists(_BEGUN):
        _seen.add((file, line))
        with open(_FOUND, "a") as found:
            found.write(f"{file}\\t{line}\\n")

def _traced(loader, name):
    path = loader.get_filename(name)
    if not path.startswith(_ROOT):
        return _get_code(loader, name)
    tree = ast.parse(loader.get_data(path), path)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_documented = ast.get_docstring(node, clean=False) is not None
            call = ast.parse(f"__step_reach__({path!r}, {node.lineno})").body[0]
            node.body.insert(int(is_documented), ast.copy_location(call, node.body[0]))
    return compile(ast.fix_missing_locations(tree), path, "exec")

builtins.__step_reach__ = _note
_get_code, SourceFileLoader.get_code = SourceFileLoader.get_code, _traced
'''


def trace(recipe: str, overrides: list[str], step: int) -> set[tuple[Path, int]]:
    """Run the recipe to the end of `step`. Returns the file and first line of each function that the step called."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        found = folder / "found"
        found.touch()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH", "")))),
            "STEP_REACH_BEGUN": str(folder / "begun"),
            "STEP_REACH_FOUND": str(found),
            "STEP_REACH_ROOT": str(ROOT / "fivefold"),
        }
        options = [f"cluster.fileroot={folder / 'runs'}", f"total_train_steps={step + 1}", *overrides]
        command = [sys.executable, "-c", DRIVER, environment["STEP_REACH_BEGUN"], str(step), "train", recipe, *options]
        subprocess.run(command, env=environment, check=True, cwd=ROOT)
        lines = [line.split("\t") for line in found.read_text().splitlines()]
    return {(Path(file), int(line)) for file, line in lines}


def function_lines(file: Path, called: set[int]) -> int:
    """Return the lines of a file's functions that were called."""
    lines = set[int]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno in called:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def main() -> None:
    """Print a table of rooms and, below it, the modules with their lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--step", type=int, default=3)
    arguments = parser.parse_args()
    called = defaultdict[Path, set[int]](set)
    for file, line in trace(arguments.recipe, arguments.overrides, arguments.step):
        called[file.relative_to(ROOT)].add(line)
    sizes = {
        file: (function_lines(ROOT / file, lines), len((ROOT / file).read_text().splitlines()))
        for file, lines in sorted(called.items())
    }
    rooms = defaultdict[str, list[Path]](list)
    for file in sizes:
        rooms[file.parts[1] if len(file.parts) > 2 else "."].append(file)
    print(f"\n{'room':<16}{'modules':>8}{'functions':>11}{'files':>8}")
    for room, files in rooms.items():
        print(f"{room:<16}{len(files):>8}{sum(sizes[f][0] for f in files):>11}{sum(sizes[f][1] for f in files):>8}")
    print(f"{'all':<16}{len(sizes):>8}{sum(f for f, _ in sizes.values()):>11}{sum(n for _, n in sizes.values()):>8}\n")
    for file, (functions, whole) in sizes.items():
        print(f"{functions:>6}{whole:>6}  {file}")


if __name__ == "__main__":
    main()
