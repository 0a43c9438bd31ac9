"""Made-up facts and questions about them: the task of recipes/search.yaml.

    brulka lives in tomisk          where does brulka live                 tomisk
    tomisk lies in verun            which land does brulka live in         verun

No model knows these facts before, so it has to look them up: for a land, first the person's town. Persons are divided
into two splits, so that questions of the test data ask for facts about which no training question asks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "test"]
N_PERSONS, N_TOWNS, N_LANDS = 120, 80, 40
"""A fact for each person and for each town, which are 200."""
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True)
class Question:
    """A question, with the facts that it takes."""

    text: str
    answer: str
    lookups: tuple[tuple[str, str], ...]
    """What to look up, and the fact that is found."""


@dataclass(frozen=True)
class World:
    """Persons with their towns, and towns with their lands."""

    town_of: dict[str, str]
    land_of: dict[str, str]

    @property
    def facts(self) -> list[str]:
        """All facts: of persons, and then of towns."""
        persons = [f"{person} lives in {town}" for person, town in self.town_of.items()]
        return persons + [f"{town} lies in {land}" for town, land in self.land_of.items()]

    def questions(self, persons: Sequence[str]) -> list[Question]:
        """Return two questions about each person: one takes one lookup, the other two."""
        found = []
        for person in persons:
            town = self.town_of[person]
            lives = (person, f"{person} lives in {town}")
            lies = (town, f"{town} lies in {self.land_of[town]}")
            found.append(Question(f"where does {person} live", town, (lives,)))
            found.append(Question(f"which land does {person} live in", self.land_of[town], (lives, lies)))
        return found


def made_up(rng: random.Random, n_persons: int = N_PERSONS, n_towns: int = N_TOWNS, n_lands: int = N_LANDS) -> World:
    """Draw a world; no name occurs twice."""
    names = _names(rng, n_persons + n_towns + n_lands)
    persons, towns, lands = (
        names[:n_persons],
        names[n_persons : n_persons + n_towns],
        names[n_persons + n_towns :],
    )
    return World({name: rng.choice(towns) for name in persons}, {town: rng.choice(lands) for town in towns})


def _names(rng: random.Random, count: int) -> list[str]:
    """Return distinct words of two or three syllables."""
    distinct: dict[str, None] = {}
    while len(distinct) < count:
        syllables = (rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 3))))
        distinct.setdefault("".join(syllables) + rng.choice(_CONSONANTS))
    return list(distinct)


def the_world() -> World:
    """Return the world of the recipe, which is the same in every process."""
    return made_up(random.Random("the world of recipes/search.yaml"))


def question_rows(split: Split) -> Iterator[dict[str, Any]]:
    """Yield the questions of a split, in the common schema of verifiable rewards: of one person in four, `test`."""
    world = the_world()
    persons = [name for number, name in enumerate(world.town_of) if (number % 4 == 0) == (split == "test")]
    for question in world.questions(persons):
        yield {
            "data_source": f"search/{len(question.lookups)}",
            "prompt": [{"role": "user", "content": question.text}],
            "reward_model": {"style": "rule", "ground_truth": question.answer},
        }
