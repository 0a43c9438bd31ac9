"""All supported releases of Megatron-Core train to the same numbers, which were recorded with 0.16.1.

The auxiliary losses are in them, because releases weight the z-loss differently where ranks share a micro-batch.
"""

from __future__ import annotations

from pathlib import Path

import megatron_cases
import pytest
from megatron_cases import Case
from ragged import uneven_batch
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import MicroBatchConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from tests.rows import long

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, beta2=0.99, gradient_clipping=0.5)
BALANCED = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05}
WHOLE, HALVES = "whole micro-batches", "halves of sequences"
LAYOUTS = {
    "megatron:d1": WHOLE,
    "megatron:(attn:t2|ffn:e2)": WHOLE,
    "megatron:p2v2": WHOLE,
    # Twice as many tokens are in a micro-batch, over which the load is balanced.
    "megatron:c2e2": HALVES,
}
RECORDED = {
    ("qwen3_moe", WHOLE): ((4.9841417, 4.632553), (4.3954155, 3.323038), (3.8598817, 2.448578)),
    ("qwen3_moe", HALVES): ((4.9841417, 4.596851), (4.3932698, 3.347215), (3.8955233, 2.909930)),
    ("deepseek_v3", WHOLE): ((5.3774771, 5.381392), (4.3681431, 4.643867), (3.6855508, 3.137491)),
    ("deepseek_v3", HALVES): ((5.3774774, 5.400799), (4.3696339, 4.439774), (3.6924791, 3.238197)),
}
"""Loss and norm of the gradient of each of three steps."""


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[1:3], *long("megatron:d1", "megatron:c2e2")])
@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_losses_and_gradient_norms_are_those_of_every_release(
    workers: Workers, models: Path, model: str, layout: str
) -> None:
    # Auxiliary losses are of micro-batches.
    micro_batches = MicroBatchConfig(max_tokens_per_mb=50)
    case = Case(layout, MegatronConfig(transformer=BALANCED), micro_batches=micro_batches)
    arguments = (models / model, uneven_batch(), SFTLoss(), OPTIMIZER, 3)
    run = workers(case.world_size).run(megatron_cases.train, case, *arguments)[0]
    losses, norms = zip(*RECORDED[model, LAYOUTS[layout]], strict=True)
    assert [step.loss for step in run.steps] == pytest.approx(losses, rel=1e-6)
    assert [step.grad_norm for step in run.steps] == pytest.approx(norms, rel=1e-5)
