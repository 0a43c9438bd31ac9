"""Mutated recipes: each is refused with one clear error, or accepted and written back as the same recipe.

    python benchmarks/mutated_recipes.py --count 10000

The recipes that ship, and some that `fivefold import` makes, are changed at random: keys are dropped, given twice,
misspelled and moved, values get other types and sizes, lines get other characters, overrides are broken. Each result is
read and planned as `fivefold plan` does. Four things are faults: an exception that is not a ValueError, a message that
names neither a key nor the file, two seconds of computing, and a recipe that is accepted but not the same after it is
written and read again. The program prints a table, and each fault with the number that makes it again (`--first`).
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.config.keys import known_keys
from fivefold.config.load import load_any_recipe, resolved_yaml
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.config.yaml_reader import read_yaml, write_yaml
from fivefold.planning.plan import plan_recipe
from fivefold.report.plan.as_json import plan_as_json
from fivefold_import.recipe import import_recipe

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests/unit/fivefold_import/fixtures"
IMPORTED = {
    "areal": "areal_moe_megatron.yaml",
    "roll": "roll_megatron.yaml",
    "siirl": "siirl_moe.sh",
    "trinity": "trinity_ppo_megatron.yaml",
    "verl": "verl_moe_megatron.sh",
}
GIVEN = {"actor.path": "Qwen/Qwen3-30B-A3B", "tokenizer_path": None}
"""Values in place of those that name models which are not here."""

MOST_SECONDS = 2.0
MOST_CHARACTERS = 20_000
"""Most characters of a message."""
KEYS = sorted({*known_keys(TrainRecipe), *known_keys(SFTRecipe)})
NAMES = {key.rpartition(".")[2] for key in KEYS}

Tree = dict[str, Any]


@dataclass(frozen=True)
class Mutant:
    """A recipe's text with overrides, and what was done to it."""

    base: str
    changes: tuple[str, ...]
    text: str
    overrides: tuple[str, ...]


@dataclass
class Verdict:
    """What became of one mutant."""

    outcome: str
    """`accepted`, `refused`, or the name of an exception."""
    message: str = ""
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def base_recipes(folder: Path) -> dict[str, Tree]:
    """Return the recipes that are changed, by name; those of other frameworks are imported into `folder`."""
    trees = {
        path.stem: read_yaml(path.read_text(encoding="utf-8"), path.name)
        for path in sorted((ROOT / "recipes").iterdir())
    }
    set_value(trees["smollm2-addition"], ["actor", "path"], "package:tiny-moe")
    for framework, file in IMPORTED.items():
        output = folder / f"{framework}.yaml"
        import_recipe(framework, [FIXTURES / file], [], output, environment={"HOME": "/home/user"})  # type: ignore[arg-type]
        tree = read_yaml(output.read_text(encoding="utf-8"), output.name)
        for key, value in GIVEN.items():
            set_value(tree, key.split("."), value)
        trees[framework] = replaced(tree, "???", "given.jsonl")
    return trees


def set_value(tree: Tree, path: list[str], value: Any) -> None:
    """Set the value at `path`; sections on the way are made."""
    *sections, name = path
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[name] = value


def replaced(value: Any, old: Any, new: Any) -> Any:
    """Return `value` with `new` for every `old` in it."""
    if isinstance(value, dict):
        return {key: replaced(inner, old, new) for key, inner in value.items()}
    return new if value == old else value


def paths(tree: Tree, above: tuple[str, ...] = ()) -> list[list[str]]:
    """Return the keys that lead to each value and to each section."""
    found = []
    for key, value in tree.items():
        found.append([*above, key])
        if isinstance(value, dict):
            found += paths(value, (*above, key))
    return found


def section_at(tree: Tree, path: list[str]) -> Tree:
    """Return the section that holds the last key of `path`."""
    for key in path[:-1]:
        tree = tree[key]
    return tree


VALUES: Mapping[str, tuple[Any, ...]] = {
    "huge": (10**9, 10**9 + 1, 2**31, 10**18, 10**30, int("9" * 99), 1e308, 1e-308, 32768, 65537),
    "negative": (-1, -(10**18), -0.5, -0.0, 0, 0.0),
    "not a number": (float("nan"), float("inf"), float("-inf")),
    "null": (None,),
    "nested": ([], {}, [[]], [None], {"a": {"b": [1, {"c": None}]}}, [{"path": "x"}], {"path": {"path": "x"}}),
    "another type": (True, False, 0, 1, 3.5, "8", "1e-5", "true", "text", [1, 2], {"a": 1}, [0.5], "[1, 2]"),
    "a text of YAML 1.1": ("yes", "Off", "1_000", "12:30:45", "0o17", "0x1f", "012", "2024-01-01", "<<", "=", "~"),
    "unicode": ("é" * 300, "\u202egpj", "𝟠", "日本語", "\ufeff", "\0", "a\nb", "\t", " ", "", "٣", "x" * 5000, "\x7f"),
    "an interpolation": (
        "${seed}", "${nowhere}", "${actor}", "${.}", "${", "$", "\\${seed}", "${seed}${seed}", "${oc.env:HOME}",
        "${oc.env:NOT_SET}", "${oc.foo:1}", "${actor.path}/${seed}", "${reward.kwargs}", "???", "${a.b.c.d}",
    ),
    "a path": (
        "package:", "package:nope", "/etc/passwd", "~nobody-here/x", "/", ".", "..", "/dev/zero", "http://x", "y" * 300
    ),
    "a layout": (
        "megatron:d1", "megatron:d*", "megatron:d999999t999999", "megatron:d2p2v99999", "fsdp:d4p1t1", "vllm:d0", "+|",
        "vllm:d1t3", "megatron:(attn:d2|ffn:e3)", "transformers:d2", "sglang:d4t4+megatron:d16", "0-31", "[0, 0]",
        "range(0, 999999)",
    ),
    "a reward": ("math", "no_such", "os:getcwd", "no_module:f", "a:b:c", ":", "/no/file.py:f", "json.decoder:nothing"),
}  # fmt: skip
BROKEN = (
    "[1", "{a: 1", "'x", '"', "a: b: c", "*x", "&a [*a]", "!foo 1", "!!int x", "%", "@", "`", "\t", "- x", "? x",
    "1 # c", "", "=", "{}", "[]", "null", "9" * 200, "[" * 200, "{1: 2}", "{a: 1, a: 2}", "\udce9", "\x00", "'\\ud800'",
    "${", "--- 1", "...", "{<<: 1}", "1e999", "true", "[1, 2]", "{a: {b: 1}}", "x" * 3000, ", ", "]", "}", ": ",
    "|", ">",
)  # fmt: skip
SOUND = (
    "seed=3", "gconfig.n_samples=4", "actor.optimizer.lr=1e-5", "actor={path: package:tiny-moe}", "reward.kwargs={}",
    "reward=null", "cluster.n_gpus_per_node=0", "actor.mb_spec={n_mbs: 2}", "tokenizer_path='8'",
    "stats.trackers=[]", "actor.optimizer={lr: '${actor.optimizer.eps}'}",
    "trial_name=${experiment_name}-${seed}", "saver.freq_steps=2",
)  # fmt: skip
CHARACTERS = "\t\n :#-?*&!|>'\"%@`{}[],\\$~\0\x7f\u2028\ufeff\u202eé0aZ=<"


def dropped(tree: Tree, dice: random.Random) -> None:
    path = dice.choice(paths(tree))
    del section_at(tree, path)[path[-1]]


def swapped(tree: Tree, dice: random.Random) -> None:
    one, other = (dice.choice(paths(tree)) for _ in range(2))
    if one[: len(other)] == other or other[: len(one)] == one:
        return
    first, second = section_at(tree, one)[one[-1]], section_at(tree, other)[other[-1]]
    section_at(tree, one)[one[-1]], section_at(tree, other)[other[-1]] = second, first


def moved(tree: Tree, dice: random.Random) -> None:
    path = dice.choice(paths(tree))
    value = section_at(tree, path).pop(path[-1])
    sections = [each for each in paths(tree) if isinstance(section_at(tree, each)[each[-1]], dict)]
    set_value(tree, [*(dice.choice(sections) if sections else []), path[-1]], value)


def misspelled(tree: Tree, dice: random.Random) -> None:
    path = dice.choice(paths(tree))
    section, name = section_at(tree, path), path[-1]
    place = dice.randrange(len(name) + 1)
    typo = dice.choice(
        [
            name[:place] + name[place + 1 :],
            name[:place] + dice.choice("aeé_.-0 :#") + name[place:],
            name.upper(),
            name * 30,
        ]
    )
    section[typo] = section.pop(name)


def added(tree: Tree, dice: random.Random) -> None:
    key = dice.choice(KEYS)
    set_value(tree, key.split("."), dice.choice(VALUES[dice.choice(list(VALUES))]))


def varied(tree: Tree, dice: random.Random) -> None:
    """Change a value a little, so that it is likely accepted."""
    path = dice.choice(paths(tree))
    section, name = section_at(tree, path), path[-1]
    match section[name]:
        case bool(flag):
            section[name] = not flag
        case int(number):
            section[name] = dice.choice((1, 2, 3, number + 1, number * 2, number // 2, number * 1000))
        case float(number):
            section[name] = dice.choice((number / 2, number * 2, 0.5, 1.0, 1e-12))
        case _:
            return


def given(kind: str) -> Callable[[Tree, random.Random], None]:
    """Return the change that gives one key a value of `kind`."""

    def change(tree: Tree, dice: random.Random) -> None:
        path = dice.choice(paths(tree))
        section_at(tree, path)[path[-1]] = dice.choice(VALUES[kind])

    return change


OF_TREES: Mapping[str, Callable[[Tree, random.Random], None]] = {
    "a key dropped": dropped,
    "two values swapped": swapped,
    "a key in the wrong section": moved,
    "a key misspelled": misspelled,
    "a known key added": added,
    "a number or a flag changed": varied,
    **{f"{kind} for a value": given(kind) for kind in VALUES},
}


def of_text(text: str, dice: random.Random) -> tuple[str, str]:
    """Return what is done to a recipe's text, and the result."""
    lines = text.splitlines()
    place = dice.randrange(len(lines))
    match dice.randrange(8):
        case 0:
            return "a line twice", "\n".join([*lines[:place], lines[place], *lines[place:]])
        case 1:
            return "a line dropped", "\n".join([*lines[:place], *lines[place + 1 :]])
        case 2:
            indented = " " * dice.randrange(1, 9) + lines[place]
            return "a line indented", "\n".join([*lines[:place], indented, *lines[place + 1 :]])
        case 3:
            return "a text cut short", text[: dice.randrange(len(text))]
        case 4:
            return "two lines swapped", "\n".join(
                [*lines[:place], *reversed(lines[place : place + 2]), *lines[place + 2 :]]
            )
        case 5:
            key, _, _ = lines[place].partition(":")
            return "broken YAML for a value", "\n".join(
                [*lines[:place], f"{key}: {dice.choice(BROKEN)}", *lines[place + 1 :]]
            )
        case 6:
            return "a long text", text + dice.choice(
                ["a: " + "[" * 3000, "b: &b [*b]\n", "c: [" + "1, " * 30_000 + "]", "d:\n" * 5000]
            )
        case _:
            at = dice.randrange(len(text))
            return "a character", text[:at] + dice.choice(CHARACTERS) + text[at + dice.randrange(2) :]


def override(dice: random.Random) -> str:
    """Return an override, which is likely broken."""
    if dice.random() < 0.4:
        return dice.choice(SOUND)
    key = dice.choice(KEYS)
    if dice.random() < 0.3:
        place = dice.randrange(len(key) + 1)
        key = (
            key[:place]
            + dice.choice(["", "..", ".", "=", " ", "[0]", "+", "é", "x"])
            + key[place + dice.randrange(2) :]
        )
    value = dice.choice(BROKEN) if dice.random() < 0.5 else written(dice.choice(VALUES[dice.choice(list(VALUES))]))
    return key if dice.random() < 0.03 else f"{dice.choice(['', '', '', '', '+', '++', '--', '~'])}{key}={value}"


def written(value: Any) -> str:
    """Return a value as a user writes it after `key=`."""
    return value if isinstance(value, str) else write_yaml({"x": value}).removeprefix("x:").strip()


def mutant(number: int, bases: Mapping[str, Tree]) -> Mutant:
    """Return the mutant of a number, which is the same in every run."""
    dice = random.Random(number)
    base = dice.choice(list(bases))
    tree = copied(bases[base])
    changes = []
    for _ in range(dice.choice((0, 1, 1, 1, 1, 2))):
        change = dice.choice(list(OF_TREES)) if dice.random() < 0.6 else "a number or a flag changed"
        if tree:
            changes.append(change)
            OF_TREES[change](tree, dice)
    text = write_yaml(tree)
    if dice.random() < 0.15:
        change, text = of_text(text, dice)
        changes.append(change)
    overrides = tuple(override(dice) for _ in range(dice.choice((0, 0, 0, 0, 1, 2))))
    return Mutant(base, (*changes, *(["an override"] if overrides else [])) or ("nothing",), text, overrides)


def copied(value: Any) -> Any:
    """Return a copy of a tree that can be changed."""
    return {key: copied(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def judge(each: Mutant, folder: Path) -> Verdict:
    """Read and plan a mutant, and return what became of it."""
    file = folder / "mutant.yaml"
    file.write_bytes(each.text.encode("utf-8", "surrogatepass"))
    began = time.process_time()
    try:
        recipe = load_any_recipe(file, each.overrides)
        plan_as_json(plan_recipe(recipe))
    except ValueError as error:
        verdict = Verdict("refused", str(error))
        if not named(str(error), file):
            verdict.faults.append("the message names neither a key nor the file")
        if len(str(error)) > MOST_CHARACTERS:
            verdict.faults.append(f"the message has {len(str(error)):,} characters")
        recipe = None
    except Exception as error:  # noqa: BLE001  any other exception is what this program looks for
        verdict = Verdict(type(error).__name__, str(error), faults=[f"raised {type(error).__name__}: {error}"])
        recipe = None
    else:
        verdict = Verdict("accepted")
    verdict.seconds = time.process_time() - began
    if verdict.seconds > MOST_SECONDS:
        verdict.faults.append(f"took {verdict.seconds:.1f} s")
    if recipe is not None:
        verdict.faults += differences(recipe, folder)
    return verdict


def named(message: str, file: Path) -> bool:
    """Whether a message names the file or a key."""
    words = set(message.replace(".", " ").replace("=", " ").replace(":", " ").replace(",", " ").split())
    return str(file) in message or bool(NAMES & words)


def differences(recipe: TrainRecipe | SFTRecipe, folder: Path) -> list[str]:
    """Return a fault if the recipe is another one after it is written and read again."""
    file = folder / "resolved.yaml"
    text = resolved_yaml(recipe)
    file.write_text(text, encoding="utf-8")
    try:
        again = load_any_recipe(file, [])
    except ValueError as error:
        return [f"the resolved recipe is refused: {error}"]
    # The texts are compared, because NaN is not equal to itself.
    return [] if resolved_yaml(again) == text else ["the resolved recipe is another one"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="number of mutants")
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    arguments = parser.parse_args()
    outcomes: dict[str, Counter[str]] = {}
    slowest, slowest_number, n_faults = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bases = base_recipes(folder)
        for number in range(arguments.first, arguments.first + arguments.count):
            each = mutant(number, bases)
            verdict = judge(each, folder)
            for change in each.changes:
                outcomes.setdefault(change, Counter())[verdict.outcome] += 1
            outcomes.setdefault("all", Counter())[verdict.outcome] += 1
            if verdict.seconds > slowest:
                slowest, slowest_number = verdict.seconds, number
            for fault in verdict.faults:
                n_faults += 1
                print(f"{number} {each.base} {each.changes}: {fault[:300]}\n  {verdict.message[:300]}")
    print(f"{'change':42}{'accepted':>10}{'refused':>10}{'other':>8}")
    for change, counts in sorted(outcomes.items()):
        others = counts.total() - counts["accepted"] - counts["refused"]
        print(f"{change:42}{counts['accepted']:>10}{counts['refused']:>10}{others:>8}")
    print(f"faults: {n_faults}; slowest: {slowest:.2f} s (number {slowest_number})")


if __name__ == "__main__":
    main()
