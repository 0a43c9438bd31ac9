"""Snapshots of state on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fivefold.bridge.pieces import Piece
from fivefold.engine.state.dcp_files import finish
from fivefold.engine.state.state_store import StateWriter, StoredRange
from fivefold.engine.state.stored_state import StoredState

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_state_on_a_gpu_is_copied_through_page_locked_memory(tmp_path: Path) -> None:
    shape = (1001, 4096)
    piece = Piece("w", shape, (0, 0), shape, 0)
    writer = StateWriter(0, [StoredRange("param", 0, 1001 * 4096, (piece,))])
    for number in range(2):
        tensor = torch.randn(shape, device="cuda")
        wanted = tensor.cpu()
        snapshot = writer.snapshot(tmp_path / str(number), [tensor], {})
        tensor.zero_()
        assert all(host.is_pinned() for host in writer._hosts)
        finish(tmp_path / str(number), [snapshot.write()])
        target = torch.zeros(shape, device="cuda")
        StoredState(tmp_path / str(number)).fill([(piece, target)])
        assert target.cpu().equal(wanted)
