"""Runs that train low-rank adapters in place of the weights, or only some of the weights."""

from __future__ import annotations

import json
import math
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import ROOT, Fivefold, cut_back
from tests.rows import long

RUN = Path("quickstart/trial-0")
TINY_MOE = ROOT / "fivefold" / "models" / "tiny-moe"
LORA = ("actor.lora.rank=4", "actor.lora.rank_of_experts=2", "actor.lora.alpha=8", "actor.optimizer.lr=1e-3")
ADAPTERS = (*LORA, "actor.lora.use_rslora=true", "actor.kl_ctl=0.01")
TRAIN = (
    "train", str(ROOT / "recipes" / "quickstart.yaml"), "actor.ppo_n_minibatches=1", "train_dataset.batch_size=8",
    "valid_dataset=null", "recover.freq_steps=1",
)  # fmt: skip


def run(fivefold: Fivefold, folder: Path, n_steps: int, *keys: str, says: str) -> list[dict[str, float]]:
    """Train up to a step, from a checkpoint if there is one; return the metrics of all steps."""
    result = fivefold(*TRAIN, f"cluster.fileroot={folder}", f"total_train_steps={n_steps}", *keys)
    assert result.returncode == 0, result.stderr + result.stdout
    assert says in result.stdout
    return [json.loads(line) for line in (folder / RUN / "metrics.jsonl").read_text().splitlines()]


def changed(folder: Path) -> set[str]:
    """Return the weights of a run that differ from those that it began with."""
    before, after = (load_file(model / "model.safetensors") for model in (TINY_MOE, folder / "weights"))
    assert before.keys() == after.keys()
    return {name for name in before if not (before[name].float() == after[name].float()).all()}


SAYS_ADAPTED = "rank 4, 2 of each expert"


@pytest.fixture(scope="module")
def adapted(fivefold: Fivefold, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """The folder of a run of adapters against the model without them, and its metrics."""
    folder = tmp_path_factory.mktemp("adapted")
    return folder, run(fivefold, folder, 2, *ADAPTERS, says=SAYS_ADAPTED)


def test_the_reference_is_the_model_without_its_adapters(adapted: tuple[Path, list[dict[str, float]]]) -> None:
    root, whole = adapted
    assert whole[0]["kl_ref"] == 0.0, "new adapters change nothing, and the reference has none"
    assert whole[1]["kl_ref"] > 0.0
    folder = root / RUN / "weights"
    adapters = load_file(folder / "adapter/adapter_model.safetensors")
    adapts = {name.removeprefix("base_model.model.").replace(".lora_A", "") for name in adapters if "lora_A" in name}
    assert changed(root / RUN) == adapts
    assert json.loads((folder / "adapter/adapter_config.json").read_text())["use_rslora"] is True


@pytest.mark.long
def test_a_run_of_adapters_resumes_with_the_same_bits(
    adapted: tuple[Path, list[dict[str, float]]], fivefold: Fivefold
) -> None:
    folder, whole = adapted
    cut_back(folder / RUN, 1)
    resumed = run(fivefold, folder, 2, *ADAPTERS, says=SAYS_ADAPTED)
    assert resumed[1]["kl_ref"] == whole[1]["kl_ref"]


@pytest.mark.parametrize("keys", [(), *long((("rollout.max_head_offpolicyness=1",),))], ids=["in turn", "ahead"])
def test_a_rollout_that_gets_adapters_alone_samples_with_the_actors_weights(
    keys: tuple[str, ...], fivefold: Fivefold, tmp_path: Path
) -> None:
    alone = (*LORA, "actor.lora.dropout=0.1", "rollout.weight_transport=adapter")
    rows = run(fivefold, tmp_path, 3, *alone, *keys, says="adapters alone, through host memory")
    assert len(rows) == 3
    assert all(row.get("staleness/max", 0) <= len(keys) for row in rows)
    on_policy = [row for row in rows if row.get("staleness/max", 0) == 0]
    assert len(on_policy) == (1 if keys else 3)
    assert all(row["rollout_mismatch"] < 1e-5 for row in on_policy), "in float32, what is left is rounding"


@pytest.mark.parametrize("keys", [("actor.lora.experts=none", "actor.lora.targets=[q_proj, v_proj]")])
def test_preferences_train_adapters_against_the_model_without_them(
    keys: tuple[str, ...], fivefold: Fivefold, tmp_path: Path
) -> None:
    result = fivefold(
        "dpo", str(ROOT / "recipes" / "quickstart-dpo.yaml"), "actor.lora.rank=4", *keys, "actor.optimizer.lr=1e-2",
        "total_train_steps=3", "train_dataset.batch_size=8", "valid_dataset=null", f"cluster.fileroot={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    [file] = tmp_path.glob("*/*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(math.log(2)), "the policy is its own reference"
    assert rows[0]["grad_norm"] > 0.0
    assert all(abs(row["loss"] - math.log(2)) > 1e-4 for row in rows[1:])


FROZEN = ("model.embed_tokens.weight", "*.mlp.gate.weight", "model.layers.0.*")
FREEZE = (f"actor.freeze=[{', '.join(json.dumps(pattern) for pattern in FROZEN)}]", "actor.optimizer.lr=1e-3")


ON_EITHER_ENGINE = pytest.mark.parametrize(
    "keys",
    [("actor.backend=megatron:d1", "actor.megatron.recompute=full"), *long((("actor.backend=fsdp:d1",),))],
    ids=["megatron", "fsdp"],
)


def freeze(fivefold: Fivefold, folder: Path, *keys: str) -> list[dict[str, float]]:
    return run(fivefold, folder, 2, *FREEZE, *keys, "rollout.backend=transformers:d1", says="frozen")


@ON_EITHER_ENGINE
def test_frozen_weights_stay_and_the_others_learn(keys: tuple[str, ...], fivefold: Fivefold, tmp_path: Path) -> None:
    assert all(row["grad_norm"] > 0 for row in freeze(fivefold, tmp_path, *keys))
    names = load_file(TINY_MOE / "model.safetensors").keys()
    frozen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in FROZEN)}
    assert 0 < len(frozen) < len(names)
    assert changed(tmp_path / RUN) == names - frozen


@pytest.mark.long
@ON_EITHER_ENGINE
def test_a_run_with_frozen_weights_resumes_with_the_same_bits(
    keys: tuple[str, ...], fivefold: Fivefold, tmp_path: Path
) -> None:
    whole = freeze(fivefold, tmp_path, *keys)
    cut_back(tmp_path / RUN, 1)
    assert freeze(fivefold, tmp_path, *keys)[1]["grad_norm"] == whole[1]["grad_norm"]
