"""Samplers that choose by rewards: what they give out, what they refuse, and that they go on where they stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.schema.data import DatasetConfig
from fivefold.data.chosen_sampler import ChosenSampler
from fivefold.data.prompts import PromptDataset
from fivefold.data.sampler import EpochSampler, Outcome
from fivefold.types import Prompt

RATES = [0.0, 0.05, 0.5, 0.95, 1.0, 0.3, 0.7, 0.2]
"""Share of right completions of each prompt."""


def prompts(extra: Sequence[dict[str, Any]] = ({},) * len(RATES)) -> tuple[Prompt, ...]:
    return tuple(Prompt(i, "?", (i,), "", extra_info=info) for i, info in enumerate(extra))


def sampler(name: str, given: tuple[Prompt, ...] | None = None, size: int = 2, **options: Any) -> EpochSampler[Prompt]:
    own = {"shuffle": options.pop("shuffle")} if "shuffle" in options else {}
    config = DatasetConfig(path="p", batch_size=size, sampler=name, sampler_kwargs=options, **own)
    given = prompts() if given is None else given
    return PromptDataset(given, len(given), 0).sampler(config, seed=3)


def step(reader: EpochSampler[Prompt], rates: Sequence[float] = RATES) -> list[int]:
    """Draw a batch, and tell what its prompts earned."""
    places = [prompt.index for prompt in reader.next_batch()]
    reader.told([Outcome(place, (rates[place],), rates[place]) for place in places])
    return places


def test_easy_prompts_come_before_hard_ones_and_those_out_of_the_window_now_and_then() -> None:
    reader = sampler("easy_to_hard", lowest=0.1, highest=0.9, retry_every=4)
    assert {place for _ in range(4) for place in step(reader)} == set(range(8)), "the first pass measures"
    for _ in range(2):
        assert [place for _ in range(2) for place in step(reader)] == [6, 2, 5, 7], "falling rates within the window"
    assert [place for _ in range(4) for place in step(reader)] == [4, 3, 6, 2, 5, 7, 1, 0], "every fourth pass has all"
    # A prompt whose rate rises above the window is left out; half of the new share counts (0.85).
    better = [*RATES[:6], 1.0, *RATES[7:]]
    assert [place for _ in range(2) for place in step(reader, better)] == [6, 2, 5, 7]
    assert [place for _ in range(2) for place in step(reader, better)] == [6, 2, 5, 7]
    assert step(reader, better) == [2, 5]


def test_what_the_data_know_orders_the_first_pass() -> None:
    known = prompts([{"rate": 1 - rate, "level": i % 3} for i, rate in enumerate(RATES)])
    reader = sampler("easy_to_hard", known, pass_rate_key="rate", highest=0.85)
    assert [*step(reader), *step(reader)] == [7, 5, 2, 6]
    ordered = sampler("easy_to_hard", known, difficulty_key="level")
    assert [known[place].extra_info["level"] for _ in range(4) for place in step(ordered)] == [0, 0, 0, 1, 1, 1, 2, 2]
    # Fewer prompts in the window than a batch has: the nearest fill it.
    narrow = sampler("easy_to_hard", known, size=3, pass_rate_key="rate", lowest=0.49, highest=0.51)
    assert sorted(step(narrow)) == [2, 5, 6]


def test_prompts_without_a_right_answer_come_again_beside_fresh_ones() -> None:
    reader = sampler("replay", size=4, share=0.25, most_times=2, shuffle=False)
    failing = [0.0, 0.0, *[1.0] * 6]
    drawn = [step(reader, failing) for _ in range(6)]
    # One of those that failed comes first in each batch. In the third, the next epoch begins, and 0 is fresh again.
    # 1 fails in the second and the third step of its own, and then waits for its next epoch, in the fifth batch.
    assert drawn == [[0, 1, 2, 3], [0, 4, 5, 6], [1, 7, 0, 2], [1, 3, 4, 5], [0, 6, 7, 1], [0, 2, 3, 4]]
    # Prompts that are answered in part come again only if the bound says so.
    partly = [0.5] * 8
    assert step(later := sampler("replay", size=4, shuffle=False), partly) == [0, 1, 2, 3]
    assert step(later, partly) == [4, 5, 6, 7]
    assert step(later := sampler("replay", size=4, shuffle=False, at_most=0.5), partly) == [0, 1, 2, 3]
    assert step(later, partly) == [0, 4, 5, 6]


@pytest.mark.parametrize("name", ["easy_to_hard", "replay"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_run_that_goes_on_draws_what_it_would_have_drawn(name: str, ahead: int) -> None:
    def told(reader: EpochSampler[Prompt], batch: Sequence[Prompt]) -> None:
        reader.told([Outcome(p.index, (RATES[p.index],), RATES[p.index]) for p in batch])

    whole = sampler(name, size=3)
    waiting = [whole.next_batch() for _ in range(ahead)]
    for _ in range(7):
        waiting.append(whole.next_batch())
        told(whole, waiting.pop(0))
    resumed = sampler(name, size=3)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict(ahead))))
    epoch, batch = divmod(7, resumed.batches_per_epoch)
    assert resumed.place == (epoch, 3 * batch)
    again = [resumed.next_batch() for _ in range(ahead)]
    assert again == waiting
    for _ in range(9):
        waiting.append(whole.next_batch())
        again.append(resumed.next_batch())
        assert again == waiting
        told(whole, waiting.pop(0))
        told(resumed, again.pop(0))
    assert resumed.state_dict(ahead) == whole.state_dict(ahead)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_prompts_that_were_drawn_ahead_come_first_in_batches_of_another_size(size: int) -> None:
    before = sampler("replay", size=3)
    drawn = [prompt.index for _ in range(2) for prompt in before.next_batch()]
    after = sampler("replay", size=size)
    after.load_state_dict(json.loads(json.dumps(before.state_dict(2))))
    batches = [[prompt.index for prompt in after.next_batch()] for _ in range(-(-6 // size))]
    assert [place for batch in batches for place in batch][:6] == drawn
    assert all(len(set(batch)) == size for batch in batches)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("easy_to_hard", {"lowest": 0.9, "highest": 0.1}, r"lowest=0\.9 is above highest=0\.1"),
        ("easy_to_hard", {"rate": 2.0}, "train_dataset.sampler=easy_to_hard: rate=2.0"),
        ("easy_to_hard", {"pass_rate_key": "none"}, "8 of 8 prompts have no number"),
        (
            "replay",
            {"shares": 0.1},
            r"sampler_kwargs\.shares=0\.1: there is no such option; train_dataset.sampler=replay has",
        ),
        ("replay", {"batch_size": 3}, "this option is the recipe's key train_dataset.batch_size"),
        ("replay", {"seed": 3}, "this option is the recipe's key seed"),
        ("replay", {"size": 9}, "there is no such option"),
        ("epochs", {"share": 0.1}, "has no effect with sampler=epochs"),
        ("hardest", {}, "sampler=hardest is none of epochs, easy_to_hard, replay"),
    ],
)
def test_options_that_cannot_be_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    config = {"path": "p", "batch_size": 2, "sampler": name, "sampler_kwargs": options}
    with pytest.raises(ValueError, match=message):
        PromptDataset(prompts(), 8, 0).sampler(DatasetConfig(**config), seed=3)


OWN = """
import random


class Own:
    def __init__(self, prompts, batch_size, seed):
        self.n, self.size, self.rng = len(prompts), batch_size, random.Random(seed)
        self.start = 0

    def next_batch(self):
        self.start += 1
        return {batch}

    def told(self, outcomes):
        {told}

    def state_dict(self):
        return {state}

    def load_state_dict(self, state):
        self.start = state["start"]
"""
GOOD = {
    "batch": "[(self.start + i) % self.n for i in range(self.size)]",
    "told": "pass",
    "state": "{'start': self.start}",
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": "[0, 0]"}, "return 2 different places"),
        ({"batch": "[0, self.n]"}, "each from 0 to 7"),
        ({"batch": "[0.5, 1]"}, "next_batch failed:\n(.|\n)*TypeError"),
        ({"batch": "self.rng.sample(range(self.n), self.size)"}, "draw random numbers from the seed"),
        ({"told": "raise KeyError('no such prompt')"}, "told failed:\n(.|\n)*no such prompt"),
        ({"state": "{'start': {1, 2}}"}, "what JSON does not have"),
        ({"state": "{}"}, "load_state_dict failed:\n(.|\n)*KeyError"),
    ],
)
def test_a_users_sampler_is_tried_out_before_the_run(
    changed: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN.format(**GOOD))
    reader = sampler("own.py:Own")
    assert isinstance(reader, ChosenSampler)
    assert step(reader) == [1, 2], "what was tried out had an instance of its own"
    assert (reader.batches_per_epoch, reader.n_dropped) == (4, 0)
    (tmp_path / "own.py").write_text(OWN.format(**GOOD | changed))
    with pytest.raises(ValueError, match=message):
        sampler("own.py:Own")
    with pytest.raises(ValueError, match="there is no Python file"):
        sampler("other.py:Own")


def test_a_state_of_another_sampler_is_refused() -> None:
    state = sampler("replay").state_dict()
    for other in (sampler("easy_to_hard"), sampler("replay", share=0.5), sampler("epochs")):
        with pytest.raises(ValueError, match="another data set or order"):
            other.load_state_dict(state)
