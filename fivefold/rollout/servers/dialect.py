"""The protocol for what differs between inference servers: command line, requests, and how they load weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from fivefold.families.shape import ModelShape
from fivefold.rollout.protocol import SamplingParams, ServerCounts
from fivefold.rollout.replica import ReplicaNode, ReplicaSpec
from fivefold.rollout.servers.client import SHOWN, Address, HttpClient
from fivefold.rollout.servers.place import Place
from fivefold.rollout.servers.weights import WeightLoader
from fivefold.types import FinishReason, PlacedImage

REQUEST_SEEDS = 2**63
"""Seeds of requests are taken modulo this, because servers keep them in signed integers."""
SERVER_SEEDS = 2**31
"""The server's own seed is taken modulo this, because the server seeds every library with it."""
_COUNT = re.compile(rb"^([\w:]+)_total(?:\{.*\})? (\S+)$", re.MULTILINE)
LEAST_LOGPROB = -9000.0
"""A log-prob below this stands for minus infinity, for which some servers write -9999: no sampled token has it."""


@dataclass(frozen=True)
class AskedRoutes:
    """What a server is asked to tell of the experts of tokens, for router replay."""

    layers: tuple[int, ...]
    """The MoE layers, counted from 0."""
    n_layers: int
    """All layers of the model."""
    top_k: int
    """Experts of a token."""
    n_experts: int
    """Experts of a layer."""
    first: int = 0
    """First token of the prompt whose experts are asked for."""

    @staticmethod
    def of(shape: ModelShape) -> AskedRoutes:
        """Return what is asked of a model of mixtures of experts."""
        layers = tuple(layer for layer, is_moe in enumerate(shape.moe_layers) if is_moe)
        return AskedRoutes(layers, shape.n_layers, shape.top_k, shape.n_experts)


@dataclass(frozen=True)
class Ask:
    """What one HTTP request asks for: a completion of a prompt."""

    token_ids: tuple[int, ...]
    """The prompt."""
    seed: int | None
    """None: the server draws from its own random numbers."""
    wants_logprobs: bool
    routes: AskedRoutes | None = None
    """None: the experts of tokens are not asked for."""
    images: tuple[PlacedImage, ...] = ()
    """The images among the prompt's tokens."""


PAUSE_S = 60.0
"""Seconds that a server has to abort or hold its requests, or to sample one token; else it is ended, as if it had
died."""

AnswerEnd = FinishReason | Literal["abort"]
"""Why an answer ended; `abort`: the server had to abort its requests, and the completion is not whole."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A completion that a server sampled, of T tokens."""

    token_ids_T: npt.NDArray[np.int32]
    logprobs_T: npt.NDArray[np.float32] | None
    """None: they were not asked for."""
    finish_reason: AnswerEnd
    versions_T: npt.NDArray[np.int32] | None = None
    """Version of the weights that sampled each token; None: the server does not tell."""
    routes: npt.NDArray[Any] | None = None
    """[tokens, MoE layers, top_k]: experts of the tokens from `AskedRoutes.first` on, as far as they are known; None:
    they are not."""

    def __post_init__(self) -> None:
        if self.logprobs_T is None:
            return
        # JSON has no NaN: a server that writes JSON writes null or leaves the number out.
        usable_T = np.isfinite(self.logprobs_T) & (self.logprobs_T >= LEAST_LOGPROB)
        n_usable = int(np.count_nonzero(usable_T))
        if not len(self.token_ids_T) == len(self.logprobs_T) == n_usable:
            raise RuntimeError(
                f"the server answered {len(self.token_ids_T)} tokens with {n_usable} log-probs: every token needs a "
                "number, and logits that are not finite (NaN or infinite) give none"
            )


def counted(metrics: bytes, names: Mapping[bytes, str]) -> ServerCounts:
    """Return counts in Prometheus' text form, each a field of `ServerCounts` by its `names`, over all their labels."""
    counts = ServerCounts()
    for name, count in _COUNT.findall(metrics):
        if field := names.get(name):
            counts += ServerCounts(**{field: int(float(count))})
    return counts


def integers(text: bytes) -> npt.NDArray[np.int32]:
    """Return the numbers of a JSON array without its brackets, and without a Python object for each."""
    return np.fromstring(text.decode(), dtype=np.int32, sep=",")


def floats(text: bytes) -> npt.NDArray[np.float64]:
    """Return the numbers of a JSON array without its brackets, and without a Python object for each."""
    return np.fromstring(text.decode(), dtype=np.float64, sep=",")


def found(pattern: re.Pattern[bytes], text: bytes) -> bytes:
    """Return the first group of a pattern in a reply.

    Raises:
        RuntimeError: the reply has another form than this version of the server's.
    """
    match = pattern.search(text)
    if match is None:
        raise RuntimeError(f"the server's answer has no {pattern.pattern.decode()}: {text[:SHOWN].decode()}")
    return match[1]


def finish_reason(said: str) -> AnswerEnd:
    """Return the reason that a server gives for a completion's end; it reports an abort with the status of a success.

    Raises:
        RuntimeError: it is an unknown reason, so that the completion may not be whole.
    """
    reasons: dict[str, AnswerEnd] = {"stop": "stop", "length": "length", "abort": "abort"}
    if said not in reasons:
        raise RuntimeError(f"the server ended a completion with {said!r}: it is not whole")
    return reasons[said]


class Dialect(Protocol):
    """Speaks to one kind of server."""

    package: str
    """The server's Python package."""
    generate_path: str
    """Path to which requests are posted."""
    aliases: frozenset[str]
    """Other names of the arguments that `arguments` gives."""
    images_key: str
    """Key of a request for the images of its prompt."""
    adapters_of_one_rank: bool
    """Whether it takes adapters only if all layers' have the same rank."""

    def place(self) -> Place:
        """Return a new place where a server of this kind can listen."""

    def program(self, node: ReplicaNode) -> list[str]:
        """Return the module that `python -m` starts on a node of a replica, and what comes before all arguments."""

    def arguments(self, spec: ReplicaSpec, address: Address) -> list[str]:
        """Return the command line after the module, without the further arguments of the recipe."""

    def environment(self, spec: ReplicaSpec) -> Mapping[str, str]:
        """Return environment variables of the server process, besides those that it inherits."""

    def prepare(self, http: HttpClient, spec: ReplicaSpec) -> None:
        """Give a server that has just become ready what only it needs, before it gets any weights."""

    def request(self, ask: Ask, sampling: SamplingParams, end_token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the body to post to `generate_path`."""

    def answer(self, reply: bytes, ask: Ask) -> Answer:
        """Return the completion in a reply from `generate_path`.

        Raises:
            RuntimeError: a completion that ended for an unknown reason, or lacks a log-prob that was asked for.
        """

    def counts(self, http: HttpClient) -> ServerCounts:
        """Return what the server has counted since it began; zeros if it does not tell."""

    def pause(self, http: HttpClient, limit_s: float) -> None:
        """Make the server answer all requests with what it has, and hold back new ones; return once it has.

        Raises:
            ServerHangs: it did not within `limit_s`.
        """

    def resume(self, http: HttpClient) -> None:
        """Make a paused server answer requests again."""

    def beat(self, http: HttpClient, limit_s: float) -> None:
        """Return once the server has sampled a token since it was asked, or if it has nothing to sample.

        Raises:
            ServerHangs: it did not within `limit_s`.
        """

    def hold(self, http: HttpClient, limit_s: float) -> None:
        """Make the server pause between two tokens of its requests, which keep what they have.

        Raises:
            ServerHangs: it did not within `limit_s`.
            ValueError: servers of this kind cannot.
        """

    def go_on(self, http: HttpClient, version: int) -> None:
        """Make a server that was held continue, with weights of `version`. From now on, its answers tell versions.

        No request begins on what was cached with other weights.
        """

    def load(self, http: HttpClient, folder: Path, version: int, *, keeps_cache: bool) -> None:
        """Make the server load all weights from a Hugging Face folder.

        It then drops what it has cached with others, unless it `keeps_cache` for requests that are held.
        """

    def load_adapters(
        self, http: HttpClient, folder: Path, version: int, asked: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Make the server take adapters from a folder of PEFT, in place of those that it has.

        Args:
            http: the server, which answers no requests meanwhile.
            folder: the adapters. It may be removed afterwards.
            version: their version.
            asked: what requests have said for the adapters before; nothing before the first.

        Returns:
            What requests say from now on, so that these adapters answer them.

        Raises:
            RuntimeError: the server refused them, or has no layer for some.
        """

    def devices(self, spec: ReplicaSpec) -> list[str]:
        """Return the UUIDs of the devices that this process sees, if `loader` needs them."""

    def loader(self, http: HttpClient, spec: ReplicaSpec, devices: Sequence[str]) -> WeightLoader:
        """Return what hands weights on devices to the server, which is ready and has `devices` on all its nodes."""

    def watch_weights(self, http: HttpClient) -> None:
        """Make the server begin a checksum of the weights that arrive."""

    def arrived(self, http: HttpClient) -> Sequence[int]:
        """Return the checksum of what has arrived, by process of the server."""

    def sleep(self, http: HttpClient, *, keeps_weights: bool) -> None:
        """Make the server give back the device memory of its weights and its cache.

        With `keeps_weights`, which is for servers that have loaded them, it has them again once it is awake.
        """

    def wake_weights(self, http: HttpClient) -> None:
        """Make a server that sleeps take the device memory of its weights again, for an update to fill."""

    def wake_cache(self, http: HttpClient) -> None:
        """Make a server that has its weights' device memory take the rest again."""
