"""Response lengths from files and from numbers."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from fivefold.planning.simulation.lengths import Lengths, parse_lengths


def test_the_mean_is_that_of_the_cut_off_lengths() -> None:
    lengths = parse_lengths("mean=4000,max=16384")
    assert lengths.mean == pytest.approx(4000, rel=1e-3)
    assert lengths.longest == 16384
    assert lengths.values.count(16384) > 1, "the longest ones are cut off"
    assert fmean(lengths.draw(Random(0), 20_000)) == pytest.approx(4000, rel=0.03)


def test_percentiles_are_met_and_between_them_the_distribution_is_linear() -> None:
    values = sorted(parse_lengths("p50=1000,p90=3000,max=8000").values)
    assert [values[round(share * 1000)] for share in (0.25, 0.5, 0.7, 0.9, 0.95)] == pytest.approx(
        [500, 1000, 2000, 3000, 5500], rel=0.01
    )


def test_a_run_has_the_lengths_of_its_samples(tmp_path: Path) -> None:
    lines = [json.dumps({"n_tokens": n, "response": "x"}) for n in (7, 3, 0, 5)]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    for path in (tmp_path, tmp_path / "samples.jsonl"):
        assert sorted(parse_lengths(str(path)).values) == [3, 5, 7]


def test_the_mean_progress_counts_every_token_of_every_response() -> None:
    lengths = Lengths((1000, 3000))
    by_token = [token for length in lengths.values for token in range(length)]
    assert lengths.mean_progress == pytest.approx(fmean(by_token), abs=1)
    assert lengths.at_most(2000).values == (1000, 2000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mean=4000", "max is missing"),
        ("mean=4000,max=3000", "below max"),
        ("mean=4000,p50=10,max=32768", "give mean and max, or percentiles"),
        ("max=10", "give mean and max, or percentiles"),
        ("p50=3000,p90=2000,max=32768", "must not fall"),
        ("p50=many,max=32768", "is not a length"),
        ("p150=5,max=32768", "is not a length"),
        ("median=5,max=32768", "is not a length"),
        ("mean=nan,max=32768", "is not a length"),
        ("mean=40,max=4096,read=30", "add their number as turns"),
        ("mean=40,max=4096,turns=0,read=30", "is not a length"),
        ("no-such-run", "cannot be read"),
    ],
)
def test_lengths_that_cannot_be_read_say_what_to_write(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_lengths(text)


@pytest.mark.parametrize("content", ["", '{"step": 1}\n', "1\n", "no JSON\n"])
def test_a_file_without_samples_is_an_error(content: str, tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"n_tokens|at least one"):
        parse_lengths(str(file))


def test_episodes_have_turns_and_what_they_read_between_them(tmp_path: Path) -> None:
    lengths = parse_lengths("mean=400,max=4096,turns=8,read=30")
    assert (lengths.turns, lengths.read, lengths.given) == (8.0, 30.0, 210.0)
    assert lengths.mean == pytest.approx(400, rel=1e-3), "what is read is not sampled"
    assert lengths.at_most(100).given == 210.0
    assert parse_lengths("mean=400,max=4096").given == 0.0
    lines = [json.dumps({"n_tokens": 5, "n_turns": 3}), json.dumps({"n_tokens": 5})]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    assert parse_lengths(str(tmp_path)).turns == 2.0
