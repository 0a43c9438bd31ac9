"""`fivefold checkpoints`: its table, its messages, its exit codes, and the model that it exports."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Glm4MoeConfig
from typer.testing import CliRunner, Result

from fivefold.bridge.decoder import expected_tensors
from fivefold.bridge.pieces import Piece
from fivefold.checkpoints.fingerprints import config_fingerprint
from fivefold.checkpoints.manifest import FileEntry, Manifest
from fivefold.checkpoints.run_state import MetricHistory
from fivefold.checkpoints.store import CheckpointStore
from fivefold.cli.main import app
from fivefold.config.load import load_recipe, resolved_yaml
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.state.dcp_files import finish
from fivefold.engine.state.state_store import StateWriter, StoredRange
from fivefold.families.read import load_shape
from tests.e2e.documents import DOCS, indented_commands
from tests.unit.checkpoints.examples import manifest_of, run_state, save

MODEL = Path(__file__).parents[3] / "fivefold/models/tiny-moe"


def invoke(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["checkpoints", *map(str, args)], env={"COLUMNS": "80"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints; the first is the best."""
    store = CheckpointStore(tmp_path / "trial-0/checkpoints")
    history = MetricHistory("eval/accuracy", {10: 0.75, 20: 0.5})
    for step in (10, 20, 1000):
        save(store, step, state=run_state(step, kept_metric=history))
    store.begin(1001)
    return tmp_path / "trial-0"


def test_the_table_lists_whole_checkpoints_in_80_columns(run: Path) -> None:
    result = invoke(run)
    assert result.exit_code == 0, result.output
    header, *rows = result.stdout.splitlines()
    assert header.split() == ["step", "saved", "size", "files", "state", "eval/accuracy"]
    assert [row.split()[0] for row in rows] == ["10", "20", "1000"]
    assert rows[0].split()[4:] == [rows[1].split()[4], "4", "whole", "0.75", "best"]
    assert rows[1].split()[-2:] == ["whole", "0.5"]
    assert rows[2].split()[-1] == "whole"
    assert max(map(len, [header, *rows])) <= 80
    assert len({row.index("whole") for row in rows}) == 1
    assert invoke(run / "checkpoints").stdout == result.stdout
    assert [line.split()[0] for line in invoke(run / "checkpoints/step-000020").stdout.splitlines()] == ["step", "20"]


def test_a_verification_names_the_damaged_file_and_exits_with_1(run: Path) -> None:
    assert "checksums of all 12 files agree" in invoke(run, "--verify").stdout
    file = run / "checkpoints/step-000020/trainer/__0_0.distcp"
    file.write_bytes(b"x" * file.stat().st_size)
    assert invoke(run).exit_code == 0
    result = invoke(run, "--verify")
    assert result.exit_code == 1
    assert f"- {file} is damaged" in result.stderr
    assert [line.split()[6] for line in result.stdout.splitlines()[1:]] == ["whole", "damaged", "whole"]
    (run / "checkpoints/step-001000/manifest.json").write_text("{")
    result = invoke(run)
    assert result.exit_code == 1
    assert "step-001000/manifest.json is damaged" in result.stderr


def test_pruning_keeps_the_newest_and_the_best(run: Path) -> None:
    assert invoke(run, "--prune", "1").stdout == "Deleted step 20; kept steps 10, 1000.\n"
    assert [each.step for each in CheckpointStore(run / "checkpoints").all()] == [10, 1000]
    assert invoke(run, "--prune", "1").stdout == "Deleted no step; kept steps 10, 1000.\n"
    assert (run / "checkpoints/step-001001").exists(), "a run may be writing it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist: give the folder of a run"),
        (["{run}/.."], "holds no complete checkpoint; it holds trial-0"),
        (["{run}", "--verify", "--prune", "1"], "give one at a time"),
        (["{run}", "--prune", "0"], "Invalid value for '--prune'"),
        (["{run}", "--out", "x"], "belong to --export"),
        (["{run}", "--export", "best"], "give one with --out"),
        (
            ["{run}", "--export", "7", "-o", "x"],
            "no checkpoint '7': give latest, best, or one of the steps 10, 20, 1000",
        ),
        (["{run}", "--export", "10", "-o", "{run}"], "is not a model folder, so it is not replaced"),
        (["{run}/checkpoints/step-000010", "--prune", "1"], "is a single checkpoint: give the folder of its run"),
    ],
)
def test_wrong_arguments_are_exit_code_2_and_one_message(run: Path, arguments: list[str], message: str) -> None:
    result = invoke(*(argument.format(run=run) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def save_model(
    store: CheckpointStore, recipe: TrainRecipe, weights: dict[str, torch.Tensor], model: Path = MODEL
) -> None:
    """Commit a checkpoint of step 10 with `weights` of `model`, written in two pieces each."""
    folder = store.begin(10)
    (folder / "trainer").mkdir()
    parts = []
    for rank in range(2):
        ranges, tensors = [], []
        for name, weight in weights.items():
            half = weight.shape[0] // 2
            begin, end = (0, half) if rank == 0 else (half, weight.shape[0])
            sizes = (end - begin, *weight.shape[1:])
            piece = Piece(name, tuple(weight.shape), (begin, *[0] * (weight.ndim - 1)), sizes, 0)
            ranges.append(StoredRange("param", 0, piece.n_elements, (piece,)))
            tensors.append(weight[begin:end].contiguous().view(-1))
        parts.append(StateWriter(rank, ranges).snapshot(folder / "trainer", tensors, {}).write())
    finish(folder / "trainer", parts)
    (folder / "recipe.yaml").write_text(resolved_yaml(recipe))
    run_state(10, kept_metric=MetricHistory("eval/accuracy", {10: 0.5})).write(folder)
    files = manifest_of(folder, 10).files
    store.commit(folder, Manifest(10, "2026-05-04T10:00:00+00:00", config_fingerprint(model), files))


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """The weights of a model after some training, in float32."""
    original = load_file(MODEL / "model.safetensors")
    return {name: weight.float() * 1.001 for name, weight in original.items()}


def run_of(model: Path, weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """Return the folder of a run of `model` with a checkpoint of `weights`."""
    file = folder / "recipe.yaml"
    file.write_text(f"experiment_name: e\nactor: {{path: {model}}}\ntrain_dataset: {{path: d}}\n")
    save_model(CheckpointStore(folder / "run/checkpoints"), load_recipe(file, [], TrainRecipe), weights, model)
    return folder / "run"


@pytest.fixture
def trained(tmp_path: Path, weights: dict[str, torch.Tensor]) -> Path:
    """A run of the model that ships."""
    shutil.copytree(MODEL, tmp_path / "model")
    return run_of(tmp_path / "model", weights, tmp_path)


def test_an_exported_model_is_that_of_the_checkpoint(
    trained: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    for arguments, dtype in (([], torch.bfloat16), (["--dtype", "float32", "--overwrite"], torch.float32)):
        result = invoke(trained, "--export", "latest", "-o", tmp_path / "out", *arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith(f"{tmp_path}/out: qwen3_moe, ")
        assert result.stdout.endswith("of step 10\n")
        written = load_file(tmp_path / "out/model.safetensors")
        assert written.keys() == weights.keys()
        for name, weight in weights.items():
            assert written[name].dtype == dtype
            assert torch.equal(written[name], weight.to(dtype)), name
        assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "qwen3_moe"
        assert (tmp_path / "out/tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    assert "exists: pass --overwrite" in invoke(trained, "--export", "10", "-o", tmp_path / "out").stderr


def test_offsets_of_routers_are_exported_in_float32(tmp_path: Path) -> None:
    model = tmp_path / "model"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
    Glm4MoeConfig(vocab_size=32, **sizes, **heads, **layers).save_pretrained(model)
    weights = {name: torch.randn(shape) for name, shape in expected_tensors(load_shape(model)).items()}
    assert invoke(run_of(model, weights, tmp_path), "--export", "10", "-o", tmp_path / "out").exit_code == 0
    written = load_file(tmp_path / "out/model.safetensors")
    offsets = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(written.pop(offsets), weights[offsets])
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_the_commands_of_the_documents_work(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "runs/quickstart/trial-0"
    place.parent.mkdir(parents=True)
    trained.rename(place)
    monkeypatch.chdir(tmp_path)
    shown = [words for _, words in indented_commands(DOCS / "recovery.md") if words[0] == "checkpoints"]
    assert [words[2] if len(words) > 2 else "" for words in shown] == ["", "--verify", "--export", "--prune"]
    for words in shown:
        result = invoke(*words[1:])
        assert result.exit_code == 0, (words, result.output)
    assert (tmp_path / "models/best/model.safetensors").exists()


def test_a_model_is_not_exported_from_a_damaged_checkpoint_or_with_another_config(
    trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = tmp_path / "model/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 0.5}))
    assert f"{config} does not describe the model" in invoke(trained, "--export", "10", "-o", out).stderr
    shutil.rmtree(tmp_path / "model")
    result = invoke(trained, "--export", "10", "-o", out)
    assert result.exit_code == 2
    assert "name a folder that has them with --model" in result.stderr
    assert invoke(trained, "--export", "10", "-o", out, "--model", "package:tiny-moe").exit_code == 0
    shutil.rmtree(out)
    file = next((trained / "checkpoints/step-000010/trainer").glob("__1_*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    result = invoke(trained, "--export", "10", "-o", out, "--model", "package:tiny-moe")
    assert f"{file} is damaged" in result.stderr
    assert (result.exit_code, out.exists()) == (2, False)


def test_the_best_needs_a_metric_that_was_kept(trained: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "plain/checkpoints")
    save(store, 1, state=run_state(1, kept_metric=None))
    result = invoke(tmp_path / "plain", "--export", "best", "-o", tmp_path / "out")
    assert "kept no metric (recover.keep_best): give latest or one of the steps 1" in result.stderr


def test_a_file_entry_is_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    # The digest of no bytes, as the algorithm's own test vectors have it.
    assert FileEntry.of(tmp_path / "x") == FileEntry(0, "99aa06d3014798d86001c324468d497f")
