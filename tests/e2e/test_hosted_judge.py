"""Runs that host the model that judges: scores are the model's own answers, whoever has its devices otherwise."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivefold.config.schema.rollout import GenerationConfig
from fivefold.generate import generate
from fivefold.rewards.judge import Sampling
from fivefold.roles.judge import sampling_of
from fivefold.rollout.contract import complete
from fivefold.rollout.protocol import GenerationRequest, question_seed
from fivefold.rollout.tokenizer import decoded, load_tokenizer
from fivefold.rollout.transformers_engine import TransformersEngine
from tests.e2e.conftest import ROOT, Fivefold, cut_back, is_timed
from tests.rows import long

TOOLS = ROOT / "fivefold" / "models" / "tiny-moe-tools"
TEMPLATE, PATTERN, MAX_TOKENS, SEED = "How much is {response}?", r"(\d)", 24, 7
ASKED = {"template": TEMPLATE, "pattern": PATTERN, "max_tokens": MAX_TOKENS}
FAILED, RETRIES, TEMPERATURE = -0.5, 2, 1.5
REWARDS = {
    "right": {"fn": "exact_match", "weight": 0.1},
    "likely": {"fn": "judge", "kwargs": {**ASKED, "on_failure": FAILED}},
    "drawn": {
        "fn": "judge", "kwargs": {**ASKED, "temperature": TEMPERATURE, "retries": RETRIES, "on_failure": FAILED},
    },
}  # fmt: skip
JUDGE = {"path": str(TOOLS), "dtype": "float32", "max_length": 256}
TRAIN = (
    "train", str(ROOT / "recipes" / "quickstart.yaml"), f"seed={SEED}", "actor.backend=megatron:d1",
    "gconfig={n_samples: 4, max_new_tokens: 5}", "train_dataset.batch_size=4", "stats.n_logged_samples=all",
    "stats.trackers=[]", "recover.freq_steps=1", "recover.max_to_keep=3",
)  # fmt: skip


def reward(judge: dict[str, Any]) -> str:
    return f"reward={json.dumps({'fn': 'math', 'kwargs': {}, 'rewards': REWARDS, 'judge': judge})}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def apart(fivefold: Fivefold, root: Path) -> Path:
    """A run of one step whose judge has two replicas on devices of its own, and judges while others are generated."""
    judge = {**JUDGE, "backend": "transformers:d2"}
    result = fivefold(
        *TRAIN, reward(judge), "valid_dataset=null", "total_train_steps=1", "experiment_name=apart",
        f"cluster.fileroot={root}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    return root / "apart" / "trial-0"


@pytest.fixture(scope="module")
def in_turn_command(root: Path) -> tuple[str, ...]:
    """Rounds of dynamic sampling and evaluations need the rollout again once the judge has had its devices."""
    return (
        *TRAIN, reward({**JUDGE, "colocate": True}), "rollout.colocate=true",
        "gconfig={n_samples: 2, max_new_tokens: 5, temperature: 0.1}", "total_train_steps=3",
        "actor.dynamic_sampling=true", "actor.dynamic_sampling_max_rounds=3", "experiment_name=in-turn",
        "evaluator.freq_steps=1", "evaluator.max_new_tokens=3", f"valid_dataset.path={root / 'held_out.jsonl'}",
        "valid_dataset.prompt_key=prompt", "valid_dataset.answer_key=answer", f"cluster.fileroot={root}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def in_turn(fivefold: Fivefold, root: Path, in_turn_command: tuple[str, ...]) -> Path:
    """A run whose actor, rollout and judge take turns on the same devices."""
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 26)]
    (root / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = fivefold(*in_turn_command)
    assert result.returncode == 0, result.stderr + result.stdout
    return root / "in-turn" / "trial-0"


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def questions(samples: Sequence[dict[str, Any]]) -> list[str]:
    return [TEMPLATE.replace("{response}", sample["response"]) for sample in samples]


def score(answer: str) -> float | None:
    found = re.findall(PATTERN, answer)
    return float(found[-1]) if found else None


def likely_scores(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Return the scores in the answers of `fivefold generate`."""
    config = GenerationConfig(max_new_tokens=MAX_TOKENS, greedy=True, n_samples=1)
    answers = generate(str(TOOLS), questions(samples), config, seed=0, chat=True, dtype="float32", device="cpu")
    return [FAILED if (found := score(answer)) is None else found for (answer,) in answers]


def drawn_scores(samples: Sequence[dict[str, Any]]) -> list[float]:
    """Return the first score in the answers to each question, which the engine draws by the question's seeds."""
    tokenizer = load_tokenizer(str(TOOLS))
    prompts = [
        tuple(
            tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)[
                "input_ids"
            ]
        )
        for question in questions(samples)
    ]
    engine = TransformersEngine.from_path(
        str(TOOLS), dtype="float32", device="cpu", max_batch_size=64, tokenizer_path=None, load_weights=True
    )
    found: list[float | None] = [None] * len(samples)
    for attempt in range(1 + RETRIES):
        asked = [GenerationRequest(ids, question_seed(SEED, ids, attempt)) for ids in prompts]
        answers = decoded(
            tokenizer,
            [c.token_ids for c in complete(engine, asked, sampling_of(Sampling(TEMPERATURE, 1.0, 0, MAX_TOKENS)))],
        )
        found = [score(answer) if earlier is None else earlier for earlier, answer in zip(found, answers, strict=True)]
    return [FAILED if each is None else each for each in found]


@pytest.mark.parametrize("name", ["in_turn", *long("apart")])
def test_scores_are_those_of_the_models_own_answers(name: str, request: pytest.FixtureRequest) -> None:
    run: Path = request.getfixturevalue(name)
    samples = rows(run / "samples.jsonl")
    assert len(samples) == (16 if name == "apart" else 3 * 8)
    likely, drawn = likely_scores(samples), drawn_scores(samples)
    assert [sample["reward/likely"] for sample in samples] == likely
    assert [sample["reward/drawn"] for sample in samples] == drawn
    assert len(set(likely)) > 2
    assert likely != drawn
    for sample, one, other in zip(samples, likely, drawn, strict=True):
        assert sample["reward"] == pytest.approx(0.1 * sample["reward/right"] + one + other)


def test_the_rollout_is_awake_for_further_rounds_and_evaluations(in_turn: Path) -> None:
    written = rows(in_turn / "metrics.jsonl")
    assert max(row["dynamic_sampling/rounds"] for row in written) > 1
    assert all(row["eval/reward"] != 0 for row in written)
    assert all(row["seconds/hand-over"] > 0 for row in written)


@pytest.mark.long
def test_an_interrupted_run_continues_with_the_same_scores(
    in_turn: Path, fivefold: Fivefold, in_turn_command: tuple[str, ...]
) -> None:
    whole = cut_back(in_turn, 1)
    result = fivefold(*in_turn_command)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "continues after step 1" in result.stdout
    for mine, other in zip(rows(in_turn / "metrics.jsonl"), rows(whole / "metrics.jsonl"), strict=True):
        names = [name for name in other if not is_timed(name)]
        assert {name: mine[name] for name in names} == {name: other[name] for name in names}


def test_evaluations_of_a_model_ask_the_judge_too(
    in_turn: Path, fivefold: Fivefold, in_turn_command: tuple[str, ...]
) -> None:
    file = in_turn.parent / "evaluated.jsonl"
    result = fivefold("eval", *in_turn_command[1:], "--samples", str(file))
    assert result.returncode == 0, result.stderr + result.stdout
    samples = rows(file)
    assert [sample["reward/likely"] for sample in samples] == likely_scores(samples)
    before = json.loads((in_turn / "summary.json").read_text())["reward_before"]
    assert json.loads(result.stdout)["reward"] == pytest.approx(before)


def test_a_judge_that_fails_ends_the_run_with_its_name(fivefold: Fivefold, root: Path) -> None:
    broken = Path(shutil.copytree(TOOLS, root / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], 3e38)  # its logits overflow
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    result = fivefold(
        *TRAIN, reward({**JUDGE, "path": str(broken)}), "valid_dataset=null", "total_train_steps=1",
        "experiment_name=broken", f"cluster.fileroot={root}",
    )  # fmt: skip
    assert result.returncode == 1
    assert "judge rank 0 failed in phase 'judge'" in result.stderr
    assert "not finite" in result.stderr
    assert "the reward function" not in result.stderr
