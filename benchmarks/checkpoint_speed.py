"""Time of saving and loading the training state from all ranks, beside the speeds of the disk and of the link.

    torchrun --nproc-per-node 2 benchmarks/checkpoint_speed.py --layers 8 --backend megatron:d2e2 --folder /data
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/checkpoint_speed.py --backend megatron:d2 \
        --model Qwen3-0.6B --layers 8 --vocab 8192 --sequence 32

The model has random weights; without GPUs, the ranks are processes on the CPU. Each run prints one line of JSON:

    blocked             training waits while the state is copied to host memory; the first time, that is allocated
    write               the files of all ranks, and the index, are on the disk; training may go on meanwhile
    step, step_writing  a training step, and a step while a state is written
    load                the state is back on the devices, from files that are not in memory
    disk, link          as many bytes written or read plainly, by as many processes at one time; a copy to pinned memory

Seconds are those of the fastest of several times, and of the slowest rank. The disk must have room for the state, which
is 12 bytes for each parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from hf_export import joined, timed
from random_model import write_config

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import EngineConfig, MicroBatchConfig, OptimizerConfig
from fivefold.engine.contract import EngineOptions
from fivefold.engine.packing import Share
from fivefold.engine.state.dcp_files import WrittenPart, finish
from fivefold.engine.state.state_store import HostSnapshot
from fivefold.layout.parser import parse_backend
from fivefold.mcore.engine import MegatronEngine

BLOCK = os.urandom(32 * 2**20)
LINK_BYTES = 2**30


def main() -> None:
    args = parse_arguments()
    with joined(args.folder) as folder:
        measured = measure(args, build(args, folder), folder)
        if dist.get_rank() == 0:
            report(args, measured)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-30B-A3B", help="one of fivefold/families/shapes/, without .json")
    parser.add_argument("--layers", type=int, default=8, help="number of layers, in place of the model's own")
    parser.add_argument("--vocab", type=int, help="size of the vocabulary, in place of the model's own")
    parser.add_argument("--backend", default="megatron:d1")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens in each of the sequences of a step")
    parser.add_argument("--sequences", type=int, default=4, help="sequences in a step, over all ranks")
    parser.add_argument("--times", type=int, default=2, help="saves, and loads")
    parser.add_argument("--folder", help="where to write; default: the temporary folder")
    return parser.parse_args()


def build(args: argparse.Namespace, folder: Path) -> MegatronEngine:
    if dist.get_rank() == 0:
        vocabulary = {"vocab_size": args.vocab} if args.vocab else {}
        write_config(folder, args.model, num_hidden_layers=args.layers, **vocabulary)
    dist.barrier()
    config = EngineConfig(
        path=str(folder),
        backend=args.backend,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        init_from_scratch=True,
        mb_spec=MicroBatchConfig(max_tokens_per_mb=args.sequence),
    )
    return MegatronEngine(
        config, parse_backend(args.backend), EngineOptions(seed=1, optimizer=OptimizerConfig(), total_steps=100)
    )


def measure(args: argparse.Namespace, engine: MegatronEngine, folder: Path) -> dict[str, float]:
    share = make_share(args, engine)
    step(engine, share)  # moments are not zero, and kernels are compiled
    state = folder / "state"
    taken: list[HostSnapshot] = []
    blocked, write = [], []
    for _ in range(args.times + 1):
        taken.clear()
        blocked.append(timed(lambda: taken.append(engine.snapshot(state))))
        write.append(timed(lambda: commit(state, taken[0].write())))
    n_bytes = sum(file.stat().st_size for file in state.iterdir())
    seconds = {"first_blocked": blocked[0], "blocked": min(blocked[1:]), "write": min(write[1:])}
    seconds["load"] = min(timed_from_disk(state, lambda: load(engine, state)) for _ in range(args.times))
    seconds["step"] = min(timed(lambda: step(engine, share)) for _ in range(3))
    seconds["step_writing"] = step_while_writing(engine, share, state)
    if dist.get_rank() == 0:
        shutil.rmtree(state)
    disk_write = min(timed(lambda: write_plainly(folder, n_bytes)) for _ in range(args.times))
    disk_read = min(timed_from_disk(folder, lambda: read_plainly(folder)) for _ in range(args.times))
    return {
        "parameters": n_bytes / 12,
        "gb": n_bytes / 1e9,
        **seconds,
        "link_gb_per_second": dist.get_world_size() * LINK_BYTES / 1e9 / min(timed_copies()),
        "disk_write_gb_per_second": n_bytes / 1e9 / disk_write,
        "disk_read_gb_per_second": n_bytes / 1e9 / disk_read,
    }


def make_share(args: argparse.Namespace, engine: MegatronEngine) -> Share:
    tokens = args.sequence * args.sequences
    ids = torch.randint(0, engine.shape.vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    batch = Batch((args.sequence,) * args.sequences, ids, torch.ones(tokens))
    return engine.planner.plan(batch.lengths).share(batch, engine.groups.dp.rank())


def step(engine: MegatronEngine, share: Share) -> None:
    engine.forward_backward(share, SFTLoss())
    engine.optim_step()
    synchronize()


def load(engine: MegatronEngine, folder: Path) -> None:
    engine.load(folder)
    synchronize()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def commit(folder: Path, part: WrittenPart) -> None:
    """Gather what the ranks wrote, and write the index."""
    parts = [part] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    if dist.get_rank() == 0:
        finish(folder, parts)


def step_while_writing(engine: MegatronEngine, share: Share, folder: Path) -> float:
    """Return the mean seconds of the steps during which a state is written."""
    seconds = []
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(engine.snapshot(folder).write)
        while not all_done(writing.done()):
            seconds.append(timed(lambda: step(engine, share)))
        commit(folder, writing.result())
    return sum(seconds) / max(1, len(seconds))


def all_done(value: bool) -> bool:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(values)


def timed_from_disk(folder: Path, action: Callable[[], None]) -> float:
    """Return the seconds of an action on files that are removed from the page cache before."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return timed(action)


def write_plainly(folder: Path, n_bytes: int) -> None:
    """Write this rank's share of `n_bytes` to a file, and wait until it is on the disk."""
    left = n_bytes // dist.get_world_size()
    with (folder / f"plain-{dist.get_rank()}").open("wb", buffering=0) as file:
        while left > 0:
            left -= file.write(BLOCK[:left])
        os.fsync(file.fileno())


def read_plainly(folder: Path) -> None:
    """Read what `write_plainly` has written."""
    buffer = bytearray(len(BLOCK))
    with (folder / f"plain-{dist.get_rank()}").open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def timed_copies() -> list[float]:
    """Return the seconds of copies of LINK_BYTES from the device to pinned memory, on all ranks at one time."""
    source = torch.ones(LINK_BYTES, dtype=torch.uint8, device=torch.cuda.current_device())
    target = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    return [timed(lambda: copy(source, target)) for _ in range(5)]


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    synchronize()


def report(args: argparse.Namespace, measured: dict[str, float]) -> None:
    gb, rounded = measured["gb"], {name: round(value, 2) for name, value in measured.items()}
    row = {
        "model": args.model,
        "layers": args.layers,
        "backend": args.backend,
        "ranks": dist.get_world_size(),
        **rounded,
        "parameters": round(measured["parameters"]),
        "blocked_of_link": round(gb / measured["blocked"] / measured["link_gb_per_second"], 2),
        "write_of_disk": round(gb / measured["write"] / measured["disk_write_gb_per_second"], 2),
        "load_of_disk": round(gb / measured["load"] / measured["disk_read_gb_per_second"], 2),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
