"""Whole GRPO steps of a model with random weights, beside the engine alone and the update alone.

    python benchmarks/grpo_step.py --layers 8                        the 8-layer shape, colocated on two GPUs
    python benchmarks/grpo_step.py --layers 48 --steps 2             Qwen3-30B-A3B whole
    python benchmarks/grpo_step.py --layers 8 rollout.backend=vllm:d1 actor.backend=megatron:d1 rollout.colocate=false
    python benchmarks/grpo_step.py --shape hidden_size=64 --recipe recipes/quickstart.yaml --parts step
    python benchmarks/grpo_step.py --layers 8 --parts step --turns 4          the same tokens in four turns of a game
    python benchmarks/grpo_step.py --layers 8 --parts step --turns 4 --agent  ... of an agent behind a URL

Three programs run one after the other on the same machine:

    step      `fivefold train` with the recipe, on random prompts and with a random reward, until it has made `--steps`
              steps; the fastest one after the first counts, and with a look-ahead the mean of those which it does not
              shorten any more
    engine    vLLM's own `LLM.generate`, or SGLang's own `Engine.generate`, with the same prompts and sampling, one
              process for each replica; without the log-probs of sampled tokens and with them
    update    `actor_update.py` with the recipe's actor and as many sequences of the same length

The last lines of the output are JSON: the seconds of the step and of its phases, those of the engine and the update
alone, and step / (engine + update). Further arguments are keys of the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from random_model import write_config, write_tokenizer

from fivefold.config.load import load_recipe, resolved_yaml
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.parser import parse_backend

HERE = Path(__file__).parent
REWARD = '''
import zlib


def fn(response, ground_truth, *, data_source, extra_info):
    """Return 0 or 1, at random but always the same for the same text."""
    return float(zlib.crc32(response.encode()) % 2)
'''
GAME = '''
import urllib3
import zlib

TURNS, ANSWER = {turns}, "{answer}"


class Game:
    """Answers each move but the last one with the same words."""

    def reset(self, ground_truth):
        self.turn = 0

    def step(self, move):
        self.turn += 1
        return ANSWER, zlib.crc32(move.encode()) % 2 / TURNS, self.turn == TURNS


def agent(base_url, prompt, ground_truth):
    """Play the game through a URL."""
    game, text, total = Game(), prompt, 0.0
    game.reset(ground_truth)
    for _ in range(TURNS):
        url, body = f"{{base_url}}/completions", {{"prompt": text}}
        reply = urllib3.request("POST", url, json=body, retries=False, timeout=None)
        move = reply.json()["choices"][0]["text"]
        answer, reward, _ = game.step(move)
        text, total = text + move + answer, total + reward
    return total
'''


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="grpo-step-") as name:
        folder = Path(name)
        recipe = prepare(args, folder)
        row: dict[str, Any] = {"layers": args.layers, "actor": recipe.actor.backend, "rollout": recipe.rollout.backend}
        if "step" in args.parts:
            row |= measure_steps(args, folder, recipe.rollout.max_head_offpolicyness)
            print(json.dumps(row), flush=True)
        if "engine" in args.parts:
            row["engine_s"] = measure_engine(args, folder, recipe)
            row["engine_with_logprobs_s"] = measure_engine(args, folder, recipe, "--logprobs")
        if "update" in args.parts:
            row["update"] = measure_update(args, folder, recipe)
        if args.parts == PARTS:
            alone = row["engine_s"] + min(row["update"]["seconds"][1:])
            row["step / (engine + update)"] = round(row["step_s"] / alone, 3)
        print(json.dumps(row), flush=True)


PARTS = ["step", "engine", "update"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=str(HERE.parent / "recipes/qwen3-30b-a3b-2xh200.yaml"))
    parser.add_argument("--model", default="Qwen3-30B-A3B", help="a shape of fivefold/families")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shape", nargs="*", default=[], metavar="KEY=JSON", help="other keys of its config.json")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a step")
    parser.add_argument("--prompt-tokens", type=int, default=190)
    parser.add_argument("--new-tokens", type=int, default=1024, help="of an episode, over all turns")
    parser.add_argument("--turns", type=int, default=1, help="turns of an episode; 1: without an environment")
    parser.add_argument("--answer-tokens", type=int, default=32, help="what the model reads between two turns")
    parser.add_argument("--agent", action="store_true", help="play the turns through a URL")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--limit", type=float, default=600, help="seconds after which the steps are given up")
    parser.add_argument("--keep", type=Path, help="folder for the metrics and the logs of the run")
    args, overrides = parser.parse_known_args()
    # A recipe's key that follows --shape is none of config.json's.
    keys = [item for item in args.shape if "." in item.partition("=")[0]]
    args.shape = [item for item in args.shape if item not in keys]
    args.overrides = [*keys, *overrides]
    return args


def prepare(args: argparse.Namespace, folder: Path) -> TrainRecipe:
    """Write the model, the prompts, the reward and the recipe. Returns the recipe."""
    model = folder / "model"
    model.mkdir()
    shape = {key: json.loads(value) for key, _, value in (item.partition("=") for item in args.shape)}
    config = write_config(model, args.model, num_hidden_layers=args.layers, **shape)
    write_tokenizer(model, config["vocab_size"])
    prompts = folder / "prompts.jsonl"
    (folder / "reward.py").write_text(REWARD)
    keys = {
        "experiment_name": "grpo-step",
        "trial_name": "trial",
        "cluster.fileroot": folder / "runs",
        "actor.path": model,
        "actor.init_from_scratch": "true",
        "train_dataset.path": prompts,
        "train_dataset.answer_key": "answer",
        "train_dataset.batch_size": args.prompts,
        "train_dataset.max_length": args.prompt_tokens,
        "gconfig.max_new_tokens": args.new_tokens // args.turns,
        "reward.fn": f"{folder / 'reward.py'}:fn",
        "reward.kwargs": "{}",
        "recover.mode": "disabled",
        "valid_dataset": "null",
        "stats.n_logged_samples": 0,
    }
    words = random.Random(0)
    if args.turns > 1:
        between = text(words, args.answer_tokens, config["vocab_size"])
        (folder / "game.py").write_text(GAME.format(turns=args.turns, answer=f" {between} "))
        length = args.prompt_tokens + args.new_tokens + (args.turns - 1) * args.answer_tokens
        door, name = ("agent", "agent") if args.agent else ("game", "Game")
        keys |= {
            f"environment.{door}": f"{folder / 'game.py'}:{name}",
            "environment.max_turns": args.turns,
            "environment.max_length": length + 8,
            "reward.fn": "environment",
        }
    overrides = [*(f"{key}={value}" for key, value in keys.items()), *args.overrides]
    # Steps follow for which a look-ahead still generates while the last one that counts is made.
    n_steps = args.steps + 1 + load_recipe(args.recipe, overrides, TrainRecipe).rollout.max_head_offpolicyness
    recipe = load_recipe(args.recipe, [*overrides, f"total_train_steps={n_steps}"], TrainRecipe)
    n_rows = args.prompts * n_steps
    rows = [{"prompt": text(words, args.prompt_tokens, config["vocab_size"])} for _ in range(n_rows)]
    prompts.write_text("".join(json.dumps({**row, "answer": ""}) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(resolved_yaml(recipe))
    return recipe


def text(words: random.Random, count: int, vocab_size: int) -> str:
    """Return so many random words, each a token."""
    return " ".join(f"w{words.randrange(2, vocab_size)}" for _ in range(count))


def measure_steps(args: argparse.Namespace, folder: Path, age: int) -> dict[str, Any]:
    """Train until `--steps` steps are logged, then stop at once. Returns the fastest step after the first.

    With a look-ahead, the seconds of a step are the mean over those whose answers were not begun before the first step.
    """
    command = [sys.executable, "-W", "ignore", "-m", "fivefold", "train", str(folder / "recipe.yaml")]
    metrics = folder / "runs/grpo-step/trial/metrics.jsonl"
    deadline = time.monotonic() + args.limit
    run = subprocess.Popen(command, stdout=sys.stderr)
    while run.poll() is None and time.monotonic() < deadline and len(logged(metrics)) < args.steps:
        time.sleep(1)
    while run.poll() is None:
        run.send_signal(signal.SIGINT)  # the second one stops at once, without a last save
        time.sleep(2)
    if args.keep:
        subprocess.run(["cp", "-r", str(folder / "runs"), str(args.keep)], check=True)
    rows = logged(metrics)
    if len(rows) < min(2, args.steps):
        raise SystemExit(f"the run ended after {len(rows)} steps with code {run.returncode}: see its output above")
    settled = rows[age + 1 :] if age else []
    best = min(rows[1:] or rows, key=lambda row: row["seconds/step"])
    seconds = {key.partition("/")[2]: round(value, 2) for key, value in best.items() if key.startswith("seconds/")}
    more = ["peak_memory_gb/max", "train/tflops_per_device", "tokens_per_second"]
    more += ["rollout_mismatch", "rollout_mismatch_kl", "replay/share", "replay/differs"]
    more += ["episode/turns/mean", "response_length/mean", "prefix_cache_hits"]
    return {
        "steps_s": [round(row["seconds/step"], 2) for row in rows],
        "step_s": round(fmean(row["seconds/step"] for row in settled or [best]), 2),
        "seconds": seconds,
        **{key: round(best[key], 6) for key in more if key in best},
    }


def logged(metrics: Path) -> list[dict[str, Any]]:
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def measure_engine(args: argparse.Namespace, folder: Path, recipe: TrainRecipe, *options: str) -> float:
    """Return the seconds of the slowest replica for its share of the first step's prompts."""
    layout = parse_backend(recipe.rollout.backend)
    if not layout.is_server or layout.pp > 1:
        raise SystemExit(
            f"rollout.backend={recipe.rollout.backend}: the bare engines are vLLM and SGLang without pipeline stages, "
            "so measure --parts step update"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(layout.world_size)))).split(",")
    python = recipe.rollout.server_python or sys.executable
    prompts = folder / "engine.jsonl"
    prompts.write_text("".join((folder / "prompts.jsonl").read_text().splitlines(keepends=True)[: args.prompts]))
    # What SGLang needs to start is the same with and without a server.
    further = recipe.rollout.server_args if layout.backend == "sglang" else []
    replicas = []
    for replica in range(layout.dp):
        devices = visible[replica * layout.tp : (replica + 1) * layout.tp]
        command = [
            *(
                python,
                str(HERE / f"bare_{layout.backend}.py"),
                "--model",
                str(folder / "model"),
                "--prompts",
                str(prompts),
            ),
            *("--share", f"{replica}/{layout.dp}", "--samples", str(recipe.gconfig.n_samples)),
            *("--new-tokens", str(args.new_tokens), "--batch", str(recipe.rollout.max_batch_size)),
            *("--tensor-parallel", str(layout.tp), *options, *further),
        ]
        # The model runner that the servers have.
        env = {"VLLM_USE_V2_MODEL_RUNNER": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        replicas.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    lines = [replica.communicate()[0].splitlines() for replica in replicas]
    # The engines write to the same stream.
    results = [json.loads(line) for out in lines for line in out if line.startswith('{"share"')]
    if len(results) < layout.dp:
        raise SystemExit(f"{layout.dp - len(results)} of {layout.dp} bare engines failed: see the output above")
    print(json.dumps(results), flush=True)
    return float(max(min(result["seconds"]) for result in results))


def measure_update(args: argparse.Namespace, folder: Path, recipe: TrainRecipe) -> dict[str, Any]:
    """Return what `actor_update.py` prints for as many sequences of the same length."""
    ranks = parse_backend(recipe.actor.backend).world_size
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *(str(HERE / "actor_update.py"), "--recipe", str(folder / "recipe.yaml"), "--steps", "3"),
        *("--sequence", str(args.prompt_tokens + args.new_tokens)),
        *("--sequences", str(args.prompts * recipe.gconfig.n_samples)),
    ]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    row: dict[str, Any] = json.loads(out.splitlines()[-1])
    return row


if __name__ == "__main__":
    main()
