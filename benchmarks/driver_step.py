"""CPU time that a step costs the driver, by replicas, ranks and episodes.

    python benchmarks/driver_step.py                                         the table of README.md, in some minutes
    python benchmarks/driver_step.py --replicas 100 --ranks 1024 --episodes 16384

The driver is the real one with a real Ray: samples from `Source`, the policy update of a recipe, calls of every rank.
A few processes stand in for all replicas and ranks: each answers for many of them as their workers would, at times that
depend on drawn lengths, without a model. Tokens never reach the driver, so theirs are missing. Not timed are reward
functions, logs and the transfer of weights.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from fivefold.algorithms.metrics import Metric
from fivefold.algorithms.state import AlgorithmState
from fivefold.batch import Columns
from fivefold.cluster.errors import Member
from fivefold.cluster.failures import Call
from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.session import Session
from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.sampler import EpochSampler
from fivefold.engine.packing import BatchPlanner
from fivefold.experience.samples import reward_metrics, sample_metrics
from fivefold.experience.source import Source
from fivefold.experience.stream import Stream
from fivefold.families.read import find_shape
from fivefold.layout.parser import parse_backend
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.actor import Actor
from fivefold.roles.devices import Models
from fivefold.roles.models import Trainer
from fivefold.roles.responses import Job, Responses
from fivefold.roles.rollout import Rollout
from fivefold.roles.trainer_worker import UpdateResult
from fivefold.rollout.protocol import SamplingParams
from fivefold.types import Effort, Prompt
from fivefold.update.compose import policy_update
from fivefold.update.step import Skips, StepOutcome, UpdateState

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
ROWS = (
    *((n, 8, 512) for n in (1, 10, 100)),
    *((100, ranks, 512) for ranks in (128, 1024)),
    *((100, 1024, episodes) for episodes in (4096, 16384)),
)
"""Replicas, ranks and episodes of a step."""
GROUP, PROMPT, CHARACTERS_PER_TOKEN = 8, 256, 4
PIECE_BYTES = 2**17
"""Bytes of each object that stands for columns: more than Ray sends within an answer."""
LAYERS = 48
"""Layers of the model, each with a metric of its experts."""
TENSOR_PARALLEL = 8
AT_ONCE = 20_000
"""Most calls that a process which stands in for others answers at the same time."""


class StandIn:
    """Answers for many replicas and ranks."""

    def __init__(self, mean: int, seconds: float) -> None:
        """Begin without a job.

        Args:
            mean: mean tokens of a completion.
            seconds: seconds that the longest possible completion takes.
        """
        self._mean, self._seconds = mean, seconds
        self._running: dict[int, dict[int, tuple[Job, Any, Any]]] = {}
        """Jobs of each replica with the lengths and ends of their completions."""

    async def hold(self, rank: int) -> None:
        await asyncio.Event().wait()

    async def progress(self, rank: int) -> None:
        return None

    @ray.method(num_returns=2)
    async def keep(self, rank: int, method: str, reply: bool, kwargs: Any, *args: Any) -> tuple[Any, Any]:
        return await self._advance(rank, *args)

    @ray.method(num_returns=2)
    async def keep_with(self, rank: int, method: str, reply: bool, args: Any) -> tuple[Any, Any]:
        return (None, _columns(args[0].lengths)) if reply else (None, None)

    async def call_with(self, rank: int, method: str, reply: bool, args: Any) -> UpdateResult | None:
        metrics = {"loss": Metric(0.1), "lr": Metric(1e-6, reduce="last"), "grad_norm": Metric(1.0)}
        metrics |= {f"experts/imbalance/layer_{layer:02}": Metric(1.5) for layer in range(LAYERS)}
        return UpdateResult(metrics, skipped=False) if reply else None

    async def _advance(self, rank: int, jobs: list[Job], seconds: float) -> tuple[Responses, Columns | None]:
        began = time.monotonic()
        running = self._running.setdefault(rank, {})
        for job in jobs:
            generator = np.random.default_rng(job.requests[0].seed)
            lengths = np.clip(generator.lognormal(-0.18, 0.6, len(job.requests)) * self._mean, 1, 4 * self._mean)
            running[job.number] = job, lengths.astype(int), began + lengths / (4 * self._mean) * self._seconds
        ends = min((ends.max() for _, _, ends in running.values()), default=began + seconds)
        await asyncio.sleep(min(max(ends - began, 0), seconds))
        now = time.monotonic()
        done = [number for number, (_, _, ends) in running.items() if ends.max() <= now]
        finished = [running.pop(number) for number in done]
        n_running = sum(int((ends > now).sum()) for _, _, ends in running.values())
        if not done:
            return replace(Responses.of([], [], [], now - began), n_running=n_running), None
        sampled = np.concatenate([lengths for _, lengths, _ in finished])
        return _report(done, sampled, now - began, n_running), _columns(sampled + PROMPT)


def _report(jobs: list[int], sampled: Any, busy_s: float, n_running: int) -> Responses:
    n = len(sampled)
    return Responses(
        jobs=jobs,
        texts=["x" * (length * CHARACTERS_PER_TOKEN) for length in sampled.tolist()],
        finish_reasons=["stop"] * n,
        lengths_N=sampled + PROMPT,
        sampled_N=sampled,
        versions_N2=np.full((n, 2), 0),
        rewards=[{}] * n,
        turns=[1] * n,
        transcripts=[None] * n,
        moves=[()] * n,
        efforts=[Effort(given=PROMPT)] * n,
        cuts=None,
        busy_s=busy_s,
        n_running=n_running,
    )


def _columns(lengths: Any) -> Columns:
    return Columns(lengths.astype(np.int32), {"tokens": np.zeros(PIECE_BYTES // 4, np.int32)})


class Rank:
    """The handle of one rank, whose calls a process answers that stands in for it."""

    def __init__(self, process: Any, rank: int) -> None:
        self._process, self._rank = process, rank

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self._process, name), self._rank)


class Method:
    """A method of a rank."""

    def __init__(self, method: Any, rank: int) -> None:
        self._method, self._rank = method, rank

    def options(self, **options: Any) -> Method:
        return Method(self._method.options(**options), self._rank)

    def remote(self, *args: Any) -> Any:
        return self._method.remote(self._rank, *args)


class StandInGroup(WorkerGroup):
    """The ranks of a role, for which a few processes stand in."""

    def __init__(self, session: Session, name: str, n: int, processes: list[Any]) -> None:
        self.name, self._session, self.n_reports = name, session, 0
        node = session.nodes[0]
        self.members = [Member(name, rank, node.host, session.logs / name, node.strategy) for rank in range(n)]
        self._handles = [Rank(processes[rank % len(processes)], rank) for rank in range(n)]
        for member, worker in zip(self.members, self._handles, strict=True):
            held = worker.hold.options(concurrency_group="hold").remote()
            session.watch.add(held, Call(member, None, worker))

    def first_kept(self, calls: Any) -> Any:
        """Count the reports."""
        self.n_reports += 1
        return super().first_kept(calls)

    def kill(self) -> None:
        self._handles = []


class Clock:
    """CPU seconds of this process, by the name of the thread."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block."""
        before, began = self._threads(), time.perf_counter()
        yield
        after, wall = self._threads(), time.perf_counter() - began
        row = {thread: after[thread] - before.get(thread, 0.0) for thread in after}
        self.rows[name] = {**row, "wall": wall}

    @staticmethod
    def _threads() -> dict[str, float]:
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        seconds = {"MainThread": 0.0, "rollout": 0.0, "Ray": 0.0}
        for each in psutil.Process().threads():
            name = names.get(each.id, "Ray")
            seconds[name if name in seconds else "Ray"] += each.user_time + each.system_time
        return seconds


def main() -> None:
    args = parse_arguments()
    rows = ROWS if args.replicas is None else [(args.replicas, args.ranks, args.episodes)]
    print(f"Python {platform.python_version()}, Ray {ray.__version__}; a generation of {args.seconds:g} s at most")
    columns = (
        "replicas",
        "ranks",
        "episodes",
        "reports/s",
        "a report",
        "main: generation",
        "log-probs",
        "an update",
        "Ray",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for replicas, ranks, episodes in rows:
        clock, n_reports = run(args, replicas, ranks, episodes)
        generation, scoring, updates = clock.rows["generation"], clock.rows["log-probs"], clock.rows["updates"]
        cells = (
            *(f"{n:,}" for n in (replicas, ranks, episodes)),
            f"{n_reports / generation['wall']:.0f}",
            f"{1e3 * generation['rollout'] / n_reports:.2f} ms",
            f"{generation['MainThread']:.2f} s",
            f"{scoring['MainThread']:.2f} s",
            f"{updates['MainThread'] / args.minibatches:.2f} s",
            f"{sum(row['Ray'] for row in clock.rows.values()):.2f} s",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, help="replicas of the rollout; without it, the rows of README.md")
    parser.add_argument("--ranks", type=int, default=1024, help="ranks of the actor")
    parser.add_argument("--episodes", type=int, default=4096, help="episodes of a step")
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="mean tokens of a completion")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds that the longest completion can take")
    parser.add_argument("--processes", type=int, default=4, help="processes that stand in for replicas and ranks")
    return parser.parse_args()


def run(args: argparse.Namespace, replicas: int, ranks: int, episodes: int) -> tuple[Clock, int]:
    """Make one step. Returns what it took, and the number of the replicas' reports."""
    clock, timers = Clock(), PhaseTimers()
    recipe = load_recipe(
        RECIPE,
        [
            f"train_dataset.batch_size={episodes // GROUP}",
            f"gconfig.n_samples={GROUP}",
            f"gconfig.max_new_tokens={4 * args.tokens}",
            f"actor.ppo_n_minibatches={args.minibatches}",
            f"rollout.max_batch_size={episodes}",
        ],
        TrainRecipe,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Session.open(recipe.scheduler, recipe.cluster, Path(folder), timers) as session,
    ):
        groups = dict.fromkeys(("hold", "feed", "control", "where"), AT_ONCE)
        actor_class = ray.remote(num_cpus=0, max_concurrency=AT_ONCE, concurrency_groups=groups)(StandIn)
        processes = [actor_class.remote(args.tokens, args.seconds) for _ in range(args.processes)]
        reporting = StandInGroup(session, "rollout", replicas, processes)
        rollout = Rollout(reporting, False, is_server=True)
        actor = _actor(StandInGroup(session, "actor", ranks, processes), ranks)
        update = policy_update(recipe, Models(actor), timers, find_shape("package:tiny-moe"))
        rewards = RewardSet.of(NamedReward("f", lambda response, ground_truth, **_: len(response) % 3 / 2, None))
        with Stream(recipe, rollout, rewards, timers, lambda version: None, tell=print) as stream:
            source = Source(
                recipe,
                EpochSampler(_prompts(episodes // GROUP), batch_size=episodes // GROUP, shuffle=True, seed=1),
                SamplingParams.for_training(recipe),
                stream,
                timers,
                first_step=1,
                last_step=1,
            )
            source.weights_sent(0)
            ray.get([process.progress.remote(0) for process in processes])
            with timers.phase("rollout"), clock.phase("generation"):
                experience = source.take(1)
                sample_metrics(experience.samples)
                reward_metrics(experience.samples, rewards, by_source=False)
            state = UpdateState(AlgorithmState.of(recipe.actor), {"actor": Skips()})
            with clock.phase("log-probs"):
                prepared = update.prepare(1, experience.samples, experience.batch, (), state)
            with clock.phase("updates"):
                outcome: StepOutcome = update.run(prepared)
            assert "loss" in outcome.metrics
    return clock, reporting.n_reports


def _actor(group: StandInGroup, ranks: int) -> Actor:
    tensor = min(TENSOR_PARALLEL, ranks)
    layout = parse_backend(f"megatron:d{ranks // tensor}t{tensor}")
    config = load_recipe(RECIPE, [], TrainRecipe).actor.mb_spec
    planner = BatchPlanner.of(config, layout, quadratic_at=30_000.0)
    return Actor(Trainer(group, planner))


def _prompts(n: int) -> list[Prompt]:
    generator = np.random.default_rng(0)
    return [
        Prompt(i, "p" * PROMPT * CHARACTERS_PER_TOKEN, tuple(map(int, generator.integers(0, 150_000, PROMPT))), "42")
        for i in range(n)
    ]


if __name__ == "__main__":
    main()
