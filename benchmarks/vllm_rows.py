"""Milliseconds that vLLM's engine and its API server spend on the outputs of a step, with log-probs of sampled tokens.

    python benchmarks/vllm_rows.py --sequences 512 --steps 256

Three ways: without log-probs, with vLLM's own rows of each step, and with rows that go once, when a request ends
(`inside_vllm/fivefold_scheduler.py`). The scheduler is a stand-in that gives each sequence a token; cutting, keeping,
encoding, decoding and the lists of log-probs are vLLM's code and Fivefold's, so no GPU is needed, but a Python with
vLLM. Times are of the processor.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from fivefold.rollout.servers.vllm_dialect import INSIDE

sys.path.insert(0, str(INSIDE))
from fivefold_generate import take_rows_together
from fivefold_scheduler import EndsWhole
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


class OneToken:
    """Gives each sequence one token in every step, with the rows that vLLM's scheduler would cut."""

    def __init__(self, names: list[str]) -> None:
        self.requests = dict.fromkeys(names)

    def add_request(self, request: Any) -> None:
        """Take a request."""

    def update_from_output(self, reason: Any, output: Any) -> dict[int, EngineCoreOutputs]:
        """Return the outputs of a step, which end with `reason`."""
        rows = output.logprobs
        outputs = [
            EngineCoreOutput(
                request_id=name,
                new_token_ids=[5],
                new_logprobs=None if rows is None else rows.slice_request(index, 1),
                finish_reason=reason,
            )
            for index, name in enumerate(self.requests)
        ]
        return {0: EngineCoreOutputs(outputs=outputs)}


class Whole(EndsWhole, OneToken):
    """The same with what goes at a request's end."""


class Faster(LogprobsProcessor):
    """vLLM's lists of log-probs, to which rows are added together."""


def measure(way: str, sequences: int, steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step in both processes, and those of the last one, in which all sequences end."""
    names = [f"fivefold-{index:032x}" for index in range(sequences)]
    sampling = SimpleNamespace(logprobs=0, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, stop=[])
    scheduler = (Whole if way == "at the end" else OneToken)(names)
    for name in names:
        scheduler.add_request(SimpleNamespace(request_id=name, sampling_params=sampling))
    kind = Faster if way == "at the end" else LogprobsProcessor
    processors = {name: kind(None, FlatLogprobs(), None, 0.0, 0, None) for name in names}
    generator = np.random.default_rng(0)
    ids, ranks = generator.integers(0, 1000, (2, sequences))
    rows = LogprobsLists(ids[:, None], generator.normal(size=(sequences, 1)).astype(np.float32), ranks)
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    engine_s = server_s = last_s = 0.0
    for step in range(steps):
        output = SimpleNamespace(
            logprobs=None if way == "none" else rows, req_id_to_index={name: i for i, name in enumerate(names)}
        )
        began = time.process_time()
        reason = FinishReason.LENGTH if step == steps - 1 else None
        message = encoder.encode(scheduler.update_from_output(reason, output)[0])
        sent = time.process_time()
        for one in decoder.decode(message).outputs:
            if one.new_logprobs is not None:
                processors[one.request_id].update_from_output(one)
        last_s = time.process_time() - sent
        engine_s, server_s = engine_s + sent - began, server_s + last_s
    if way != "none" and any(len(processor.logprobs or ()) != steps for processor in processors.values()):
        raise RuntimeError("log-probs are missing")
    spent = {"engine": engine_s / steps, "api server": server_s / steps, "api server, last step": last_s}
    return {"log-probs": way, **{f"{name}, ms": round(1e3 * seconds, 2) for name, seconds in spent.items()}}


def main() -> None:
    """Print one line of JSON for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--steps", type=int, default=256)
    args = parser.parse_args()
    take_rows_together(Faster)
    for way in ("none", "every step", "at the end"):
        gc.collect()
        print(json.dumps(measure(way, args.sequences, args.steps)), flush=True)


if __name__ == "__main__":
    main()
