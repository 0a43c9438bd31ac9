"""Kills runs at random moments, resumes them, and compares what they end with to a run that nobody killed.

    python benchmarks/kill_and_resume.py --kills 200 --jobs 4
    python benchmarks/kill_and_resume.py --kills 50 --recipe recipes/quickstart-ppo.yaml
    python benchmarks/kill_and_resume.py --kills 50 actor.backend=fsdp:d1

The quickstart is shortened: 8 steps with a checkpoint after each. Every trial starts the same command again and again;
each start but the last is killed, until the run finishes by itself. The victims and the moments are drawn at random:

    victims   the driver, one of its workers, or the driver with all of its descendants (SIGKILL), and the driver
              asked to end (SIGTERM)
    moments   uniform over the time of a whole run, or as soon as the folder of a new checkpoint appears

A trial is right if it finished, if weights and moments have the bits of the uninterrupted run, if every metric that is
not a time has, and if the samples of all steps are the same, each step once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from fivefold.checkpoints.store import CheckpointStore
from fivefold.engine.state.stored_state import StoredState

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
OVERRIDES = (
    "total_train_steps=8", "train_dataset.batch_size=8", "gconfig.n_samples=4", "valid_dataset.limit=32",
    "recover.freq_steps=1", "recover.max_to_keep=1", "stats.n_logged_samples=32", "stats.trackers=[]",
    "experiment_name=quickstart",
)  # fmt: skip
KINDS = ("param", "exp_avg", "exp_avg_sq")
VICTIMS = ("driver", "worker", "everything", "asked to end")
MOMENTS = ("any time", "in a save")
TIMEOUT_S = 600.0


@dataclass
class Tally:
    """What happened in all trials."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    """State of the run at each kill: in its set-up or in its steps."""
    starts: int = 0
    trials: int = 0
    wrong: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="number of kills over all trials")
    parser.add_argument("--jobs", type=int, default=1, help="trials at one time")
    parser.add_argument("--most", type=int, default=6, help="most kills of one trial")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no trial after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="recipe of `fivefold train`")
    parser.add_argument("overrides", nargs="*", help="keys of the recipe to set, such as actor.backend=megatron:d1")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="kill-and-resume-") as root:
        folder = Path(root)
        began = time.monotonic()
        code = _start(folder, "undisturbed", args).wait(TIMEOUT_S)
        if code != 0:
            sys.exit(f"the run that nobody killed ended with {code}")
        whole = time.monotonic() - began
        expected = _outcome(folder / "quickstart" / "undisturbed")
        tally = Tally()
        args.until = began + 60 * args.minutes
        seeds = iter(range(args.seed, sys.maxsize))
        with ThreadPoolExecutor(args.jobs) as pool:
            for _ in pool.map(
                lambda number: _trials(folder, number, args, seeds, tally, whole, expected), range(args.jobs)
            ):
                pass
    _report(tally, whole, time.monotonic() - began)
    sys.exit(1 if tally.wrong else 0)


def _trials(
    folder: Path, job: int, args: argparse.Namespace, seeds: Iterator[int], tally: Tally, whole: float, expected: Any
) -> None:
    """Run trials until there were enough kills."""
    while sum(tally.kills.values()) < args.kills and time.monotonic() < args.until:
        seed = next(seeds)
        name = f"trial-{seed}"
        problem = _trial(folder, name, random.Random(seed), args, tally, whole)
        if problem is None:
            got = _outcome(folder / "quickstart" / name)
            problem = next(
                (_difference(key, got[key], value) for key, value in expected.items() if got[key] != value), None
            )
        tally.trials += 1
        if problem is not None:
            tally.wrong.append(f"{name}: {problem}")
        print(f"{sum(tally.kills.values())} kills, {tally.trials} trials: {name} {problem or 'right'}", flush=True)


def _trial(
    folder: Path, name: str, chance: random.Random, args: argparse.Namespace, tally: Tally, whole: float
) -> str | None:
    """Start and kill one run until it finishes. Returns what went wrong."""
    run = folder / "quickstart" / name
    for _ in range(chance.randint(1, args.most)):
        victim, moment = chance.choice(VICTIMS), chance.choice(MOMENTS)
        driver = _start(folder, name, args)
        tally.starts += 1
        _wait_for(moment, run, driver, chance.uniform(0.0, whole))
        if driver.poll() is None:
            tally.kills[victim, moment] += 1
            tally.phases[_state(run)] += 1
            _kill(victim, driver, chance)
        code = driver.wait(TIMEOUT_S)
        if code == 0:
            return None
        if code not in {-signal.SIGKILL, 1, 130}:
            return f"a start that was killed ended with {code}"
    tally.starts += 1
    code = _start(folder, name, args).wait(TIMEOUT_S)
    return None if code == 0 else f"the last start, which nobody killed, ended with {code}; see {run}.log"


def _start(folder: Path, name: str, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "fivefold", "train", str(args.recipe.resolve()),
        f"cluster.fileroot={folder}", f"trial_name={name}", *OVERRIDES, *args.overrides,
    ]  # fmt: skip
    log = (folder / f"{name}.log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _wait_for(moment: str, run: Path, driver: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the moment of a kill, or the end of the run."""
    seen = set(run.glob("checkpoints/*"))
    deadline = time.monotonic() + (TIMEOUT_S if moment == "in a save" else seconds)
    while driver.poll() is None and time.monotonic() < deadline:
        if moment == "in a save" and set(run.glob("checkpoints/*")) - seen:
            return
        time.sleep(0.001)


def _state(run: Path) -> str:
    with suppress(OSError, ValueError):
        return str(json.loads((run / "status.json").read_text())["state"])
    return "setup"


def _kill(victim: str, driver: subprocess.Popen[bytes], chance: random.Random) -> None:
    below = psutil.Process(driver.pid).children(recursive=True)
    workers = [process for process in below if _title(process).startswith("ray::")]
    if victim == "asked to end":
        driver.terminate()
    elif victim == "worker" and workers:
        _end(chance.choice(workers).pid)
    else:
        driver.kill()
        if victim == "everything":
            for process in below:
                _end(process.pid)


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _outcome(run: Path) -> dict[str, Any]:
    """Return what must be equal in all trials."""
    latest = CheckpointStore(run / "checkpoints").latest()
    if latest is None:
        return {"weights": None, "metrics": None, "samples": None}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return {
        "weights and moments": {kind: _digests(latest.path / "trainer", kind) for kind in KINDS},
        "metrics": [{key: value for key, value in row.items() if not _is_time(key)} for row in rows],
        "samples": samples,
    }


def _difference(what: str, got: Any, expected: Any) -> str:
    """Return what differs, with the first difference."""
    if not isinstance(got, list) or len(got) != len(expected):
        return f"{what} differ"
    row, other = next((row, other) for row, other in zip(got, expected, strict=True) if row != other)
    keys = [key for key in row.keys() | other.keys() if row.get(key) != other.get(key)]
    return f"{what} differ at step {row['step']}: {', '.join(sorted(keys))}"


def _is_time(metric: str) -> bool:
    return any(word in metric for word in ("seconds/", "per_second", "tflops", "bubble", "replica_busy", "idle/"))


def _digests(folder: Path, kind: str) -> dict[str, int]:
    state = StoredState(folder, kind)
    return {name: hash(state.read(name).contiguous().view(torch.uint8).numpy().tobytes()) for name in state.names}


def _report(tally: Tally, whole: float, seconds: float) -> None:
    print(f"\n{'victim':<14}{'any time':>10}{'in a save':>11}")
    for victim in VICTIMS:
        print(f"{victim:<14}" + "".join(f"{tally.kills[victim, moment]:>{10 + i}}" for i, moment in enumerate(MOMENTS)))
    print(f"state at the kill: {', '.join(f'{state} {count}' for state, count in sorted(tally.phases.items()))}")
    print(
        f"{sum(tally.kills.values())} kills in {tally.trials} trials and {tally.starts} starts, "
        f"{len(tally.wrong)} wrong; an undisturbed run takes {whole:.0f} s, all took {seconds:.0f} s"
    )
    for line in tally.wrong:
        print(f"  {line}")


if __name__ == "__main__":
    main()
