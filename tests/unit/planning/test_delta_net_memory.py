"""The memory of a gated delta net against its passes on the CPU, where every storage is counted while it is alive."""

from __future__ import annotations

import pytest
import torch

from fivefold.engine.delta_net import DeltaWeights, mix_tokens
from fivefold.engine.kernels import delta_rule
from fivefold.families.delta_net import DeltaNet
from fivefold.layout.parser import parse_backend
from fivefold.planning import activations
from fivefold.planning.activations import delta_net_bytes
from fivefold.planning.workload import Workload
from tests.unit.planning.live_bytes import LiveBytes


class Alone:
    """The group of a process without others."""

    def size(self) -> int:
        return 1


@pytest.mark.parametrize(
    "sizes",
    [DeltaNet(4, 8, 64, 64, 4, is_grouped=True), DeltaNet(4, 12, 32, 96, 4, is_grouped=True)],
    ids=["shared keys", "wide values"],
)
def test_saved_bytes_and_the_peak_of_the_backward_pass_are_the_planned_ones(sizes: DeltaNet) -> None:
    tokens = 1024
    projected = torch.randn(tokens, sizes.input_width, dtype=torch.bfloat16).requires_grad_()
    weights = DeltaWeights(
        torch.randn(sizes.convolved_width, 1, sizes.kernel, dtype=torch.bfloat16).requires_grad_(),
        torch.randn(sizes.n_value_heads, dtype=torch.bfloat16).requires_grad_(),
        torch.randn(sizes.n_value_heads, dtype=torch.bfloat16).requires_grad_(),
        torch.randn(sizes.value_dim, dtype=torch.bfloat16).requires_grad_(),
    )
    spans = (tokens // 2, tokens // 2)
    with LiveBytes(projected, *vars(weights).values()) as live:
        output = mix_tokens(projected, weights, sizes, spans, 1e-6, Alone())  # type: ignore[arg-type]
        saved = live.now
        gradient = torch.ones_like(output)
        before, live.most = live.now, 0
        torch.autograd.backward(output, gradient)
        peak = live.most - before
    planned, temporary = delta_net_bytes(sizes, parse_backend("megatron:d1"), Workload(tokens, 1, tokens), tokens)
    assert saved == pytest.approx(planned, rel=0.05)
    assert peak == pytest.approx(temporary, rel=0.05)


def test_chunks_are_as_long_as_planned() -> None:
    assert activations.CHUNK == delta_rule.CHUNK
