"""torch on this machine: whether it can be imported, and which GPUs and collectives it was built for."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.doctor.finding import Finding, pip_install
from fivefold.doctor.gpus import Gpu

CPU_ADVICE = "set cluster.n_gpus_per_node=0"
OLDEST_FOR_BFLOAT16 = (8, 0)


@dataclass(frozen=True)
class TorchBuild:
    """What torch says about itself."""

    error: str | None = None
    """Why torch cannot be imported; the other fields are then empty."""
    cuda: str | None = None
    """Version of CUDA that torch was built with."""
    n_devices: int = 0
    """Number of GPUs that torch can use."""
    architectures: tuple[str, ...] = ()
    """Architectures that torch's kernels were compiled for: `sm_90`, `compute_90`, ..."""
    nccl: str | None = None
    """Version of NCCL; None if this build has none."""
    gloo: bool = False
    """Whether this build has gloo."""


def look_at_torch() -> TorchBuild:
    """Import torch and ask it about itself."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return TorchBuild(error=f"{type(error).__name__}: {error}")
    import torch.distributed as dist

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
    available = torch.cuda.is_available()
    return TorchBuild(
        cuda=torch.version.cuda,
        n_devices=torch.cuda.device_count() if available else 0,
        architectures=tuple(torch.cuda.get_arch_list()) if available else (),
        nccl=nccl,
        gloo=dist.is_gloo_available(),
    )


def check_torch(torch: TorchBuild, gpus: tuple[Gpu, ...], visible: str | None) -> list[Finding]:
    """Check whether torch can be imported, can use the GPUs of this machine, and has collectives for them.

    Args:
        torch: what torch says about itself.
        gpus: GPUs that the driver lists.
        visible: value of CUDA_VISIBLE_DEVICES; None: it is not set.
    """
    if torch.error is not None:
        fix = f"{pip_install('torch')} --force-reinstall"
        return [Finding("torch", "problem", f"cannot be imported: {torch.error}", fix)]
    return [_cuda(torch, gpus, visible), _collectives(torch)]


def _cuda(torch: TorchBuild, gpus: tuple[Gpu, ...], visible: str | None) -> Finding:
    if torch.cuda is None:
        if not gpus:
            return Finding("CUDA", "ok", "torch is a CPU build", CPU_ADVICE)
        fix = "install a CUDA build: see https://pytorch.org/get-started/locally"
        return Finding("CUDA", "problem", f"{len(gpus)} GPUs, but torch is a CPU build", fix)
    if not gpus and torch.n_devices == 0:
        return Finding("CUDA", "ok", f"{torch.cuda}, unused", CPU_ADVICE)
    if torch.n_devices == 0:
        return _unusable(torch.cuda, gpus, visible)
    missing = [gpu for gpu in gpus if not _has_kernels(gpu.capability, torch.architectures)]
    if missing:
        found = f"torch has no kernels for {missing[0].name} (compute capability {_dotted(missing[0].capability)})"
        return Finding("CUDA", "problem", found, "install another CUDA build of torch: https://pytorch.org")
    old = [gpu for gpu in gpus if gpu.capability < OLDEST_FOR_BFLOAT16]
    if old:
        found = f"{torch.cuda}; {old[0].name} has no bfloat16"
        return Finding("CUDA", "warning", found, "set actor.dtype=float32, or train on an A100 or newer")
    seen = f", CUDA_VISIBLE_DEVICES={visible}" if visible is not None else ""
    advice = f"train with cluster.n_gpus_per_node={torch.n_devices}"
    return Finding("CUDA", "ok", f"{torch.cuda}; torch uses {torch.n_devices} GPUs{seen}", advice)


def _unusable(cuda: str, gpus: tuple[Gpu, ...], visible: str | None) -> Finding:
    if visible is not None:
        found = f"CUDA_VISIBLE_DEVICES={visible!r} hides the {len(gpus)} GPUs"
        return Finding("CUDA", "warning", found, f"unset it, or {CPU_ADVICE}")
    found = f"torch was built for CUDA {cuda} and cannot use the GPUs with driver {gpus[0].driver}"
    return Finding("CUDA", "problem", found, "update the driver, or install torch built for an older CUDA")


def _collectives(torch: TorchBuild) -> Finding:
    if torch.n_devices > 1 and torch.nccl is None:
        return Finding("NCCL", "problem", "not in this build of torch", "install a CUDA build: https://pytorch.org")
    if torch.n_devices == 0 and not torch.gloo:
        return Finding("gloo", "problem", "not in this build of torch", pip_install("torch"))
    if torch.nccl is None:
        return Finding("NCCL", "ok", "not in this build of torch", "CPU processes talk through gloo")
    advice = "GPUs talk through it" if torch.n_devices else "CPU processes talk through gloo"
    return Finding("NCCL", "ok", torch.nccl, advice)


def _has_kernels(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Say whether kernels for `architectures` run on a GPU.

    Binary code (`sm_`) runs on GPUs with its major version and its minor version or a newer one. PTX (`compute_`)
    is compiled for any newer GPU.
    """
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        compiled = (int(digits[:-1]), int(digits[-1]))
        if compiled <= capability and (kind == "compute" or compiled[0] == capability[0]):
            return True
    return False


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
