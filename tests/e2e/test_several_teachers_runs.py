"""GKD with two teachers: a share of the loss is the divergence on given answers, and the student comes nearer to both.

The prompts of one source have both teachers, and those of the other have one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Fivefold

N_STEPS = 8
TRAINED = {"path": "package:tiny-moe-trained", "backend": "megatron:d1", "dtype": "float32"}
TEACHERS = {"all": TRAINED, "some": {**TRAINED, "path": "package:tiny-moe", "data_sources": ["easy"], "weight": 0.25}}


@pytest.fixture(scope="module")
def metrics(fivefold: Fivefold, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("runs")
    sums = [(a, b) for a in range(10, 90) for b in (3, 47)]
    prompts = [
        {
            "prompt": f"{a}+{b}=",
            "reward_model": {"ground_truth": str(a + b)},
            "data_source": "easy" if b < 10 else "hard",
        }
        for a, b in sums
    ]
    answers = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in sums]
    for name, rows in {"prompts": prompts, "answers": answers}.items():
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    expert = {"path": str(root / "answers.jsonl"), "batch_size": 8, "weight": 0.5, "signal": "teacher"}
    result = fivefold(
        "train", str(ROOT / "recipes" / "quickstart-distill.yaml"), f"total_train_steps={N_STEPS}",
        f"cluster.fileroot={root}", f"train_dataset.path={root}/prompts.jsonl", "valid_dataset=null", "teacher=null",
        f"teachers={json.dumps(TEACHERS)}", f"expert_dataset={json.dumps(expert)}",
        "actor.distill={coeff: 1.0, over: top_k, top_k: 8, direction: jsd, teacher_share: 0.3}", "gconfig.n_samples=2",
        "actor.optimizer.lr=1.0e-3",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    file = root / "quickstart-distill" / "trial-0" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_student_comes_nearer_to_its_teachers_on_its_own_answers_and_on_given_ones(
    metrics: list[dict[str, Any]],
) -> None:
    for name in ("teacher_kl", "imitation_teacher_kl"):
        values = [row[name] for row in metrics]
        assert min(values) > 0
        assert sum(values[-3:]) < 0.7 * sum(values[:3])


def test_each_teacher_works_on_its_rows_and_its_time_is_counted(metrics: list[dict[str, Any]]) -> None:
    for row in metrics:
        assert row["teacher_rows/all"] == 1.0
        assert 0 < row["teacher_rows/some"] < 1
        assert row["seconds/teachers"] > 0
        assert row["seconds/taught examples"] > 0
    assert sum(row["teacher_rows/some"] for row in metrics) / N_STEPS == pytest.approx(0.5, abs=0.2)
