"""CPU time that a training step costs the driver, between the rollout's reports and the trainer's calls.

    python benchmarks/driver_step.py --tokens 10000000 --sequence 4096

The driver does not read the tokens, which are in the object store, so the cost depends on the number of sequences and
not on their lengths. Timed, in CPU seconds, is what the driver runs itself: it makes samples of the reports, one for
each group, as servers send them; attaches rewards, computes advantages, plans the log-probs and every mini-batch, makes
each rank's order, and pickles what it sends. The reward function and Ray's own part are not timed.
"""

from __future__ import annotations

import argparse
import pickle
import platform
import time
from collections.abc import Callable

import numpy as np

from fivefold.algorithms.advantages.compute import Outcomes, compute_advantages
from fivefold.algorithms.build import build_advantage, build_policy_loss
from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.config.schema.engine import MicroBatchConfig
from fivefold.config.schema.roles import ActorConfig
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.engine.packing import BatchPlan, BatchPlanner
from fivefold.experience.group import groups_of
from fivefold.experience.samples import sample_metrics
from fivefold.layout.parser import parse_backend
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.responses import Job, Responses, answers_of
from fivefold.rollout.protocol import SamplingParams
from fivefold.types import Prompt, Sample
from fivefold.update.updates import minibatches

REPLICAS = 8
GROUP = 8
PROMPT = 256
CHARACTERS_PER_TOKEN = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000_000, help="tokens of a step, prompts included")
    parser.add_argument("--sequence", type=int, default=4096, help="mean tokens of a sequence")
    parser.add_argument("--layout", default="megatron:d8t2c2", help="layout of the actor")
    parser.add_argument("--minibatches", type=int, default=4)
    args = parser.parse_args()

    seconds: dict[str, float] = {}

    def timed(name: str, run: Callable[[], object]) -> object:
        began = time.process_time()
        result = run()
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - began
        return result

    generator = np.random.default_rng(0)
    n_groups = max(args.minibatches, args.tokens // args.sequence // GROUP // args.minibatches * args.minibatches)
    n = n_groups * GROUP
    prompts = [
        Prompt(i, "p" * PROMPT * CHARACTERS_PER_TOKEN, tuple(map(int, generator.integers(0, 150_000, PROMPT))), "42")
        for i in range(n_groups)
    ]
    # Lengths of completions are skewed: half as long to twice as long as the mean, and some that are cut off.
    lengths = np.clip(generator.lognormal(0.0, 0.6, n) * args.sequence / 1.2, PROMPT + 1, 4 * args.sequence).astype(int)
    told = [
        pickle.dumps(_responses(number, lengths[number * GROUP : (number + 1) * GROUP])) for number in range(n_groups)
    ]
    layout = parse_backend(args.layout)
    planner = BatchPlanner.of(MicroBatchConfig(max_tokens_per_mb=16384), layout, quadratic_at=30_000.0)
    config = ActorConfig(path="model", ppo_n_minibatches=args.minibatches)
    loss = build_policy_loss(config, GenerationConfig())

    sampling = SamplingParams.from_config(GenerationConfig())
    sampling = SamplingParams.from_config(GenerationConfig())
    groups = groups_of(prompts, GROUP, sampling, (1, "train", 1))
    jobs = [Job(number, group.prompt, group.requests, sampling) for number, group in enumerate(groups)]

    def send_requests() -> None:
        groups = groups_of(prompts, GROUP, sampling, (1, "train", 1))
        jobs = [Job(number, group.prompt, group.requests, sampling) for number, group in enumerate(groups)]
        for part in np.array_split(np.arange(n_groups), REPLICAS):
            pickle.dumps(jobs[part[0] : part[-1] + 1], protocol=5)

    def receive() -> tuple[list[Sample], RemoteBatch]:
        for number, part in enumerate(told):
            [answer] = answers_of([jobs[number]], pickle.loads(part), object())  # type: ignore[arg-type]
            groups[number].add(answer)
        samples = [sample for group in groups for sample in group.samples]
        batch = RemoteBatch.joined([group.batch for group in groups])
        return [sample.rewarded({"math": float(i % 3 == 0)}) for i, sample in enumerate(samples)], batch

    def order(batch: RemoteBatch) -> BatchPlan:
        plan = planner.plan(batch.lengths_N.tolist())
        for replica_order, _ in batch.orders(plan):
            for _ in range(layout.world_size // layout.dp):
                pickle.dumps((replica_order, loss), protocol=5)
        return plan

    timed("requests", send_requests)
    samples, batch = timed("samples", receive)  # type: ignore[misc]
    indices_N = [sample.prompt.index for sample in samples]
    timed("metrics", lambda: sample_metrics(samples))
    method, shaping = build_advantage(config, GROUP), RewardShaping.of(config, GenerationConfig())
    outcomes = Outcomes([s.reward for s in samples], indices_N, [s.n_sampled for s in samples])
    advantages = timed("advantages", lambda: compute_advantages(outcomes, shaping, method))
    batch = batch.with_scalars(advantages=advantages.advantages_N.numpy())  # type: ignore[attr-defined]
    plan = timed("orders of the log-probs", lambda: order(batch))
    pieces = [Piece(None, np.array(plan.sequences(replica))) for replica in range(layout.dp)]  # type: ignore[attr-defined]
    batch = batch.with_pieces(pieces)
    split = timed("mini-batches", lambda: minibatches(indices_N, args.minibatches, "seed"))
    for indices in split:  # type: ignore[attr-defined]
        timed("orders of the updates", lambda indices=indices: order(batch.select(indices)))

    print(f"{int(lengths.sum()):,} tokens in {n:,} sequences of {n_groups:,} groups, {args.layout}")
    for name, value in seconds.items():
        print(f"  {name:<24}{value:8.3f} s")
    print(f"  {'together':<24}{sum(seconds.values()):8.3f} s    Python {platform.python_version()}")


def _responses(number: int, lengths: np.ndarray) -> Responses:
    return Responses(
        jobs=[number],
        texts=["x" * (length - PROMPT) * CHARACTERS_PER_TOKEN for length in lengths.tolist()],
        finish_reasons=["stop"] * len(lengths),
        lengths_N=lengths.astype(np.int64),
        sampled_N=lengths.astype(np.int64) - PROMPT,
        versions_N2=np.full((len(lengths), 2), 3),
        rewards=[{}] * len(lengths),
        turns=[1] * len(lengths),
        transcripts=[None] * len(lengths),
        moves=[()] * len(lengths),
        cuts=None,
        busy_s=1.0,
    )


if __name__ == "__main__":
    main()
