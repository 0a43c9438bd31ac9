"""What launch, layout, plan and checks ask the section of each role (config/roles.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fivefold.config.schema.fields import Section

Head = Literal["logits", "value", "score", "stored"]
"""A model's last layer: its own, a value head with a bias, one without a bias, or the one in its weight files."""
Offloadable = Literal["params", "grads", "optimizer"]
OFFLOADABLE: tuple[Offloadable, ...] = ("params", "grads", "optimizer")
"""Parts of a model's state that leave its devices and come back."""
PARAMS: tuple[Offloadable, ...] = ("params",)


class RoleConfig(Section):
    """The section of a role."""

    @property
    def head(self) -> Head:
        """The model's last layer."""
        return "logits"

    @property
    def follows(self) -> float | None:
        """Share of its weights that a frozen model keeps when it follows the actor; None: it does not follow."""
        return None

    @property
    def replays(self) -> bool:
        """Whether the model's routers send tokens to experts that were recorded."""
        return False

    @property
    def takes_turns(self) -> bool | None:
        """Whether the role shares the actor's devices, in turn; None: the section leaves it open."""
        return None

    @property
    def leaves_devices(self) -> Mapping[Offloadable, bool | None]:
        """What leaves the devices while the role does not work; a value None leaves it to the placement or the plan."""
        return {}
