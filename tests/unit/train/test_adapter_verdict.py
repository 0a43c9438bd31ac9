"""Which adapters a server computes otherwise, of log-probs that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.observe.errors import RunFailed
from fivefold.run.adapter_probe import Compared, Verdict, _check

KINDS = ["q", "k", "experts.up"]
NOISE, EFFECT = 0.03, 0.2


def compared(lacking: list[float], effects: list[float], n: int = 400, heavy: float = 0.0, seed: int = 0) -> Compared:
    """Return log-probs of a server that lacks a share of each kind of adapters, whose effects have these sizes."""
    random = np.random.default_rng(seed)
    actor_N = -random.exponential(size=n)
    effects_KN = np.array(effects)[:, None] * random.normal(size=(3, n))
    noise_N = NOISE * random.normal(size=n)
    # Few tokens have other experts, and are far apart; they are those that react to adapters.
    flips_N = random.random(n) < 0.02
    noise_N += heavy * flips_N * random.normal(size=n)
    effects_KN *= 1 + 4 * flips_N * (heavy > 0)
    return Compared(
        actor_N + np.array(lacking) @ effects_KN + noise_N, actor_N, actor_N + effects_KN.sum(0), actor_N + effects_KN
    )


def test_a_server_that_differs_by_rounding_computes_all() -> None:
    assert compared([0, 0, 0], [EFFECT] * 3).verdict(KINDS) == Verdict({}, ())


@pytest.mark.parametrize("seed", range(20))
def test_tokens_with_other_experts_accuse_nobody(seed: int) -> None:
    assert not compared([0, 0, 0], [EFFECT] * 3, heavy=1.0, seed=seed).verdict(KINDS).wrong


@pytest.mark.parametrize(
    ("lacking", "wrong"),
    [
        ([0, 0, 1], {"experts.up": 0}),
        ([1, 1, 1], {"q": 0, "k": 0, "experts.up": 0}),
        ([0, -1, 0], {"k": 2}),
        ([0.5, 0, 0], {"q": 0.5}),
    ],
    ids=["one kind", "all", "twice", "half"],
)
def test_what_a_server_lacks_or_computes_twice_is_named_with_its_share(
    lacking: list[float], wrong: dict[str, float]
) -> None:
    found = compared(lacking, [EFFECT] * 3).verdict(KINDS)
    assert found.wrong == pytest.approx(wrong, abs=0.1)
    assert not found.unclear
    with pytest.raises(RunFailed, match=rf"\d% of {next(iter(wrong))}"):
        _check(found, KINDS)


def test_adapters_that_hardly_change_log_probs_are_unclear_whatever_the_server_does() -> None:
    for lacking in (0, 1):
        found = compared([0, 0, lacking], [EFFECT, EFFECT, 0.001]).verdict(KINDS)
        assert found == Verdict({}, ("experts.up",))
    nothing = compared([0, 0, 0], [EFFECT, EFFECT, 0.0]).verdict(KINDS)
    assert nothing.unclear == ("experts.up",)


def test_a_server_with_another_model_is_apart() -> None:
    same = compared([0, 0, 0], [EFFECT] * 3)
    random = np.random.default_rng(1)
    other = Compared(-random.exponential(size=400), same.actor_N, same.base_N, same.without_KN)
    assert not same.is_apart
    assert other.is_apart
    assert set(other.verdict(KINDS).unclear) == set(KINDS)
