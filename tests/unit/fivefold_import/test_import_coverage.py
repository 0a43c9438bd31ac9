"""The count of example files agrees with the reports of their imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CLEAN = """\
actor: {path: Qwen/Qwen3-0.6B, backend: "megatron:d8"}
train_dataset: {path: openai/gsm8k, batch_size: 8}
rollout: {backend: "vllm:d8"}
"""


def test_files_are_counted_by_outcome_and_keys_by_reason(tmp_path: Path) -> None:
    examples = tmp_path / "examples"
    (examples / "more").mkdir(parents=True)
    (examples / "clean.yaml").write_text(CLEAN)
    (examples / "more" / "fp8.yaml").write_text(
        CLEAN.replace('"megatron:d8"}', '"megatron:d8", megatron: {fp8_config: {mode: hybrid, param: true}}}')
    )
    (examples / "fsdp.yaml").write_text(CLEAN.replace("megatron", "fsdp") + "no_such_key: 3\n")
    (examples / "refused.sh").write_text("echo nothing is launched here\n")
    rows = tmp_path / "rows.jsonl"
    words = [str(examples), "--from", "areal", "--files", "--json", str(rows)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "import_coverage.py"), *words],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2:4] == ["| 4 | 1 | 2 | 0 | 1 |", "| 2 on Megatron-Core | 1 | 1 | 0 | 0 |"]
    reasons = [line for line in lines if line.endswith("training runs in bfloat16 or float32 |")]
    assert reasons == ["| 1 | 1 | 2 | 1 | training runs in bfloat16 or float32 |"]
    assert "more/fp8.yaml: unsupported megatron:d8" in lines
    found = {row["file"]: row["outcome"] for row in map(json.loads, rows.read_text().splitlines())}
    assert found == {
        "clean.yaml": "clean",
        "fsdp.yaml": "unsupported",
        "more/fp8.yaml": "unsupported",
        "refused.sh": "refused",
    }
