"""The specification of a rollout replica, whichever engine runs it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.config.schema.rollout import SpeculativeConfig
from fivefold.rollout.chat_template import ChatTemplate
from fivefold.weights.host_memory import THROUGH_HOST
from fivefold.weights.transport import Route

if TYPE_CHECKING:
    from fivefold.families.served import ServedAdapters


@dataclass(frozen=True)
class ReplicaNode:
    """One of the nodes of a replica; each has as many of its processes."""

    rank: int = 0
    """Index of the node; node 0 has the server's HTTP API."""
    n_nodes: int = 1
    host: str = "127.0.0.1"
    """Address of the node for the others."""
    master_host: str = "127.0.0.1"
    """Address of node 0, where the processes of all nodes meet."""
    master_port: int = 0
    """Port at which they meet; 0: the replica is on one node."""


@dataclass(frozen=True)
class FollowerAddress:
    """Where a node after a replica's first one gets the order to start its part of the server."""

    host: str
    port: int
    key: bytes = field(repr=False)
    """Secret that allows it."""
    devices: tuple[str, ...] = ()
    """UUIDs of the node's devices, if the server needs them."""


@dataclass(frozen=True)
class ReplicaSpec:
    """One replica. The fields below `load_weights` are for servers alone."""

    backend: str
    """Name of the engine, a row of `fivefold.layout.backends` that generates."""
    path: str
    """Model folder, hub name or `package:<name>`."""
    tokenizer_path: str
    """Folder, hub name or `package:<name>` of the tokenizer."""
    dtype: str
    """`float32` or `bfloat16`."""
    max_batch_size: int
    """Most sequences that are decoded at one time."""
    load_weights: bool
    """True: the engine loads the checkpoint's weights, as version 0. False: it waits for `update_weights`, or for
    adapters."""
    run: str
    """Identifier of the run: the same in all its processes, and different in every other run."""
    tp: int
    """Tensor parallel degree."""
    pp: int
    """Pipeline stages."""
    max_length: int
    """Most tokens of a prompt and its completion together."""
    seed: int
    """Seed of the server's own random numbers; each request also has its own seed."""
    can_sleep: bool
    """Whether the server gives its device memory back while it sleeps, because other roles use the devices."""
    reserved: int
    """Bytes of each device that other roles keep while the server is awake."""
    memory_fraction: float | None
    """Share of each device's memory that the server takes; None: its usual share, less `reserved`."""
    python: str | None
    """Python program of the server's environment; None: this process's."""
    arguments: tuple[str, ...]
    """Further arguments of the server's command line."""
    section: str = "rollout"
    """The recipe's section that it follows from, which errors name."""
    quantization: str | None = None
    """How a server quantizes its weights; None: not."""
    speculative: SpeculativeConfig | None = None
    """How a server drafts tokens; None: not."""
    needs_text: bool = True
    """Whether sampling looks at texts or at the tokenizer; otherwise a server may do without its tokenizer."""
    trust_remote_code: bool = False
    """Whether code of the tokenizer's folder is run."""
    chat: ChatTemplate = field(default_factory=ChatTemplate)
    """What becomes of the tokenizer's chat template."""
    max_restarts: int = 0
    """Times that a server which died is started again."""
    server_timeout_s: float = 300.0
    """Seconds without an answer after which a server has to show that it still works."""
    new_tokens_per_chunk: int | None = None
    """Most tokens of a stream's completion that a server is asked for at one time; None: all."""
    keeps_cache: bool = False
    """Whether running completions keep the keys and values that they have when weights change."""
    route: Route = THROUGH_HOST
    """How weights reach the engine."""
    adapters: ServedAdapters | None = None
    """Adapters that a server has next to the weights of the model's files; None: it gets whole weights."""
    deterministic: bool = False
    """Whether the embedded engine allows only kernels that give the same bits every time."""
    returns_routes: bool = False
    """Whether completions tell the experts of their tokens, for router replay."""
    sees: bool = False
    """Whether prompts have images."""
    most_pixels: int | None = None
    """Most pixels to which images are resized; None: as the model's image processor says."""
    environment: EnvironmentConfig | None = None
    """What plays its episodes; None: each prompt gets one completion."""
    node: ReplicaNode = ReplicaNode()
    """The replica's node on which this is read."""
    followers: tuple[FollowerAddress, ...] = ()
    """On node 0, the replica's further nodes."""

    @property
    def loads_files(self) -> bool:
        """Whether a server loads the weights of the model's files when it starts, and keeps them to its end."""
        return self.load_weights or self.adapters is not None

    @property
    def counts(self) -> bool:
        """Whether it tells what its server has counted, for which the server has to count."""
        return self.environment is not None or self.speculative is not None

    @property
    def drafts_by_layers(self) -> bool:
        """Whether layers for multi-token prediction draft tokens."""
        return self.speculative is not None and self.speculative.method == "mtp"

    def by_node(self, port: int) -> list[ReplicaSpec]:
        """Return the spec of each node, whose processes meet on a port of node 0, which is this one."""
        hosts = [self.node.host, *(follower.host for follower in self.followers)]
        nodes = [ReplicaNode(rank, len(hosts), host, hosts[0], port) for rank, host in enumerate(hosts)]
        return [replace(self, node=node, followers=()) for node in nodes]
