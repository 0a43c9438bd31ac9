"""Prompts that are weighted by their data source: each source has its share of every stretch of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil

from fivefold.data.sampler import EpochSampler, Item, SamplerState, shuffled


class WeightedSampler(EpochSampler[Item]):
    """Gives out batches in which each data source has its share, without end.

    Each next item is of the source that is the farthest behind its share. A source is read like a data set: all
    its items once, in its own order (`shuffle`), before any comes again. An epoch has as many batches as that
    of an `EpochSampler`, but a source may come round sooner or later than with it.
    """

    def __init__(
        self,
        items: Sequence[Item],
        sources: Sequence[str],
        weights: Mapping[str, float],
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        fingerprint: str = "",
    ) -> None:
        """Start at the first batch.

        Args:
            items: the data set.
            sources: data source of each item.
            weights: weight of each source; their ratios count. Items of a source with the weight 0 are not read.
            batch_size: number of items in a batch.
            shuffle: whether items come in a random order, which is another one each time that a source comes round.
            seed: seed of these orders.
            fingerprint: identifies the content of the data set; a state loads only if it has the same fingerprint, and
                the weights are the same.

        Raises:
            ValueError: sources without a weight, weights without items, or a source that has fewer items than a batch
                takes of it.
        """
        total = sum(weights.values())
        self._places: dict[str, list[int]] = defaultdict(list)
        for place, source in enumerate(sources):
            self._places[source].append(place)
        if self._places.keys() != weights.keys():
            raise ValueError(
                f"train_dataset.source_weights names the data sources {sorted(weights)}, but the prompts have "
                f"{sorted(self._places)}: give each of these a weight, which may be 0"
            )
        self._shares = {source: weight / total for source, weight in weights.items() if weight > 0}
        for source, share in self._shares.items():
            if ceil(share * batch_size) + 1 > len(self._places[source]):
                raise ValueError(
                    f"train_dataset.source_weights gives the data source {source!r} {share:.1%} of a batch of "
                    f"{batch_size}, but it has {len(self._places[source])} prompts, and no batch may have one twice: "
                    "lower its weight or batch_size, or add prompts"
                )
        shown = ",".join(f"{source}={share!r}" for source, share in sorted(self._shares.items()))
        super().__init__(items, batch_size=batch_size, shuffle=shuffle, seed=seed, fingerprint=f"{fingerprint} {shown}")
        self._begin()

    def next_batch(self) -> list[Item]:
        """Return the next `batch_size` items, none of them twice."""
        self._n_given += 1
        return [self._items[place] for place in self._next_places(self._batch_size)]

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue exactly where the sampler of `state` stopped.

        Raises:
            ValueError: a state of another data set, order, seed or other weights.
        """
        super().load_state_dict(state)
        self._begin()
        for size, n in state["batches"]:
            for _ in range(n):
                self._next_places(size)

    def _begin(self) -> None:
        self._given = dict.fromkeys(self._shares, 0)
        """Items of each source in all batches so far."""
        self._rounds = dict.fromkeys(self._shares, 0)
        """Times that each source has come round."""
        self._waiting: dict[str, list[int]] = {source: [] for source in self._shares}
        """Items of each source's round that are still to come, the next one last."""

    def _next_places(self, size: int) -> list[int]:
        chosen: list[int] = []
        for _ in range(size):
            n_given = sum(self._given.values()) + 1
            source = max(self._shares, key=lambda name: self._shares[name] * n_given - self._given[name])
            self._given[source] += 1
            chosen.append(self._next_of(source, chosen))
        return chosen

    def _next_of(self, source: str, chosen: Sequence[int]) -> int:
        """Return the next item of a source that is not in the batch; what is passed over comes next."""
        waiting = self._waiting[source]
        if all(place in chosen for place in waiting):
            order = shuffled(self._places[source], self._seed, f"{source}-{self._rounds[source]}", self._shuffle)
            self._rounds[source] += 1
            waiting[:0] = order[::-1]
        last = next(index for index in reversed(range(len(waiting))) if waiting[index] not in chosen)
        return waiting.pop(last)
