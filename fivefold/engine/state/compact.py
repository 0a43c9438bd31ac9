"""The update of optimizer state that is kept in fewer bits, or in host memory.

State on the host is updated on the device, bucket after bucket: while one is updated, the next arrives and the one
before it leaves, each on its own stream.

    inward   | fetch 0 | fetch 1 | fetch 2 |
    main               | step 0  | step 1  | step 2 |
    outward                      | store 0 | store 1 | store 2 |
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from fivefold.config.state_buckets import SLOTS
from fivefold.engine.kernels.rounding import round_to, seed_of
from fivefold.engine.state.optimizer_state import MOMENTS, AdamStep, Bucket, Piece, Shard, StateFormat, StateKind, adam
from fivefold.engine.state.precision import join_master, split_master


def update_compact(buckets: list[Bucket], form: StateFormat, step: AdamStep) -> None:
    """Make a step of Adam on state in any format, anywhere, and on the parameters."""
    if not form.on_host:
        for bucket in buckets:
            update_bucket(bucket.pieces, bucket.stored, step)
    elif buckets:
        _update_streaming(buckets, form, step)


@cache
def _streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams on which state arrives and leaves."""
    return torch.cuda.Stream(), torch.cuda.Stream()


def _update_streaming(buckets: list[Bucket], form: StateFormat, step: AdamStep) -> None:
    """Update state that is on the host. The main stream has all of it done; the host waits for nothing."""
    main, (inward, outward) = torch.cuda.current_stream(), _streams()
    device, size = buckets[0].pieces[0].weight_N.device, max(bucket.size for bucket in buckets)
    slots = [
        {kind: torch.empty(size, dtype=dtype, device=device) for kind, dtype in form.kinds.items()}
        for _ in range(min(SLOTS, len(buckets)))
    ]
    arrived, updated, left = ([torch.cuda.Event() for _ in buckets] for _ in range(3))
    # The slots' memory may still be in use by what the main stream did before.
    inward.wait_stream(main)

    def fetch(index: int) -> None:
        with torch.cuda.stream(inward):
            if index >= len(slots):
                inward.wait_event(left[index - len(slots)])
            for kind, host in buckets[index].stored.items():
                slots[index % len(slots)][kind][: host.numel()].copy_(host, non_blocking=True)
            arrived[index].record(inward)

    fetch(0)
    for index, bucket in enumerate(buckets):
        if index + 1 < len(buckets):
            fetch(index + 1)
        slot = {kind: tensor[: bucket.size] for kind, tensor in slots[index % len(slots)].items()}
        main.wait_event(arrived[index])
        update_bucket(bucket.pieces, slot, step)
        updated[index].record(main)
        with torch.cuda.stream(outward):
            outward.wait_event(updated[index])
            for kind, tensor in slot.items():
                bucket.stored[kind].copy_(tensor, non_blocking=True)
            left[index].record(outward)
    main.wait_stream(outward)


def update_bucket(pieces: list[Piece], stored: Mapping[StateKind, torch.Tensor], step: AdamStep) -> None:
    """Make a step of Adam on the state of a bucket, which is on the device of the weights, and on the weights."""
    masters = [master(piece, stored) for piece in pieces]
    moments = {kind: [piece.of(stored[kind]).float() for piece in pieces] for kind in MOMENTS}
    adam(pieces, masters, moments, step)
    for index, piece in enumerate(pieces):
        _store_master(piece, stored, masters[index])
        _store_moments(piece, stored, {kind: moments[kind][index] for kind in MOMENTS}, step.update)


def master(piece: Piece, stored: Mapping[StateKind, torch.Tensor]) -> torch.Tensor:
    """Return the float32 master weights of a piece, which are the stored ones where those are float32."""
    if "param" not in stored:
        return piece.weight_N
    values_N = piece.of(stored["param"])
    return join_master(piece.weight_N, values_N) if values_N.dtype == torch.int16 else values_N


def _store_master(piece: Piece, stored: Mapping[StateKind, torch.Tensor], master_N: torch.Tensor) -> None:
    if "param" not in stored:
        return
    values_N = piece.of(stored["param"])
    if values_N.dtype == torch.int16:
        split_master(master_N, piece.weight_N, values_N)
    else:
        piece.weight_N.copy_(master_N)


def _store_moments(
    piece: Piece, stored: Mapping[StateKind, torch.Tensor], moments: Mapping[StateKind, torch.Tensor], update: int
) -> None:
    seed, start = seed_of(f"{_noise_name(piece.shard)}/{update}"), piece.shard.start + piece.start
    for half, kind in enumerate(MOMENTS):
        if stored[kind].dtype == torch.bfloat16:
            round_to(moments[kind], piece.of(stored[kind]), seed, start, half)


def _noise_name(shard: Shard) -> str:
    """Return the name that a parameter is rounded by: copies of the embedding on two stages must be rounded alike."""
    return "shared embedding" if vars(shard.parameter).get("shared_embedding", False) else shard.name
