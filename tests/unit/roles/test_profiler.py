"""What a process computes is written as a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from fivefold.roles.profiler import Recording


def test_a_recording_is_a_trace_of_what_was_computed_meanwhile(tmp_path: Path) -> None:
    torch.ones(8).cos()
    recording = Recording(memory=True)
    torch.ones(8, 8) @ torch.ones(8, 8)
    recording.write(tmp_path / "step-000003" / "rank-0")
    torch.ones(8).sin()
    text = gzip.decompress((tmp_path / "step-000003" / "rank-0.trace.json.gz").read_bytes())
    names = {event["name"] for event in json.loads(text)["traceEvents"]}
    assert "aten::mm" in names
    assert not names & {"aten::cos", "aten::sin"}
