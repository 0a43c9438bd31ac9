"""Batches in which data sources have shares."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from fivefold.config.schema.data import DatasetConfig
from fivefold.data.prompts import PromptDataset
from fivefold.data.weighted_sampler import WeightedSampler
from fivefold.types import Prompt

SIZES = {"a": 40, "b": 9, "c": 25}


def sampler(weights: dict[str, float], batch_size: int, seed: int = 1, **sizes: int) -> WeightedSampler[str]:
    sources = [source for source, size in {**SIZES, **sizes}.items() for _ in range(size)]
    items = [f"{source}{number}" for number, source in enumerate(sources)]
    return WeightedSampler(items, sources, weights, batch_size=batch_size, shuffle=True, seed=seed)


def test_each_source_has_its_share_and_is_read_in_rounds() -> None:
    rng = random.Random(2)
    for seed in range(30):
        weights = {"a": rng.uniform(0.5, 3), "b": rng.choice([0.0, 0.5]), "c": rng.uniform(0.5, 3)}
        batch_size = rng.randint(2, 12)
        one = sampler(weights, batch_size, seed)
        batches = [one.next_batch() for _ in range(40)]
        assert all(len(set(batch)) == batch_size for batch in batches)
        for n in (1, 7, 40):
            given = Counter(item[0] for batch in batches[:n] for item in batch)
            for source, weight in weights.items():
                share = weight / sum(weights.values()) * n * batch_size
                assert abs(given[source] - share) < len(weights), "never a prompt per source from the share"
        for source, size in SIZES.items():
            times = Counter(item for batch in batches for item in batch if item[0] == source)
            if times:
                # What a batch passes over, because it has it already, comes in the next one.
                assert max(times.values()) - min(times[f"{item}"] for item in times) <= 2
                assert len(times) == min(size, sum(times.values())) or sum(times.values()) < size + batch_size


def test_the_recipes_weights_are_the_shares_of_the_sources_in_a_batch() -> None:
    prompts = tuple(Prompt(i, "?", (1,), "", data_source="ab"[i % 2]) for i in range(80))
    dataset = PromptDataset(prompts, n_rows=80, n_too_long=0)
    for weights, shares in (({"a": 3.0, "b": 1.0}, {"a": 6, "b": 2}), ({"a": 0.0, "b": 1.0}, {"b": 8})):
        config = DatasetConfig(path="p", batch_size=8, source_weights=weights)
        assert Counter(prompt.data_source for prompt in dataset.sampler(config, 1).next_batch()) == shares
    plain = dataset.sampler(DatasetConfig(path="p", batch_size=80), 1)
    assert Counter(prompt.data_source for prompt in plain.next_batch()) == {"a": 40, "b": 40}


def test_a_sampler_goes_on_where_its_state_was_taken() -> None:
    weights = {"a": 2.0, "b": 1.0, "c": 1.0}
    one = sampler(weights, 8)
    for _ in range(13):
        one.next_batch()
    other = sampler(weights, 8)
    other.load_state_dict(one.state_dict())
    assert [other.next_batch() for _ in range(20)] == [one.next_batch() for _ in range(20)]
    larger = sampler(weights, 12)
    larger.load_state_dict(one.state_dict())
    read = Counter(item for _ in range(33) for item in one.next_batch())
    assert Counter(item for _ in range(22) for item in larger.next_batch()) == read, "the same rows in other batches"
    again = sampler(weights, 12)
    again.load_state_dict(json.loads(json.dumps(larger.state_dict())))
    assert [again.next_batch() for _ in range(2)] == [larger.next_batch() for _ in range(2)]
    with pytest.raises(ValueError, match="another data set or order"):
        sampler({**weights, "a": 3.0}, 8).load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("weights", "fault"),
    [
        ({"a": 1.0, "b": 1.0}, "give each of these a weight"),
        ({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, "give each of these a weight"),
        ({"a": 1.0, "b": 30.0, "c": 1.0}, "no batch may have one twice"),
    ],
)
def test_weights_that_do_not_fit_the_prompts_are_refused(weights: dict[str, float], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        sampler(weights, 10)
