"""Kills runs at random moments, resumes them, and compares what they end with to a run that nobody killed.

    python benchmarks/kill_and_resume.py --kills 200 --jobs 4
    python benchmarks/kill_and_resume.py --kills 50 --kinds synchronous --recipe recipes/quickstart-ppo.yaml
    python benchmarks/kill_and_resume.py --kills 50 --kinds synchronous,eval actor.backend=fsdp:d1

The quickstart is shortened: 8 steps with a checkpoint after each. Every trial starts the same command again and again;
each start but the last is killed, until the run finishes by itself. Kinds of trials take turns:

    synchronous     `fivefold train`
    asynchronous    the same, with samples that are up to two steps ahead
    eval            `fivefold eval`, which begins again after each kill

The victims and the moments are drawn at random:

    victims   the driver, its parent, one of its workers, or all of them (SIGKILL), and the command asked to end
              (SIGTERM)
    moments   uniform over the time of a whole run, or as soon as the folder of a new checkpoint appears

A trial is right if it finished, and if no process and no file in shared memory is left. A synchronous one also has the
weights and moments of the uninterrupted run to the bit, every metric that is not a time, and the samples of all steps,
each step once. An asynchronous one has each step once, and the same prompts in the same steps, none lost and none
twice; its weights depend on which samples are ready first. An evaluation prints the same result.
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
from collections.abc import Callable, Iterator
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
AHEAD = ("rollout.max_head_offpolicyness=2", "actor.backend=megatron:d1")
TENSORS = ("param", "exp_avg", "exp_avg_sq")
VICTIMS = ("driver", "its parent", "worker", "everything", "asked to end")
MOMENTS = ("any time", "in a save")
TIMEOUT_S = 600.0
MARK = "KILL_AND_RESUME"
"""Variable with the trial's name in the environment of its processes. A process of Ray that sets its title hides it."""
ENDING_S = 180.0
"""Seconds in which all processes of a trial end after its command: two small ones of Ray need 90 after a SIGKILL."""
SHARED_MEMORY = "/dev/shm/"


@dataclass
class Kind:
    """What a trial runs."""

    words: tuple[str, ...]
    """The command, and the keys that are set besides those of all kinds."""
    outcome: Callable[[Path], dict[str, Any]]
    """Returns what must be equal in all trials, by the folder of the run."""
    moments: tuple[str, ...] = MOMENTS
    seconds: float = 0.0
    """Time of a whole run."""
    expected: dict[str, Any] = field(default_factory=dict)


@dataclass
class Seen:
    """What the starts of a trial consisted of when they were killed."""

    processes: set[psutil.Process] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    """Files in shared memory that its processes had mapped; other programs on the machine have such files, too."""

    def add(self, processes: list[psutil.Process]) -> None:
        self.processes.update(processes)
        for process in processes:
            with suppress(psutil.Error, OSError):
                self.files |= {each.path for each in process.memory_maps() if each.path.startswith(SHARED_MEMORY)}


@dataclass
class Tally:
    """What happened in all trials."""

    kills: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of kills, by kind, victim and moment."""
    phases: Counter[str] = field(default_factory=Counter)
    """State of the run at each kill: in its set-up or in its steps."""
    starts: int = 0
    trials: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="number of kills over all trials")
    parser.add_argument("--jobs", type=int, default=1, help="trials at one time")
    parser.add_argument("--most", type=int, default=6, help="most kills of one trial")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no trial after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="synchronous,asynchronous,eval", help="kinds of trials, which take turns")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="recipe of the runs")
    parser.add_argument("overrides", nargs="*", help="keys of the recipe to set, such as actor.backend=megatron:d1")
    args = parser.parse_args()
    kinds = {name: _kinds()[name] for name in args.kinds.split(",")}
    with TemporaryDirectory(prefix="kill-and-resume-") as root:
        folder, began = Path(root), time.monotonic()
        for name, kind in kinds.items():
            _undisturbed(folder, name, kind, args)
        tally = Tally()
        args.until = began + 60 * args.minutes
        seeds = iter(range(args.seed, sys.maxsize))
        with ThreadPoolExecutor(args.jobs) as pool:
            for _ in pool.map(lambda _: _trials(folder, args, seeds, tally, kinds), range(args.jobs)):
                pass
    _report(tally, kinds, time.monotonic() - began)
    sys.exit(1 if tally.wrong else 0)


def _kinds() -> dict[str, Kind]:
    """Return all kinds of trials by name."""
    return {
        "synchronous": Kind(("train",), _outcome),
        "asynchronous": Kind(("train", *AHEAD), _prompts),
        "eval": Kind(("eval",), _result, moments=MOMENTS[:1]),
    }


def _undisturbed(folder: Path, name: str, kind: Kind, args: argparse.Namespace) -> None:
    """Let a run of a kind finish, and take note of its time and outcome."""
    began, trial = time.monotonic(), f"undisturbed-{name}"
    if (code := _start(folder, trial, kind, args).wait(TIMEOUT_S)) != 0:
        sys.exit(f"the {name} run that nobody killed ended with {code}:\n{(folder / f'{trial}.log').read_text()}")
    kind.seconds = time.monotonic() - began
    kind.expected = kind.outcome(folder / "quickstart" / trial)


def _trials(folder: Path, args: argparse.Namespace, seeds: Iterator[int], tally: Tally, kinds: dict[str, Kind]) -> None:
    """Run trials until there were enough kills."""
    while sum(tally.kills.values()) < args.kills and time.monotonic() < args.until:
        seed = next(seeds)
        kind = list(kinds)[seed % len(kinds)]
        name = f"{kind}-{seed}"
        seen = Seen()
        problem = _trial(folder, name, kinds[kind], random.Random(seed), args, tally, seen)
        problem = problem or _left(name, seen) or _wrong(kinds[kind], folder / "quickstart" / name)
        tally.trials[kind] += 1
        if problem is not None:
            tally.wrong.append(f"{name}: {problem}")
        print(
            f"{sum(tally.kills.values())} kills, {tally.trials.total()} trials: {name} {problem or 'right'}", flush=True
        )


def _trial(
    folder: Path,
    name: str,
    kind: Kind,
    chance: random.Random,
    args: argparse.Namespace,
    tally: Tally,
    seen: Seen,
) -> str | None:
    """Start and kill one run until it finishes, and note what it consists of in `seen`. Returns what went wrong."""
    run = folder / "quickstart" / name
    for _ in range(chance.randint(1, args.most)):
        victim, moment = chance.choice(VICTIMS), chance.choice(kind.moments)
        command = _start(folder, name, kind, args)
        tally.starts += 1
        _wait_for(moment, run, command, chance.uniform(0.0, kind.seconds))
        if command.poll() is None:
            tally.kills[name.partition("-")[0], victim, moment] += 1
            tally.phases[_state(run)] += 1
            below = psutil.Process(command.pid).children(recursive=True)
            seen.add(below)
            _kill(victim, command, below, chance)
        code = command.wait(TIMEOUT_S)
        if code == 0:
            return None
        if code not in {-signal.SIGKILL, 1, 130}:
            return f"a start that was killed ({victim}, {moment}) ended with {code}; see {run}.log"
    tally.starts += 1
    code = _start(folder, name, kind, args).wait(TIMEOUT_S)
    return None if code == 0 else f"the last start, which nobody killed, ended with {code}; see {run}.log"


def _start(folder: Path, name: str, kind: Kind, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    verb, *keys = kind.words
    command = [
        sys.executable, "-m", "fivefold", verb, str(args.recipe.resolve()),
        f"cluster.fileroot={folder}", f"trial_name={name}", *OVERRIDES, *keys, *args.overrides,
    ]  # fmt: skip
    environment = os.environ | {MARK: f"{folder}/{name}"}
    with (folder / f"{name}.log").open("ab") as log, (folder / f"{name}.out").open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=log, env=environment, start_new_session=True)


def _wait_for(moment: str, run: Path, command: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the moment of a kill, or the end of the run."""
    seen = set(run.glob("checkpoints/*"))
    deadline = time.monotonic() + (TIMEOUT_S if moment == "in a save" else seconds)
    while command.poll() is None and time.monotonic() < deadline:
        if moment == "in a save" and set(run.glob("checkpoints/*")) - seen:
            return
        time.sleep(0.001)


def _state(run: Path) -> str:
    with suppress(OSError, ValueError):
        return str(json.loads((run / "status.json").read_text())["state"])
    return "setup"


def _kill(victim: str, command: subprocess.Popen[bytes], below: list[psutil.Process], chance: random.Random) -> None:
    # The driver has the command line of its parent, from which it is forked; `fivefold eval` has no such parent.
    words = _words(psutil.Process(command.pid))
    driver = next((each.pid for each in below if words and _words(each) == words), command.pid)
    workers = [process for process in below if " ".join(_words(process)).startswith("ray::")]
    if victim == "asked to end":
        command.terminate()
    elif victim == "worker" and workers:
        _end(chance.choice(workers).pid)
    elif victim == "its parent":
        command.kill()
    else:
        _end(driver)
        if victim == "everything":
            for pid in [command.pid, *(process.pid for process in below)]:
                _end(pid)


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _left(name: str, seen: Seen) -> str | None:
    """Return which processes of a trial, or which of its files in shared memory, are left after its end."""
    deadline = time.monotonic() + ENDING_S
    while time.monotonic() < deadline:
        marked = {each for each in psutil.process_iter() if _mark(each).endswith(f"/{name}")}
        processes = [each for each in marked | seen.processes if _lives(each)]
        files = [file for file in seen.files if Path(file).exists()]
        if not processes and not files:
            return None
        time.sleep(0.5)
    return f"left after {ENDING_S:.0f} s: {[' '.join(_words(each))[:80] for each in processes]}, {files}"


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _mark(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.environ().get(MARK, "")
    return ""


def _wrong(kind: Kind, run: Path) -> str | None:
    """Return the first thing in which a trial that has finished differs from the run that nobody killed."""
    got = kind.outcome(run)
    return next((_difference(key, got[key], value) for key, value in kind.expected.items() if got[key] != value), None)


def _prompts(run: Path) -> dict[str, Any]:
    """Return the steps of an asynchronous run, and the prompts of its samples."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return {
        "steps": [{"step": row["step"]} for row in rows],
        "prompts": [{key: sample[key] for key in ("step", "prompt_index", "prompt")} for sample in samples],
    }


def _result(run: Path) -> dict[str, Any]:
    """Return what an evaluation has printed; a run's folder and its output have the same name."""
    return {"result": [json.loads((run.parents[1] / f"{run.name}.out").read_text())]}


def _outcome(run: Path) -> dict[str, Any]:
    """Return weights, moments, metrics and samples of a synchronous run."""
    latest = CheckpointStore(run / "checkpoints").latest()
    if latest is None:
        return {"weights": None, "metrics": None, "samples": None}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return {
        "weights and moments": {kind: _digests(latest.path / "trainer", kind) for kind in TENSORS},
        "metrics": [{key: value for key, value in row.items() if not _is_time(key)} for row in rows],
        "samples": samples,
    }


def _difference(what: str, got: Any, expected: Any) -> str:
    """Return what differs, with the first difference."""
    if not isinstance(got, list) or len(got) != len(expected):
        return f"{what} differ"
    row, other = next((row, other) for row, other in zip(got, expected, strict=True) if row != other)
    keys = [key for key in row.keys() | other.keys() if row.get(key) != other.get(key)]
    return f"{what} differ at step {row.get('step')}: {', '.join(sorted(keys))}"


def _is_time(metric: str) -> bool:
    return any(word in metric for word in ("seconds/", "per_second", "tflops", "bubble", "replica_busy", "idle/"))


def _digests(folder: Path, kind: str) -> dict[str, int]:
    state = StoredState(folder, kind)
    return {name: hash(state.read(name).contiguous().view(torch.uint8).numpy().tobytes()) for name in state.names}


def _report(tally: Tally, kinds: dict[str, Kind], seconds: float) -> None:
    for name, kind in kinds.items():
        print(f"\n{name + ': ' + str(tally.trials[name]) + ' trials':<28}" + "".join(f"{m:>11}" for m in kind.moments))
        for victim in VICTIMS:
            print(f"{victim:<28}" + "".join(f"{tally.kills[name, victim, moment]:>11}" for moment in kind.moments))
        print(f"an undisturbed run takes {kind.seconds:.0f} s")
    print(f"\nstate at the kill: {', '.join(f'{state} {count}' for state, count in sorted(tally.phases.items()))}")
    print(
        f"{sum(tally.kills.values())} kills in {tally.trials.total()} trials and {tally.starts} starts, "
        f"{len(tally.wrong)} wrong; all took {seconds:.0f} s"
    )
    for line in tally.wrong:
        print(f"  {line}")


if __name__ == "__main__":
    main()
