"""The machines of a run and how its workers start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from fivefold.config.limits import MOST_DEVICES, MOST_SECONDS
from fivefold.config.schema.fields import PathText, Section
from fivefold.config.schema.rules import equals, reads_if, rule

OWN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
    *("PYTHONSAFEPATH", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""Environment variables by which workers know their place."""


class ClusterConfig(Section):
    """The machines of the run."""

    n_nodes: Annotated[int, Field(ge=1, le=MOST_DEVICES)] = 1
    """Number of machines."""
    n_gpus_per_node: Annotated[int, Field(ge=0, le=256)] = 8
    """GPUs that are used on each machine; 0 runs every worker as a CPU process (gloo)."""
    host_memory_gib: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Memory of each machine in GiB (2^30 bytes), which `fivefold plan` then compares with what it counts; null: it
    does not."""
    device_peak_tflops: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Dense matmuls in bfloat16 that each device can compute, in TFLOP/s, by which the metrics `mfu` and `hfu` divide;
    null: looked up by the name of the GPU, if Fivefold knows it."""
    fileroot: PathText = "runs"
    """Folder of all outputs; a run writes to `<fileroot>/<experiment_name>/<trial_name>/`."""

    @rule
    def _size(self) -> Iterator[str]:
        if (n_gpus := self.n_nodes * self.n_gpus_per_node) > MOST_DEVICES:
            yield (
                f"n_nodes={self.n_nodes} with n_gpus_per_node={self.n_gpus_per_node} are {n_gpus:,} GPUs, and at most "
                f"{MOST_DEVICES:,} can be laid out: lower one of the two"
            )


class SchedulerConfig(Section):
    """How worker processes are started."""

    type: Literal["local", "ray"] = "local"
    """`local` starts Ray on this machine for this run alone; `ray` joins the cluster at `address`."""
    address: Annotated[str, reads_if(equals("type", "ray"), "names a cluster to join")] = "auto"
    """Address of the Ray cluster to join with `type: ray`: `auto`, or host:port."""
    wait_s: Annotated[
        float, Field(ge=0, le=MOST_SECONDS), reads_if(equals("type", "ray"), "waits for a cluster", warns=True)
    ] = 60.0
    """Seconds to wait, with `type: ray`, for nodes that the cluster lacks and for devices that other jobs hold."""
    require_token: Annotated[bool, reads_if(equals("type", "ray"), "refuses a cluster", warns=True)] = True
    """With `type: ray`, refuse a cluster that takes commands without a token, from whoever reaches its ports; false:
    the network alone keeps others out (docs/security.md)."""
    environment: dict[
        Literal["all", "actor", "critic", "ref", "teacher", "reward", "judge", "rollout"],
        dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str],
    ] = {}
    """Environment variables of worker processes, by role or for `all`: `{all: {NCCL_DEBUG: INFO}, rollout:
    {VLLM_USE_DEEP_GEMM: "0"}}`. They come before the shell's. Secrets belong in the shell: the recipe is saved with
    the run."""
    timeout_s: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = 1800.0
    """Seconds that one phase may take, on a worker or with the rewards, before the run ends with an error."""

    @rule
    def _variables(self) -> Iterator[str]:
        for role, variables in self.environment.items():
            for name in variables:
                if name in OWN_VARIABLES or name.startswith(("RAY_", "FIVEFOLD_")):
                    yield f"environment.{role}.{name} is a variable that Fivefold or Ray sets: drop it"

    def variables_of(self, role: str) -> dict[str, str]:
        """Return the variables of the processes of a role."""
        own = (variables for name, variables in self.environment.items() if name == role)
        return {**self.environment.get("all", {}), **next(own, {})}
