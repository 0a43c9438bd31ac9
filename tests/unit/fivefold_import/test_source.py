"""Files and overrides as flat keys, with interpolations filled in."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from fivefold_import.dialect import merged
from fivefold_import.source import read_document, read_overrides, resolve


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_sections_become_dotted_keys(tmp_path: Path) -> None:
    text = "a: {b: {c: 1}, empty: {}}\nlists: [1, [2, 3]]\nsections: [{x: 1}, {x: 2, y: []}]\nnothing: ~\n7: n\n"
    assert read_document(write(tmp_path, text), {}).values == {
        "a.b.c": 1,
        "a.empty": {},
        "lists": [1, [2, 3]],
        "sections.0.x": 1,
        "sections.1.x": 2,
        "sections.1.y": [],
        "nothing": None,
        "7": "n",
    }


def test_numbers_with_exponents_are_numbers() -> None:
    for text, value in {
        "1e-6": 1e-6,
        "1.0E-5": 1e-5,
        "5e3": 5000.0,
        "1_e3": "1_e3",
        "e5": "e5",
        "0.5": 0.5,
        "on": True,
    }.items():
        (read,) = read_overrides([f"a={text}"]).values.values()
        assert read == value, text
        assert type(read) is type(value), text


def test_overrides_may_begin_with_plus_and_hold_lists_and_sections() -> None:
    words = ["a.b=1", "+c=[x,y]", "++d={e: 2, f: {g: 3}}", "h=", "k='q=r'", "m=null"]
    assert read_overrides(words).values == {
        "a.b": 1,
        "c": ["x", "y"],
        "d.e": 2,
        "d.f.g": 3,
        "h": None,
        "k": "q=r",
        "m": None,
    }


def test_later_sources_override_earlier_ones_and_values_replace_sections(tmp_path: Path) -> None:
    file = read_document(write(tmp_path, "a: {b: 1, c: 2}\nd: {e: 3}\nde: 4\n"), {})
    assert merged([file, read_overrides(["a.b=5", "d=null"])]).values == {"a.b": 5, "a.c": 2, "d": None, "de": 4}


def test_overrides_that_set_nothing_are_refused() -> None:
    for word in ("~a.b", "~a.b=1", "flag"):
        with pytest.raises(ValueError, match=r"key=value|leave the key out"):
            read_overrides([word])


def test_deletions_in_scripts_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "python3 -m t a=1 ~b.c\n", "run.sh")
    with pytest.raises(ValueError, match="leave the key out"):
        read_document(path, {})


def test_flags_of_a_launch_are_keys_too(tmp_path: Path) -> None:
    path = write(tmp_path, "python3 train.py --config-name base --verbose --n=3 a=1\n", "run.sh")
    # Words before the first override are the program's arguments as well.
    assert read_document(path, {}).values == {"--config-name": "base", "--verbose": True, "--n": 3, "a": 1}


def test_interpolations_lead_to_other_keys_and_to_the_environment() -> None:
    values = {
        "a": "${b}",
        "b": "${c.d}",
        "c.d": 4,
        "c.e": "${.d}",
        "c.f.g": "${..e}",
        "text": "run-${a}-${oc.env:USER_NAME}",
        "env": "${oc.env:COUNT}",
        "default": "${oc.env:UNSET,7}",
        "nested": "${oc.env:UNSET,${a}}",
        "select": "${oc.select:missing,8}",
        "found": "${oc.select:c.d,8}",
        "list": ["${a}", "x"],
        "loop": "${loop}",
        "nowhere": "${not.there}",
        "resolver": "${eval:1+1}",
    }
    assert resolve(values, {"USER_NAME": "me", "COUNT": "3"}) == {
        "a": 4,
        "b": 4,
        "c.d": 4,
        "c.e": 4,
        "c.f.g": 4,
        "text": "run-4-me",
        "env": 3,
        "default": 7,
        "nested": 4,
        "select": 8,
        "found": 4,
        "list": [4, "x"],
        "loop": "${loop}",
        "nowhere": "${not.there}",
        "resolver": "${eval:1+1}",
    }


def test_an_interpolation_of_a_section_becomes_its_keys() -> None:
    values = {
        "actor.optimizer.lr": 1.7e-5,
        "actor.optimizer.nested.beta": "${..lr}",
        "critic.optimizer": "${actor.optimizer}",
        "critic.optimizer.lr": 3e-5,  # What is written counts.
        "other": "${critic}",
        "inside.itself": "${inside}",
    }
    resolved = resolve(values, {})
    assert resolved["critic.optimizer.lr"] == resolved["other.optimizer.lr"] == 3e-5
    assert resolved["critic.optimizer.nested.beta"] == resolved["other.optimizer.nested.beta"] == 1.7e-5
    assert resolved["inside.itself"] == "${inside}"
    assert not {"critic.optimizer", "other"} & resolved.keys()
    doubled = {f"a{n}.{side}": f"${{a{n + 1}}}" for n in range(20) for side in "xy"} | {"a20.x": 1}
    with pytest.raises(ValueError, match="more than 10,000 keys"):
        resolve(doubled, {})


def test_texts_that_would_take_for_ever_are_refused_at_once(tmp_path: Path) -> None:
    laughs = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefghij")
    )
    deep = "[" * 3000 + "]" * 3000
    nested = "{ " * 3000 + "python3 -m t a=1" + "; }" * 3000 + "\n"
    doubled = "A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + "python3 -m t a=$A\n"
    many_calls = "f() {\n" + "f\n" * 30 + "}\nf\npython3 -m t a=1\n"
    cases = [
        ("recursive.yaml", "a: &x [*x]\n", "holds the alias"),
        ("laughs.yaml", laughs, "counting each alias"),
        ("deep.yaml", f"a: {deep}\n", "lists and mappings"),
        ("many.yaml", "a: [" + "1, " * 20_000 + "1]\n", "more than 10,000"),
        ("nested.sh", nested, "nested too deeply"),
        ("doubled.sh", doubled, "characters"),
        ("calls.sh", many_calls, "commands"),
    ]
    for name, text, words in cases:
        began = time.process_time()  # other processes do not count
        with pytest.raises(ValueError, match=words) as caught:
            read_document(write(tmp_path, text, name), {})
        assert name in str(caught.value)
        assert time.process_time() - began < 5, name
    with pytest.raises(ValueError, match=r"^a: .*lists and mappings"):
        read_overrides([f"a={deep}"])


def test_an_alias_stands_for_its_value(tmp_path: Path) -> None:
    text = "base: &base {lr: 1e-6, on: yes}\nactor: {<<: *base, path: m}\nlists: [&one [1], *one]\n"
    assert read_document(write(tmp_path, text), {}).values == {
        "base.lr": 1e-6,
        "base.on": True,
        "actor.lr": 1e-6,
        "actor.on": True,
        "actor.path": "m",
        "lists": [[1], [1]],
    }


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    cases = [
        ("missing.yaml", None, "no such file"),
        ("recipe.toml", "a = 1", "suffix .toml"),
        ("list.yaml", "- a\n", "not a mapping"),
        ("broken.yaml", "a: [1\n", "not YAML"),
        ("empty.sh", "echo hello\n", "no command with key=value"),
        ("two.sh", "python3 -m t a=1\npython3 -m t a=2\n", "2 commands"),
    ]
    for name, text, words in cases:
        if text is not None:
            write(tmp_path, text, name)
        with pytest.raises(ValueError, match=words) as caught:
            read_document(tmp_path / name, {})
        assert name in str(caught.value)
