"""YAML texts and text files: the values that are read, and the error of each text that is not."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.config.text_files import MOST_CHARACTERS, TextError, read_text
from fivefold.config.yaml_reader import LimitedLoader, read_yaml, write_yaml

ALIAS_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{key}: &{key} [{', '.join([f'*{before}'] * 9)}]\n" for before, key in zip("abcdefgh", "bcdefghi", strict=True)
)


def refusal(text: str) -> tuple[str, ...]:
    """The problems of a text; each is found within two seconds of computing."""
    began = time.process_time()
    with pytest.raises(TextError) as caught:
        read_yaml(text, "recipe.yaml")
    assert time.process_time() - began < 2
    assert str(caught.value).startswith("recipe.yaml: ")
    return caught.value.problems


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("8", 8),
        ("+8", 8),
        ("-3", -3),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1e-5", 1e-5),
        ("-.inf", -math.inf),
        ("True", True),
        ("FALSE", False),
        ("", None),
        ("~", None),
        ("Null", None),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("yes", "yes"),
        ("off", "off"),
        ("=", "="),
        ("'8'", "8"),
        ("!!str 8", "8"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(scalar: str, value: object) -> None:
    read = read_yaml(f"key: {scalar}", "text")["key"]
    assert read == value
    assert type(read) is type(value)
    assert read_yaml(write_yaml({"key": value}), "text") == {"key": value}


@pytest.mark.parametrize("text", ["0\x85", "a\x85b", "\x85", "\u2028", "x\u2029\n", "0\n", " \x85 "])
def test_line_breaks_of_unicode_survive(text: str) -> None:
    assert read_yaml(write_yaml({text: [text]}), "text") == {text: [text]}


def test_a_text_that_looks_like_a_number_is_written_with_quotes() -> None:
    values = [
        "0o17",
        "0x1F",
        "1e5",
        "012",
        "1_000",
        "12:30:45",
        "yes",
        "true",
        "null",
        "~",
        "",
        "<<",
        ".inf",
        "\ufeffa",
    ]
    assert read_yaml(write_yaml({"values": values}), "text") == {"values": values}


def test_a_value_that_occurs_twice_is_written_twice() -> None:
    shared = {"a": [1]}
    assert "*" not in write_yaml([shared, shared])


def test_merged_keys_come_before_the_mappings_own() -> None:
    text = "base: &base {x: 1, y: 2}\nfirst: {<<: *base, x: 3}\nboth: {<<: [{x: 4}, *base]}"
    assert read_yaml(text, "text") == {"base": {"x": 1, "y": 2}, "first": {"x": 3, "y": 2}, "both": {"x": 4, "y": 2}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ALIAS_BOMB, "there are more than 10,000 keys and values, counting each alias as what it stands for"),
        ("a: [" + "1, " * 20_000 + "]", "there are more than 10,000 keys and values"),
        ("a: &x [*x]", "a.0: an alias in it stands for the value of line 1, which holds the alias"),
        ("a:\n  b: &x {<<: *x}", "a.b: an alias in it stands for the value of line 2, which holds the alias"),
        ("a: " + "[" * 3000 + "]" * 3000, "line 1 is inside 50 lists and mappings; write at most 50"),
        ("".join(" " * level + "a:\n" for level in range(700)), "line 50 is inside 50 lists and mappings"),
        ("x" * (MOST_CHARACTERS + 1), "300,001 characters are more than the 300,000 that are read"),
        ("seed: " + "1" * 5000, "seed: 5,000 digits in line 1: a number has at most 100 digits; quote it"),
        ("a: 1\nb: {~: 2}", "b: a key is missing before the `:` in line 2; write key: value"),
        ("null: 1", "a key is missing before the `:` in line 1"),
        ("1: 2", "the key 1 in line 1 is not a text; quote it"),
        ("a: {true: 2}", "a: the key true in line 1 is not a text; quote it"),
        ("? [a]\n: 2", "a list or a mapping is the key in line 1; a key is a text"),
        ("a: 1\nb: {c: 1, c: 2}", "b.c: given twice, in lines 2 and 2; keep one"),
        ("a: !!int x", "a: the tag tag:yaml.org,2002:int in line 1 has no meaning here; drop it"),
        ("a: !!bool maybe", "a: the tag tag:yaml.org,2002:bool in line 1 has no meaning here; drop it"),
        ("a: !!timestamp x", "a: the tag tag:yaml.org,2002:timestamp in line 1 has no meaning here"),
        ("a: !!python/object:os.system {}", "a: the tag tag:yaml.org,2002:python/object:os.system in line 1 has no"),
        ("a: !!set {b}", "a: the tag tag:yaml.org,2002:set in line 1 has no meaning; drop it"),
        ("a: {<<: 1}", "a: `<<` in line 1 takes the keys of mappings, and of nothing else"),
        ('a: 1\nb: "\\ud800"', "b: '\\ud800' in line 2 is half a character; write whole ones in UTF-8"),
        ("a: 1\nb: \ud800", "'\\ud800' in line 2 is half a character; write whole ones in UTF-8"),
        ('"\\ud800": 1', "the key in line 1 has half a character"),
        ("a: \0", "not YAML: unacceptable character #x0000"),
        ("a: [1", "not YAML: expected ',' or ']', but got '<stream end>' in line 1, column 6"),
        ("a: *x", "not YAML: found undefined alias 'x' in line 1, column 4"),
        ("a: 1\n---\nb: 2", "not YAML: expected a single document in the stream, but found another document in line 2"),
    ],
)  # fmt: skip
def test_a_text_that_is_not_read_has_one_problem_with_its_line(text: str, expected: str) -> None:
    (problem,) = refusal(text)
    assert problem.startswith(expected)
    assert len(problem) < 200


def test_all_problems_of_values_are_listed() -> None:
    assert len(refusal("1: 2\na: !x 3\nb: {c: 1, c: 2}")) == 3


def test_another_loader_decides_about_scalars_and_numbers_may_be_keys() -> None:
    values = read_yaml("on: yes\n8: 0o17", "text", loader=LimitedLoader, takes_any_key=True)
    assert values == {"on": True, "8": "0o17"}
    with pytest.raises(TextError, match="day: 2024-13-01 in line 1: month must be"):
        read_yaml("day: 2024-13-01", "text", loader=LimitedLoader)


def test_a_file_is_read_without_its_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("é: 1", encoding="utf-8-sig")
    assert read_text(file, "a.yaml") == "é: 1"


def not_there(path: Path) -> None:
    pass


def pipe(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path)


def too_long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (not_there, "it does not exist"),
        (Path.mkdir, "it is a folder, not a file"),
        (pipe, "it is a pipe or a device, not a file: write its text to a file first"),
        (loop, "it cannot be read (Too many levels of symbolic links)"),
        (too_long, "it has 1,099,511,627,776 bytes, and at most 1,200,000 are read"),
        (
            lambda path: path.write_bytes("a: é\n".encode("utf-16")),
            "it is not a text in UTF-8 (invalid start byte at byte 0, in line 1): save it as UTF-8",
        ),
    ],
)
def test_a_path_that_is_not_a_text_file_is_refused(
    tmp_path: Path, make: Callable[[Path], object], expected: str
) -> None:
    file = tmp_path / "a.yaml"
    make(file)
    with pytest.raises(TextError) as caught:
        read_text(file, "a.yaml")
    assert caught.value.problems == (expected,)


def test_a_name_that_is_too_long_and_a_file_without_permission_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TextError, match=r"it cannot be read \(File name too long\)"):
        read_text(tmp_path / ("x" * 300), "recipe")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.yaml").touch()
    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read every file
    with pytest.raises(TextError, match=r"it cannot be read \(Permission denied\)"):
        read_text(tmp_path / "a.yaml", "recipe")
