"""Log-probs and gradients of drawn models on drawn layouts equal those of Hugging Face's model.

FIVEFOLD_DRAWN=100:140 python -m pytest tests/layouts/test_drawn_models.py -m long     (other seeds)
"""

from __future__ import annotations

import os
from pathlib import Path

import drawn_models
import hf_reference
import megatron_cases
import pytest
from cases import case_of
from compare import assert_close
from drawn_models import FAMILIES, drawn
from ragged import uneven_batch
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from tests.rows import long

TOLERANCE = 2e-4
FIRST, END = map(int, os.environ.get("FIVEFOLD_DRAWN", "0:2").split(":"))
CASES = [("gpt_oss", 0), *long(*((family, seed) for family in FAMILIES for seed in range(FIRST, END)))]


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_drawn_models_predict_and_learn_as_hugging_faces(
    workers: Workers, tmp_path: Path, family: str, seed: int
) -> None:
    model, batch = drawn(family, seed), uneven_batch(seed)
    alone, case = workers(1), case_of(model.layout)
    alone.run(drawn_models.save_drawn, model, tmp_path / "model")
    ((want_T, _),) = alone.run(hf_reference.logprobs_and_entropies, tmp_path / "model", batch, 1.0)
    ((want_loss, want),) = alone.run(hf_reference.gradients, tmp_path / "model", batch, SFTLoss(), tmp_path / "scratch")
    results = workers(case.world_size).run(megatron_cases.gradients, case, tmp_path / "model", batch, SFTLoss())
    for result in results:
        gap_T = (result.logprobs_T - want_T * batch.mask_T).abs()
        assert (gap_T <= TOLERANCE * (1 + want_T.abs())).all(), (model, gap_T.max())
        assert result.loss == pytest.approx(want_loss, rel=TOLERANCE), model
    assert_close(results[0].gradients, want, 10 * TOLERANCE)
