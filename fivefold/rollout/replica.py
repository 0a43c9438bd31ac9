"""What a rollout replica is made of, whichever engine runs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaSpec:
    """One replica. What stands below `load_weights` is for servers, vLLM and SGLang, alone."""

    backend: str
    """`transformers`, `vllm` or `sglang`."""
    path: str
    """Model folder or hub name."""
    tokenizer_path: str
    dtype: str
    """`float32` or `bfloat16`."""
    max_batch_size: int
    """Most sequences decoded at one time."""
    load_weights: bool
    """True: the checkpoint's weights, as version 0. False: the engine waits for `update_weights`."""
    run: str
    """The same in all processes of a run, and in no other run's."""
    tp: int
    pp: int
    max_length: int
    """Longest prompt and completion together, in tokens."""
    seed: int
    can_sleep: bool
    """Whether other roles use the devices while it sleeps."""
    reserved: int
    """Bytes of each device that those roles keep while it is awake."""
    memory_fraction: float | None
    """Of each device's memory, what the server takes. None: its usual share, less `reserved`."""
    python: str | None
    """Python of the server's environment; None: this process's own."""
    arguments: tuple[str, ...]
    """Further arguments for the server's command line."""
