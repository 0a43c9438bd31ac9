"""When fla-core computes the gated delta rule, and what it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from packaging.version import Version

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine import delta_net
from fivefold.engine.delta_net import DeltaWeights, mix_tokens
from fivefold.engine.kernels import fla_delta_rule
from fivefold.engine.kernels.fla_delta_rule import computes, fla_gated_delta_rule
from fivefold.families import fla_core
from fivefold.families.delta_net import DeltaNet
from fivefold.families.fla_core import obstacle
from fivefold.families.read import SHAPES, load_shape
from fivefold.run.setup import Groundwork
from tests.unit.engine.recurrence import check_delta_rule, recurrence

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
PUBLISHED = (128, 128)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in for fla-core's function, as its docstring describes it, token by token."""

    def chunk_gated_delta_rule(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, *,
        use_qk_l2norm_in_kernel: bool = False, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        assert use_qk_l2norm_in_kernel, "the recurrence below has queries and keys of length 1"
        assert cu_seqlens.dtype == torch.int64
        assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
        assert {len(each) for each in (q, k, v, g, beta)} == {1}
        return recurrence(q[0], k[0], v[0], g[0], beta[0], cu_seqlens.diff().tolist())[None], None

    module: Any = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    fla_delta_rule._package.cache_clear()
    yield
    fla_delta_rule._package.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Versions of fla-core and Triton that are installed; a test may change them."""
    versions = {"fla-core": "0.6.0", "triton": "3.7.1"}
    monkeypatch.setattr(fla_core, "_installed", lambda name: Version(versions[name]) if name in versions else None)
    fla_core.missing.cache_clear()
    yield versions
    fla_core.missing.cache_clear()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("per_head", [1, 3])
def test_the_package_gets_packed_sequences_as_one_row(per_head: int) -> None:
    check_delta_rule(per_head, "cpu", fla_gated_delta_rule)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("dtype", "widths", "deterministic", "wanted"),
    [
        ("bfloat16", PUBLISHED, False, None),
        ("float32", PUBLISHED, False, "is for bfloat16 models"),
        ("bfloat16", (64, 32), False, "heads of 128 and 128 channels, not 64 and 32"),
        ("bfloat16", PUBLISHED, True, "does not promise the same bits"),
    ],
)
def test_only_what_was_compared_with_the_recurrence_is_computed(
    dtype: str, widths: tuple[int, int], deterministic: bool, wanted: str | None
) -> None:
    found = obstacle(dtype, widths, deterministic=deterministic)
    assert found is None if wanted is None else wanted in str(found)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"fla-core": None}, r"pip install -U 'fivefold\[delta\]'"),
        ({"fla-core": "0.5.9"}, r"brings fla-core 0\.6\.0"),
        ({"triton": "3.6.0"}, r"from 2\.12\.1 on; here is 3\.6\.0"),
        ({"triton": None}, "here is none"),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(
    changes: dict[str, str | None], wanted: str, installed: dict[str, str]
) -> None:
    for name, version in changes.items():
        del installed[name]
        if version is not None:
            installed[name] = version
    with pytest.raises(ValueError, match=wanted):
        raise ValueError(obstacle("bfloat16", PUBLISHED, deterministic=False))


@pytest.mark.usefixtures("installed")
def test_tensors_on_the_cpu_are_left_to_torch() -> None:
    assert not computes(*(torch.zeros(1, 2, 128, dtype=torch.bfloat16) for _ in range(2)))


@pytest.mark.usefixtures("package")
def test_a_layer_has_the_same_output_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = DeltaNet(n_key_heads=2, n_value_heads=4, key_dim=8, value_dim=6, kernel=4, is_grouped=True)
    torch.manual_seed(0)
    projected = torch.randn(50, sizes.input_width)
    weights = DeltaWeights(torch.randn(sizes.convolved_width, 1, 4), torch.randn(4), torch.randn(4), torch.randn(6))
    alone = cast(Any, SimpleNamespace(size=lambda: 1))
    in_torch = mix_tokens(projected, weights, sizes, (20, 30), 1e-6, alone)
    asked: list[int] = []
    monkeypatch.setattr(delta_net, "computes", lambda key, value: not asked.append(len(key)))
    torch.testing.assert_close(mix_tokens(projected, weights, sizes, (20, 30), 1e-6, alone), in_torch)
    assert asked == [50]


@pytest.mark.parametrize(
    ("keys", "is_cpu", "wanted"),
    [
        (["actor.dtype=bfloat16"], False, {"delta nets": "fla-core 0.6.0"}),
        (["actor.dtype=float32"], False, {"delta nets": "plain PyTorch: fla-core is for bfloat16 models"}),
        (["actor.dtype=bfloat16"], True, {}),
    ],
)
@pytest.mark.usefixtures("installed")
def test_the_banner_says_what_computes(keys: list[str], is_cpu: bool, wanted: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((SHAPES / "Qwen3-Next-80B-A3B.json").read_text())
    placement, tokenizer = cast(Any, SimpleNamespace(is_cpu=is_cpu)), cast(Any, None)
    ground = Groundwork("a-model", load_shape(tmp_path), placement, tokenizer, {})
    assert ground.kernels(load_recipe(QUICKSTART, keys, TrainRecipe)) == wanted


def test_the_banner_of_other_models_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((SHAPES / "Qwen3-30B-A3B.json").read_text())
    placement, tokenizer = cast(Any, SimpleNamespace(is_cpu=False)), cast(Any, None)
    ground = Groundwork("a-model", load_shape(tmp_path), placement, tokenizer, {})
    assert not ground.kernels(load_recipe(QUICKSTART, ["actor.dtype=bfloat16"], TrainRecipe))
