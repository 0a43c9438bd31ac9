"""Files of others that are damaged, odd or hostile: each command answers with one clear error, or works.

    python benchmarks/attack.py --count 3000

    models        folders of tiny-moe with a damaged or missing file, or an odd value in one: generate, plan, convert,
                  and the setup of train
    checkpoints   checkpoints with a damaged or forged file: the setup of train, checkpoints
    runs          folders of runs with odd lines and files: report, runs, timeline
    judges        services with odd replies behind a judge: each response gets a score or `on_failure`

Each command runs in a forked process. Four things are faults: an exception that nobody turned into a message, a process
that is killed by a signal, an exit code that is neither 0, 1 nor 2, and `--limit` seconds without an end. The program
prints a table of kinds and outcomes, and each fault with the number that makes it again (`--first`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import socketserver
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import typer

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.checkpoints import manifest
from fivefold.cli.command import reporting_errors
from fivefold.cli.main import app
from fivefold.run import whole_run

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 10**12, 2**70, -0.5, 1e308, float("nan"), float("inf"), "", "x", "\x00", [], [[]], {},
    {"": 1}, [None], "qwen3_moe", ["full_attention"] * 3,
)  # fmt: skip
DEEP = b"[" * 100_000 + b"]" * 100_000
CONTENTS: dict[str, bytes] = {
    "empty": b"", "null": b"null", "list": b"[]", "object": b"{}", "text": b'"text"', "number": b"7", "deep": DEEP,
    "deep object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "junk": bytes(range(256)) * 8,
    "not UTF-8": b'{"a": "\xff"}',
    "a key twice": b'{"model_type": "qwen3_moe", "model_type": "llama"}', "huge number": b'{"a": ' + b"9" * 5000 + b"}",
    "NaN": b'{"a": NaN}',
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    """Exit code; negative: the signal that ended the process."""
    errors: str
    """What it wrote to standard error."""
    is_late: bool

    @property
    def fault(self) -> str | None:
        """What is wrong with it; None: nothing."""
        if self.is_late:
            return "does not end"
        if "Traceback (most recent call last)" in self.errors:
            return "a traceback"
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        return None


@dataclass(frozen=True)
class Trial:
    """Something odd, and the command that gets it."""

    what: str
    run: Callable[[], object]


def forked(run: Callable[[], object], limit_s: float) -> Outcome:
    """Call a function in a forked process."""
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            _in_child(run, errors.fileno())
        code, is_late = _waited(child, time.monotonic() + limit_s)
        errors.seek(0)
        return Outcome(code, errors.read().decode(errors="replace"), is_late)


def _in_child(run: Callable[[], object], errors: int) -> NoReturn:
    code = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(errors, 2)
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except typer.Exit as end:
        code = end.exit_code
    except BaseException:  # noqa: BLE001 - it is what is looked for
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _waited(child: int, deadline: float) -> tuple[int, bool]:
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), False
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -9, True


def command(*words: str) -> Callable[[], object]:
    """Return a call of the command line."""
    return lambda: app(list(words), standalone_mode=True)


def setup_of(*words: str) -> Callable[[], object]:
    """Return a call of a training command that ends where its processes would start."""

    @contextmanager
    def nothing(*_args: object, **_options: object) -> Iterator[None]:
        raise SystemExit(0)
        yield

    def run() -> None:
        whole_run.open_run = nothing  # type: ignore[assignment]
        app(list(words), standalone_mode=True)

    return run


def damage(file: Path, draw: random.Random) -> str:
    """Damage a file in one way. Returns which."""
    content = file.read_bytes()
    kind = draw.choice(
        [*CONTENTS, "missing", "folder", "FIFO", "dangling link", "link to itself", "cut", "a bit", "longer"]
    )
    if kind in CONTENTS:
        file.write_bytes(CONTENTS[kind])
        return kind
    if kind in ("cut", "a bit", "longer"):
        changed = bytearray(content)
        place = draw.randrange(max(1, min(len(content), 4096)))
        if kind == "cut":
            del changed[place:]
        elif kind == "longer":
            changed += b"\x00\n{"
        elif changed:
            changed[place] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        return kind
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "FIFO":
        os.mkfifo(file)
    elif kind == "dangling link":
        file.symlink_to("nowhere")
    elif kind == "link to itself":
        file.symlink_to(file.name)
    return kind


def odd_value(file: Path, draw: random.Random) -> str:
    """Change a value of a JSON file, at any depth. Returns what was done."""
    try:
        whole = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return "odd already"
    place, path = whole, []
    if not isinstance(place, (dict, list)):
        return "odd already"
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return "nothing"
        key = draw.choice(keys)
        path.append(str(key))
        if not isinstance(place[key], (dict, list)) or not place[key] or draw.random() < 0.3:
            break
        place = place[key]
    value = draw.choice([*VALUES, "without"])
    if value == "without":
        del place[key]
    else:
        place[key] = value
    file.write_text(json.dumps(whole))
    return f"{'.'.join(path)}={value!r:.40}"


class Models:
    """Odd folders of models."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._plain = folder, resolve_model_folder("package:tiny-moe")

    def trial(self, draw: random.Random) -> Trial:
        model = self._folder / "model"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(self._plain, model)
        (model / "generation_config.json").write_text('{"eos_token_id": 1}')
        file = draw.choice(sorted(file for file in model.iterdir() if file.suffix in (".json", ".safetensors")))
        is_value = file.suffix == ".json" and draw.random() < 0.6
        what = f"{file.name}: {odd_value(file, draw) if is_value else damage(file, draw)}"
        name, path = draw.choice(["generate", "plan", "train", "convert"]), f"actor.path={model}"
        runs = {
            "generate": command("generate", "--model", str(model), "--prompt", "1+1=", "--max-new-tokens", "2"),
            "plan": command("plan", QUICKSTART, path),
            "train": setup_of("train", QUICKSTART, path, f"cluster.fileroot={self._folder}/runs", "--overwrite"),
            "convert": command("convert", str(model), "-o", str(self._folder / "out"), "--overwrite"),
        }
        return Trial(f"{name} with {what}", runs[name])


class Checkpoints:
    """Odd checkpoints of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._options = (
            QUICKSTART, f"cluster.fileroot={folder}/runs", "total_train_steps=2", "train_dataset.batch_size=4",
            "gconfig.n_samples=2", "valid_dataset=null", "actor.ppo_n_minibatches=1", "actor.backend=megatron:d1",
            "recover.freq_steps=1", "stats.trackers=[]",
        )  # fmt: skip
        made = forked(command("train", *self._options, "trial_name=made", "--overwrite"), 300)
        assert made.code == 0, made.errors
        self._plain = folder / "runs" / "quickstart" / "made"

    def trial(self, draw: random.Random) -> Trial:
        run = self._plain.with_name("odd")
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self._plain, run)
        checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
        file = draw.choice(sorted(file for file in checkpoint.rglob("*") if file.is_file()))
        is_value = file.suffix == ".json" and draw.random() < 0.6
        what = f"{file.relative_to(run)}: {odd_value(file, draw) if is_value else damage(file, draw)}"
        if draw.random() < 0.7:
            what += forge(checkpoint)
        name = draw.choice(["train", "checkpoints", "weights"])
        runs = {
            "train": setup_of("train", *self._options, "trial_name=odd", "total_train_steps=3"),
            "checkpoints": command("checkpoints", str(run)),
            "weights": command(
                "checkpoints", str(run), "--export", "latest", "-o", str(self._folder / "out"), "--overwrite"
            ),
        }
        return Trial(f"{name} with {what}", runs[name])


def forge(checkpoint: Path) -> str:
    """Let the manifest agree with the files, as somebody who changed them could; where it can be done."""
    file = checkpoint / manifest.FILE
    if not file.is_file():  # a FIFO would be waited for
        return ""
    try:
        values = json.loads(file.read_bytes())
        values["files"] = {
            str(each.relative_to(checkpoint)): asdict(manifest.FileEntry.of(each))
            for each in checkpoint.rglob("*")
            if each.is_file() and each != file
        }
        values.pop(manifest.DIGEST, None)
        file.write_text(manifest._text(values | {manifest.DIGEST: manifest._own_digest(values)}))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return ""
    return ", forged"


class Runs:
    """Odd folders of runs."""

    def __init__(self, made: Path) -> None:
        self._plain = made

    def trial(self, draw: random.Random) -> Trial:
        run = self._plain.with_name("shown")
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self._plain, run, ignore=shutil.ignore_patterns("checkpoints", "weights", "tensorboard"))
        files = sorted(
            file for file in run.rglob("*") if file.suffix in (".json", ".jsonl", ".yaml") and file.is_file()
        )
        changes = [self._change(draw.choice(files), draw) for _ in range(draw.randint(1, 3))]
        name = draw.choice(["report", "runs", "timeline"])
        out = ["-o", str(run.parent / "page")]
        runs = {
            "report": command("report", str(run), *out),
            "runs": command("runs", str(run.parents[1])),
            "timeline": command("timeline", str(run), *out),
        }
        return Trial(f"{name} with {', '.join(changes)}", runs[name])

    def _change(self, file: Path, draw: random.Random) -> str:
        if not file.is_file():
            return "nothing"
        if file.suffix == ".jsonl" and draw.random() < 0.7:
            lines = file.read_bytes().splitlines(keepends=True)
            line = draw.choice(
                [*CONTENTS.values(), b'{"step": 1}', b'{"step": 1e400}', b'{"step": "1"}', b'{"step": -1}']
            )
            lines.insert(draw.randint(0, len(lines)), line + b"\n")
            file.write_bytes(b"".join(lines))
            return f"{file.name}: a line {line!r:.30}"
        is_value = file.suffix == ".json" and draw.random() < 0.6
        return f"{file.name}: {odd_value(file, draw) if is_value else damage(file, draw)}"


REPLY = {"choices": [{"message": {"content": "Score: 0.5"}}]}


class Judges:
    """Services of judges with odd replies."""

    def trial(self, draw: random.Random) -> Trial:
        kind = draw.choice(["bytes", "status", "value", "content", "headers", "slow", "closed"])
        content: bytes = json.dumps(REPLY).encode()
        head, pause = "HTTP/1.1 200 OK", 0.0
        if kind == "bytes":
            content = draw.choice(list(CONTENTS.values()))
        elif kind == "status":
            head = f"HTTP/1.1 {draw.choice([100, 204, 301, 302, 400, 401, 429, 500, 503, 600, -1, 'x'])} Odd"
        elif kind == "value":
            reply = json.loads(json.dumps(REPLY))
            place: Any = draw.choice([reply, reply["choices"][0], reply["choices"][0]["message"]])
            place[draw.choice(list(place))] = draw.choice(VALUES)
            content = json.dumps(reply).encode()
        elif kind == "content":
            said = draw.choice(["Score: " + "9" * 400, "Score: nan", "Score: ٣", "Score: 1e999", "", "Score:", "\x00"])
            content = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
        elif kind == "headers":
            odd = [
                "a: b\r\n" * 5000,
                "Content-Encoding: gzip",
                "Transfer-Encoding: chunked",
                "Content-Length: -5",
                "\x00: x",
            ]
            head += "\r\n" + draw.choice([*odd, "Retry-After: " + "9" * 30, "Location: http://127.0.0.1:1/"])
        elif kind == "slow":
            pause = 0.2
        answer = b"" if kind == "closed" else f"{head}\r\nConnection: close\r\n\r\n".encode("latin-1") + content
        return Trial(f"{kind}: {answer!r:.60}", lambda: judged(answer, pause))


def judged(answer: bytes, pause_s: float) -> None:
    """Let a judge ask a service that gives an answer, and check that its reward is finite."""
    from fivefold.config.schema.rewards import RewardConfig
    from fivefold.rewards.resolve import resolve_rewards
    from fivefold.rewards.reward_set import compute_rewards
    from fivefold.types import Prompt

    class Service(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            size = 1 if pause_s else max(1, len(answer))
            with suppress(OSError):  # the judge has gone
                self.request.recv(65536)
                for start in range(0, len(answer), size):
                    self.request.sendall(answer[start : start + size])
                    time.sleep(pause_s)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Service) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = {
            "base_url": f"http://127.0.0.1:{server.server_address[1]}/v1", "model": "m", "timeout_s": 1.0, "retries": 1,
            "on_failure": 0.25, "pattern": r"Score: (\S*)", "backoff_s": 0.01,
        }  # fmt: skip
        config = RewardConfig.model_validate({"fn": "judge", "kwargs": options})
        [each] = resolve_rewards(config, 60.0).rewards
        with reporting_errors():
            [value] = compute_rewards(each.reward, [Prompt(0, "1+1=", (1,), "2")], ["2"])
        assert math.isfinite(value), value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attacks. Returns 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one command")
    parser.add_argument("--only", choices=["models", "checkpoints", "runs", "judges"])
    chosen = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    n_outcomes: Counter[tuple[str, str]] = Counter()
    faults: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        kinds: dict[str, Any] = {"models": Models(folder), "judges": Judges()}
        if chosen.only in (None, "checkpoints", "runs"):
            kinds["checkpoints"] = Checkpoints(folder)
            kinds["runs"] = Runs(folder / "runs" / "quickstart" / "made")
        names = [chosen.only] if chosen.only else sorted(kinds)
        warm()
        for number in range(chosen.first, chosen.first + chosen.count):
            draw = random.Random(number)
            kind = names[number % len(names)]
            trial = kinds[kind].trial(draw)
            outcome = forked(trial.run, chosen.limit)
            n_outcomes[kind, outcome.fault or ("works" if outcome.code == 0 else "refused")] += 1
            if outcome.fault:
                if chosen.count == 1:
                    print(outcome.errors)
                last = outcome.errors.strip().splitlines()[-1:] or [""]
                faults[f"{outcome.fault}: {last[0]:.100}"] += 1
                print(f"{number} {kind}: {trial.what}: {outcome.fault}: {last[0]:.200}", flush=True)
    for (kind, end), n in sorted(n_outcomes.items()):
        print(f"{kind:12}  {end:16}  {n:6}")
    return 1 if faults else 0


def warm() -> None:
    """Import what the commands import, so that each forked process has it."""
    import fivefold.generate
    import fivefold.train_setup  # noqa: F401


if __name__ == "__main__":
    raise SystemExit(main())
