"""One process of the self-test, which trains the shipped model for a step and reports the losses.

`self_test` runs it as `python -m fivefold.doctor.self_test_process <JSON of a Seat>`. It writes one JSON object a line
to its progress file: {"phase": ...} as each phase begins, and {"losses": [before, after]} at the end.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from fivefold.imports import large_imports

if TYPE_CHECKING:
    from fivefold.batch import Batch

MODEL = "package:tiny-moe"
SEED = 1
LENGTHS = (7, 13, 22, 5, 31, 9, 17, 3)
PROMPT_SHARE = 3
"""The first third of each sequence is prompt."""
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Seat:
    """The place of a process among those that train together."""

    layout: str
    """Backend with its layout, such as `megatron:d1`."""
    rank: int
    world_size: int
    device: Literal["cpu", "cuda"]
    store: str
    """File through which the processes meet."""
    progress: str
    """Progress file of the process."""
    timeout_s: float
    """Time limit of each collective."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


def main(seat: Seat) -> None:
    """Run the process from its imports to its end."""
    with Path(seat.progress).open("w", encoding="utf-8", buffering=1) as progress:
        progress.write('{"phase": "import"}\n')
        with large_imports():
            import torch.distributed as dist

            import fivefold.mcore.engine  # noqa: F401  (a failure belongs to the phase of the imports)

        progress.write('{"phase": "join"}\n')
        _join(seat)
        progress.write('{"phase": "train"}\n')
        losses = _losses(seat.layout)
        progress.write(json.dumps({"losses": losses}) + "\n")
        dist.destroy_process_group()


def _join(seat: Seat) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if seat.device == "cuda":
        torch.cuda.set_device(seat.rank)
    dist.init_process_group(
        "nccl" if seat.device == "cuda" else "gloo",
        init_method=f"file://{seat.store}",
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(seconds=seat.timeout_s),
    )
    # A first collective, because the connections are opened only when one is needed.
    ranks = torch.zeros(seat.world_size, device=seat.device)
    ranks[seat.rank] = 1
    dist.all_reduce(ranks)
    if not bool((ranks == 1).all()):
        raise RuntimeError(f"all_reduce over {seat.world_size} processes gave {ranks.tolist()}; each rank adds one 1")


def _losses(layout_text: str) -> tuple[float, float]:
    """Return the loss of one batch before and after an update on that batch."""
    from fivefold.algorithms.supervised_losses import SFTLoss
    from fivefold.config.paths import resolve_model_path
    from fivefold.config.schema.engine import EngineConfig, MicroBatchConfig, OptimizerConfig
    from fivefold.engine.contract import EngineOptions
    from fivefold.layout.parser import parse_backend
    from fivefold.mcore.engine import MegatronEngine

    config = EngineConfig(
        path=resolve_model_path(MODEL),
        backend=layout_text,
        dtype="float32",
        mb_spec=MicroBatchConfig(max_tokens_per_mb=64),
    )
    optimizer = OptimizerConfig(lr=LEARNING_RATE)
    engine = MegatronEngine(config, parse_backend(layout_text), EngineOptions(seed=SEED, optimizer=optimizer))
    batch = _batch(engine.shape.vocab)
    share = engine.planner.plan(batch.lengths).share(batch, engine.groups.dp.rank())
    before = float(engine.forward_backward(share, SFTLoss())["loss"].sum)
    engine.optim_step()
    return before, float(engine.forward_backward(share, SFTLoss())["loss"].sum)


def _batch(vocab: int) -> Batch:
    """Return a batch of random tokens, which is the same in every process."""
    import torch

    from fivefold.batch import Batch

    tokens = torch.randint(0, vocab, (sum(LENGTHS),), generator=torch.Generator().manual_seed(SEED))
    prompts = [length // PROMPT_SHARE + 1 for length in LENGTHS]
    positions = [(at, prompt) for length, prompt in zip(LENGTHS, prompts, strict=True) for at in range(length)]
    mask = torch.tensor([float(at >= prompt) for at, prompt in positions])
    return Batch(LENGTHS, tokens, mask)


if __name__ == "__main__":
    main(Seat.from_json(sys.argv[1]))
