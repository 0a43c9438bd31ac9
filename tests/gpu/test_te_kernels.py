"""Layers of TransformerEngine's modules (`kernels=te`) against the same model in float32, and all bridges on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import EngineConfig, MicroBatchConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.contract import EngineOptions
from fivefold.engine.scores import Logprobs
from fivefold.engine.state.dcp_files import finish
from fivefold.layout.parser import parse_backend
from fivefold.mcore.engine import MegatronEngine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB = 1024
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", BASE),
    "biased": ("Qwen2", {key: value for key, value in BASE.items() if key != "head_dim"}),
    "experts": ("Qwen3Moe", {**BASE, **EXPERTS}),
    "mixed": ("Qwen3Moe", {**BASE, **EXPERTS, "mlp_only_layers": [1]}),
}
LENGTHS = (70, 300, 33, 5, 190, 257)


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import transformers

    made = {}
    for name, (family, options) in MODELS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**options)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Norms whose weights are all one would hide that two of them were exchanged.
                parameter += 0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0
        made[name] = tmp_path_factory.mktemp(name)
        model.bfloat16().save_pretrained(made[name])
    return made


@dataclass(frozen=True)
class Trained:
    logprobs_T: torch.Tensor
    gradients: dict[str, torch.Tensor]
    norm: float
    change: dict[str, torch.Tensor]
    """What one optimizer step added to each weight."""


def engine_of(folder: Path, dtype: str, optimizer: OptimizerConfig | None = None, **megatron: Any) -> MegatronEngine:
    config = EngineConfig(
        path=str(folder),
        dtype=dtype,
        mb_spec=MicroBatchConfig(max_tokens_per_mb=400),
        megatron=MegatronConfig(**megatron),
    )
    return MegatronEngine(
        config, parse_backend("megatron:d1"), EngineOptions(seed=1, optimizer=optimizer, total_steps=10)
    )


def trained(folder: Path, dtype: str = "bfloat16", **megatron: Any) -> Trained:
    engine = engine_of(folder, dtype, OptimizerConfig(lr=1e-2), **megatron)
    ids = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    share = engine.planner.plan(LENGTHS).share(Batch(LENGTHS, ids, torch.ones(sum(LENGTHS))), 0)
    logprobs_T = engine.score(share, Logprobs())["logprobs"]
    before = {name: weight.detach().float().clone() for name, weight in engine.parameters.tensors.items()}
    engine.forward_backward(share, SFTLoss())
    gradients = {each.name: vars(each.tensor)["main_grad"].clone() for each in engine.parameters.with_gradient}
    result = engine.optim_step()
    change = {name: weight.detach().float() - before[name] for name, weight in engine.parameters.tensors.items()}
    return Trained(logprobs_T, gradients, result.grad_norm, change)


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return |got - wanted| / |wanted|."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((name, {}) for name in MODELS),
        ("dense", {"recompute": "full"}),
        ("mixed", {"recompute": "selective", "transformer": {"recompute_modules": ["core_attn", "mlp", "moe_act"]}}),
        ("experts", {"ddp": {"grad_reduce_in_fp32": False}}),
    ],
    ids=str,
)
def test_te_is_as_near_to_float32_as_our_kernels(folders: dict[str, Path], model: str, options: dict[str, Any]) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    folder = folders[model]
    exact, ours, te = (
        trained(folder, "float32"),
        trained(folder, **options),
        trained(folder, kernels="te", **options),
    )
    assert te.gradients.keys() == ours.gradients.keys() == exact.gradients.keys()
    error, limit = distance(te.logprobs_T, exact.logprobs_T), distance(ours.logprobs_T, exact.logprobs_T)
    assert error <= 1.5 * limit + 1e-3
    far = {}
    for name, gradient in exact.gradients.items():
        errors = [distance(run.gradients[name], gradient) for run in (te, ours)]
        if errors[0] > 2 * errors[1] + 0.02:
            far[name] = errors
    assert far == {}
    assert te.norm == pytest.approx(exact.norm, rel=0.05)
    for name, change in ours.change.items():
        # Adam's first step is the sign of the gradient, which rounding turns where it is near 0.
        cosine = torch.nn.functional.cosine_similarity(te.change[name].flatten(), change.flatten(), dim=0)
        assert float(cosine) > 0.9, name


@pytest.mark.parametrize("kernels", ["fivefold", "te"])
@pytest.mark.parametrize("bridge", ["fivefold", "mbridge", "megatron-bridge"])
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_every_bridge_loads_and_exports_the_bits_of_the_files(
    folders: dict[str, Path], model: str, bridge: str, kernels: str
) -> None:
    if kernels == "te":
        pytest.importorskip("transformer_engine.pytorch")
    if bridge != "fivefold":
        pytest.importorskip(bridge.replace("megatron-", "megatron."))
    folder = folders[model]
    files = {name: tensor.cuda() for name, tensor in load_file(folder / "model.safetensors").items()}
    wanted = {
        name: weight.detach().clone() for name, weight in engine_of(folder, "bfloat16").parameters.tensors.items()
    }
    engine = engine_of(folder, "bfloat16", bridge_type=bridge, kernels=kernels)
    assert engine.parameters.tensors.keys() == wanted.keys()
    assert [name for name, weight in engine.parameters.tensors.items() if not torch.equal(weight, wanted[name])] == []
    exported = {name: tensor.clone() for name, tensor in engine.export_weights()}
    assert exported.keys() == files.keys()
    assert [name for name, tensor in files.items() if not torch.equal(tensor, exported[name].cuda())] == []


@pytest.mark.parametrize(("writer", "reader"), [("te", "fivefold"), ("fivefold", "te")])
def test_a_checkpoint_of_one_is_loaded_with_the_other(
    folders: dict[str, Path], tmp_path: Path, writer: str, reader: str
) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    written = engine_of(folders["mixed"], "bfloat16", OptimizerConfig(), kernels=writer)
    for parameter in written.parameters.with_gradient:
        vars(parameter.tensor)["main_grad"].fill_(1.0)
    written.optim_step()
    finish(tmp_path, [written.snapshot(tmp_path, copy=False).write()])
    read = engine_of(folders["mixed"], "bfloat16", OptimizerConfig(), kernels=reader)
    assert any(
        not torch.equal(weight, read.parameters.tensors[name]) for name, weight in written.parameters.tensors.items()
    )
    read.load(tmp_path)
    assert [
        name
        for name, weight in written.parameters.tensors.items()
        if not torch.equal(weight, read.parameters.tensors[name])
    ] == []


@pytest.mark.parametrize("sizes", [(13, 0, 5), (0, 0, 0), (64, 200, 1)], ids=str)
@pytest.mark.parametrize("keeps_sum", [False, True])
def test_every_group_is_multiplied_by_its_own_weight_with_te(sizes: tuple[int, ...], keeps_sum: bool) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    from fivefold.mcore.te_layers import TEGroupedLinear

    torch.manual_seed(0)
    x = torch.randn(sum(sizes), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(len(sizes), 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(sum(sizes), 128, device="cuda", dtype=torch.bfloat16)
    if keeps_sum:
        vars(weight)["main_grad"] = torch.ones(weight.shape, device="cuda")
    out = TEGroupedLinear.apply(x, weight, list(sizes))
    out.backward(grad)
    exact_x, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    exact = torch.cat([rows @ exact_weight[group].t() for group, rows in enumerate(exact_x.split(list(sizes)))])
    exact.backward(grad.double())
    got = vars(weight)["main_grad"] - 1 if keeps_sum else weight.grad
    for value, wanted in ((out, exact), (x.grad, exact_x.grad), (got, exact_weight.grad)):
        torch.testing.assert_close(value.double(), wanted, rtol=0.02, atol=0.05)
