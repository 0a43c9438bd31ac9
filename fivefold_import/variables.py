"""Environment variables that a source gives its workers: `scheduler.environment`, by role."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fivefold.config.interpolation import names_secret
from fivefold.config.schema.machines import OWN_VARIABLES
from fivefold_import import reasons
from fivefold_import.draft import Draft

ROLES: Mapping[str, str] = {
    "policy.generation.": "rollout",
    "policy.": "actor",
    "value.": "critic",
    "actor_train.": "actor",
    "actor_infer.": "rollout",
    "reference.": "ref",
    "explorer.": "rollout",
    "actor.": "actor",
    "critic.": "critic",
    "ref.": "ref",
    "rollout.": "rollout",
}
"""What a key begins with, the longer texts first, and the role whose processes have the variable; others: all."""
IMPLIED: tuple[tuple[str, str], ...] = (
    (r"HCCL_|ASCEND_|ACL_|TASK_QUEUE_ENABLE|PYTORCH_NPU_|CPU_AFFINITY_", "only NPUs read this"),
    (r"NVTE_", "the layers are not TransformerEngine's, unless actor.megatron.kernels=te"),
    (r"NRL_REFIT_", reasons.WEIGHTS_IN_BUCKETS),
    (r"(NRL|AREAL|ROLL|ROCK|VERL|TRINITY|TRANSFER_QUEUE)_", "only the source's own code reads this"),
    (r"VLLM_USE_V1$|VLLM_USE_RAY_", "vLLM's servers run in the way that Fivefold starts them"),
    (r"RAY_", "Ray is started or joined as `scheduler` says"),
    (r"USE_MODELSCOPE$", "models are folders, or names on the Hugging Face hub, which has the same ones"),
    (r"TORCH_CUDA_ARCH_LIST$", "nothing is compiled ahead"),
)
"""Variables that have no effect, by a pattern, with the reason."""


def environment_variable(draft: Draft, source: str) -> None:
    """Convert a variable of the processes of one role, or of all."""
    name, value = source.rpartition(".")[2], draft.get(source)
    if value in ("", None):
        return draft.implied(source, "it is empty")
    for pattern, why in IMPLIED:
        if re.match(pattern, name):
            return draft.implied(source, why)
    if names_secret(name):
        return draft.unsupported(source, f"it is a secret: {reasons.OWN_ENVIRONMENT}")
    if name in OWN_VARIABLES:
        return draft.unsupported(source, "Fivefold sets this variable")
    role = next((role for prefix, role in ROLES.items() if source.startswith(prefix)), "all")
    text = str(int(value) if isinstance(value, bool) else value)
    return draft.mapped(source, f"scheduler.environment.{role}.{name}", text)
