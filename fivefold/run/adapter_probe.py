"""Compares, before the first step, what servers compute of the actor's adapters with what the actor computes.

    made-up adapters ──> servers ──> completions, with log-probs ──> the actor's log-probs of the same tokens
                                                                       with all adapters, and without each kind of layer

Servers drop adapters whose names they do not know, or compute them with another scale, and say nothing. A run would
then sample from another model than it trains. Adapters of a run that begins are 0, so made-up ones show it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fivefold.batch import Columns
from fivefold.cluster.group import fetch
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.engine.scores import Logprobs
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.adapter_probe import MadeUpAdapters, Samples
from fivefold.roles.devices import Roles
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.types import Completion, Episode, Prompt

Values = npt.NDArray[np.float64]

STRENGTHS = (0.01, 0.05, 0.25, 1.25)
"""Sizes of the made-up adapters that are tried until each kind of layer shows."""
N_PROMPTS, N_TOKENS = 16, 32
"""Prompts, and most tokens of each completion."""
CLEAR = 0.25
"""Standard errors, three of them, up to which a share counts as known."""
WRONG = 0.2
"""Share of what a kind of layer adds by which a server may be off, besides three standard errors."""
APART = 0.5
"""Share of what all adapters change by which log-probs may differ where no kind of layer shows."""


@dataclass(frozen=True)
class Compared:
    """Log-probs of N tokens that a server sampled with adapters on K kinds of layers."""

    server_N: Values
    """The server's."""
    actor_N: Values
    """The actor's, with the same adapters."""
    base_N: Values
    """The actor's without adapters."""
    without_KN: Values
    """The actor's without the adapters of one kind of layer each."""

    @property
    def shares(self) -> tuple[Values, Values]:
        """The share of each kind's adapters that the server lacks, [K], and its standard error, by least squares.

        It is 0 where a server computes them as the actor does, 1 where it does not, and -1 where it does so twice. Few
        tokens are far apart, those whose experts change with the rounding, so the errors are White's (1980).
        """
        effects_KN, gap_N = self.without_KN - self.actor_N, self.server_N - self.actor_N
        inverse_KK = np.linalg.pinv(effects_KN @ effects_KN.T)
        lacking_K = inverse_KK @ (effects_KN @ gap_N)
        left_N = gap_N - lacking_K @ effects_KN
        scatter_KK = (effects_KN * left_N**2) @ effects_KN.T * len(left_N) / max(1, len(left_N) - len(lacking_K))
        errors_K = np.sqrt(np.diag(inverse_KK @ scatter_KK @ inverse_KK).clip(0))
        return lacking_K, np.where((effects_KN**2).sum(1) > 0, errors_K, np.inf)

    @property
    def is_apart(self) -> bool:
        """Whether the server's log-probs are nearer to anything than to the actor's."""
        gap_N, moved_N = self.server_N - self.actor_N, self.base_N - self.actor_N
        return float(gap_N @ gap_N) > APART**2 * float(moved_N @ moved_N)

    def verdict(self, kinds: Sequence[str]) -> Verdict:
        """Return what this says of each kind of layer."""
        lacking_K, errors_K = self.shares
        clear_K = 3 * errors_K <= CLEAR
        wrong_K = clear_K & (np.abs(lacking_K) - 3 * errors_K > WRONG)
        return Verdict(
            {
                kind: 1 - float(lacking)
                for kind, lacking, is_wrong in zip(kinds, lacking_K, wrong_K, strict=True)
                if is_wrong
            },
            tuple(kind for kind, is_clear in zip(kinds, clear_K, strict=True) if not is_clear),
        )


@dataclass(frozen=True)
class Verdict:
    """What a comparison has shown."""

    wrong: Mapping[str, float]
    """Kinds of layers whose adapters a server computes otherwise: the share that it computes of each."""
    unclear: tuple[str, ...]
    """Kinds of layers whose adapters changed too little to tell."""


@dataclass(frozen=True)
class Probe:
    """The roles of a run whose servers have adapters next to their weights."""

    roles: Roles
    timers: PhaseTimers
    kinds: Sequence[str]
    """Kinds of layers that have adapters (`roles.adapter_probe.kinds_of`)."""
    prompts: Sequence[Prompt]
    temperature: float
    most_new: int
    """Most tokens of a completion in the run."""
    tell: Callable[[str], None]
    """Tells the user."""

    def run(self) -> None:
        """Compare, with larger adapters until all kinds of layers show. The rollout has made-up adapters afterwards.

        Raises:
            RunFailed: a server computes other adapters than the actor.
        """
        unclear: tuple[str, ...] = ()
        for number, strength in enumerate(STRENGTHS, start=1):
            found = self._compared(strength, -number)
            verdicts = [compared.verdict(self.kinds) for compared in found]
            for verdict in verdicts:
                _check(verdict, self.kinds)
            unclear = tuple(kind for kind in self.kinds if any(kind in verdict.unclear for verdict in verdicts))
            if not unclear:
                self.tell("the server computes the adapters of all layers as the actor does")
                return
        if any(compared.is_apart for compared in found):
            raise RunFailed(
                "the server's log-probs differ from the actor's with the same adapters by more than half of what "
                "adapters change: it serves another model, or other adapters. Set rollout.weight_transport=auto"
            )
        self.tell(
            f"nothing shows whether the server computes the adapters of {', '.join(unclear)}: they hardly change "
            "log-probs. Watch rollout_mismatch"
        )

    def _compared(self, strength: float, version: int) -> list[Compared]:
        """Return the log-probs of the completions of each replica.

        Args:
            strength: size of the adapters.
            version: theirs, which no other update has.
        """
        actor = self.roles.actor.trainer.group
        actor.call(MadeUpAdapters.put, strength)
        self.roles.send_weights(version, self.timers)
        with self.timers.phase("adapter check"):
            sampled = self.roles.rollout.group.call(Samples.sample, self._requests, self._sampling)
        with self.roles.training(self.timers), self.timers.phase("adapter check"):
            batches = [self._batch(completions) for completions in sampled]
            scored = []
            for left_out in [(), *((kind,) for kind in self.kinds)]:
                actor.call(MadeUpAdapters.put, strength, *left_out)
                scored.append([self._logprobs(batch) for batch in batches])
            actor.call(MadeUpAdapters.put, 0.0)
            base = [self._logprobs(batch) for batch in batches]
            actor.call(MadeUpAdapters.restore)
        return [
            Compared(
                np.concatenate([each.logprobs for each in completions]).astype(np.float64),
                scored[0][replica],
                base[replica],
                np.stack([of_kind[replica] for of_kind in scored[1:]]),
            )
            for replica, completions in enumerate(sampled)
        ]

    @property
    def _requests(self) -> list[GenerationRequest]:
        return [GenerationRequest(prompt.token_ids, seed) for seed, prompt in enumerate(self.prompts[:N_PROMPTS])]

    @property
    def _sampling(self) -> SamplingParams:
        most = min(N_TOKENS, self.most_new)
        return SamplingParams.from_config(GenerationConfig(max_new_tokens=most, temperature=self.temperature))

    def _batch(self, completions: Sequence[Completion]) -> RemoteBatch:
        """Return prompts and completions as rows; the completions' tokens are trained."""
        pairs = zip(self.prompts[:N_PROMPTS], completions, strict=True)
        return RemoteBatch.of(Columns.of([Episode.single_turn(prompt, completion) for prompt, completion in pairs]))

    def _logprobs(self, batch: RemoteBatch) -> Values:
        """Return the actor's log-probs of the trained tokens of all rows, one row after the other."""
        what = Logprobs(self.temperature, "adapter_check")
        rows: dict[int, Values] = {}
        for piece in self.roles.actor.score(batch, what):
            columns: Columns = fetch(piece.columns)
            ends = np.cumsum(columns.lengths_N)[:-1]
            parts = np.split(columns.values[what.name].astype(np.float64), ends)
            rows |= dict(zip(piece.sequences_M.tolist(), parts, strict=True))
        trained = batch.trained_N.tolist()
        return np.concatenate([rows[index][-trained[index] :] for index in range(len(batch))])


def _check(verdict: Verdict, kinds: Sequence[str]) -> None:
    """Raise RunFailed if a server computes some adapters otherwise than the actor."""
    if not verdict.wrong:
        return
    shares = ", ".join(f"{100 * share:.0f}% of {kind}" for kind, share in verdict.wrong.items())
    layers = sorted({kind.rpartition(".")[2] for kind in kinds} - {kind.rpartition(".")[2] for kind in verdict.wrong})
    targets = f", or train others alone: actor.lora.targets=[{', '.join(layers)}]" if layers else ""
    raise RunFailed(
        f"the server does not compute the actor's adapters: with made-up ones, its log-probs have moved by {shares} of "
        f"what the actor's have. Set rollout.weight_transport=auto, which merges adapters{targets}"
    )
