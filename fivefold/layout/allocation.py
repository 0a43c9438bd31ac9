"""The values that an allocation string describes: roles with their degrees, grouped by the devices they share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from fivefold.config.limits import MOST_DEVICES
from fivefold.layout.backends import BACKENDS
from fivefold.layout.errors import AllocationError, RuleError
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.stages import NEARLY_EQUAL, StageSplit

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class RoleAllocation:
    """The backend and the degrees of one role; `dp` is None for `d*`, as many replicas as there are devices left."""

    backend: str
    name: str | None = None
    dp: int | None = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    split: StageSplit = NEARLY_EQUAL
    """What the recipe says about the layers of each stage; an allocation string has no word for it."""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise RuleError(f"unknown backend `{self.backend}`", f"use one of {', '.join(BACKENDS)}")
        if self.name is not None and not NAME.fullmatch(self.name):
            raise RuleError(
                f"`{self.name}` is not a name", "start with a letter; continue with letters, digits, `_` and `-`"
            )
        self._check_degrees()
        if self.vpp > 1 and self.pp == 1:
            raise RuleError(
                f"v{self.vpp} splits each pipeline stage, but there is one stage only",
                "add p2 or more, or drop v",
                letter="v",
            )
        if self.dp is not None:
            self._check_experts(self.dp)
        if (n_devices := (self.dp or 1) * self.replica_size) > MOST_DEVICES:
            raise RuleError(
                f"d*t*p*c = {n_devices:,} devices are more than the {MOST_DEVICES:,} that can be laid out",
                "write smaller degrees",
            )

    def _check_degrees(self) -> None:
        degrees = {"d": self.dp, "t": self.tp, "p": self.pp, "c": self.cp, "v": self.vpp, "e": self.ep}
        for letter, degree in degrees.items():
            if degree is not None and degree < 1:
                raise RuleError(
                    f"{letter}{degree}: a degree is at least 1", f"write {letter}1, or leave it out", letter=letter
                )
            if degree not in (None, 1) and letter not in BACKENDS[self.backend].letters:
                raise refused_letter(self.backend, letter)
        if self.etp < 1:
            raise RuleError(f"t{self.etp}: a degree is at least 1", "write t1, or leave it out", letter="t", part="ffn")
        if self.etp > 1 and not BACKENDS[self.backend].folds_experts:
            raise RuleError(
                f"{self.backend} has no separate layout for experts",
                "use megatron, or drop it",
                letter="t",
                part="ffn",
            )

    def _check_experts(self, dp: int) -> None:
        ranks, experts = dp * self.tp * self.cp, self.ep * self.etp
        if ranks % experts:
            shape = f"e{self.ep}" if self.etp == 1 else f"ffn t{self.etp}*e{self.ep} = {experts}"
            which = "the 1 rank" if ranks == 1 else f"the {ranks} ranks"
            smaller = "drop it" if ranks == 1 else f"choose a divisor of {ranks}"
            least = experts // gcd(experts, self.tp * self.cp)
            raise RuleError(
                f"{shape} does not divide {which} of a pipeline stage (d*t*c = {dp}*{self.tp}*{self.cp})",
                f"experts are spread over the ranks that there are: {smaller}, or make d a multiple of {least}",
                letter="e" if self.ep > 1 else "t",
                part="dims" if self.etp == 1 else "ffn",
            )

    @property
    def is_training(self) -> bool:
        """Whether the backend trains; otherwise it only generates."""
        return BACKENDS[self.backend].trains

    @property
    def replica_size(self) -> int:
        """Number of devices of one data-parallel replica: tp * pp * cp."""
        return self.tp * self.pp * self.cp

    @property
    def n_devices(self) -> int | None:
        """Number of devices of the role; None while `d*` is open."""
        return None if self.dp is None else self.dp * self.replica_size

    @property
    def role(self) -> str:
        """Name of the role; if none is written, `actor` if the backend trains and `rollout` if it only generates."""
        if self.name is not None:
            return self.name
        return "actor" if self.is_training else "rollout"

    def resolve(self, n_devices: int | None = None) -> ParallelLayout:
        """Return the layout, with `d*` filled from `n_devices`, the number of devices that this role may use.

        Raises:
            AllocationError: `d*` without a number of devices, or with a number that whole replicas cannot fill.
        """
        dp = self._open_dp(n_devices) if self.dp is None else self.dp
        # Engines without a layout for experts split each expert as they split everything else.
        etp = self.etp if BACKENDS[self.backend].folds_experts else self.tp
        ranks = dp * self.tp * self.cp
        return ParallelLayout(
            backend=self.backend,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            dp=dp,
            vpp=self.vpp,
            ep=self.ep,
            etp=etp,
            edp=ranks // (self.ep * etp),
            split=self.split,
        )

    def _open_dp(self, n_devices: int | None) -> int:
        text = str(self)
        star = text.index("*")
        if n_devices is None:
            raise AllocationError(
                "`d*` means what is left, but the number of devices is not known", "write the number", text, star
            )
        if n_devices < 1 or n_devices % self.replica_size:
            raise AllocationError(
                f"`d*` has {n_devices} devices to fill, and one replica takes t*p*c = {self.replica_size}",
                f"leave a positive multiple of {self.replica_size} devices to it: lower the degrees of other roles, "
                "or raise cluster.n_gpus_per_node",
                text,
                star,
            )
        dp = n_devices // self.replica_size
        try:
            self._check_experts(dp)
        except RuleError as error:
            raise AllocationError(
                f"`d*` is d{dp} on {n_devices} devices: {error.rule}", error.fix, text, star
            ) from error
        return dp

    def __str__(self) -> str:
        name = "" if self.name is None else f"[{self.name}]"
        shared = _letters(d="*" if self.dp is None else self.dp, p=self.pp, v=self.vpp, t=self.tp, c=self.cp)
        if self.etp == 1:
            return f"{self.backend}{name}:{shared}{_letters(e=self.ep)}"
        edp = "" if self.dp is None else f"d{self.dp * self.tp * self.cp // (self.etp * self.ep)}"
        return f"{self.backend}{name}:(attn:{shared}|ffn:{edp}{_letters(t=self.etp, e=self.ep)})"


def _letters(**degrees: int | str) -> str:
    """Return `d2t4` for d=2, t=4; degrees of 1 are left out, except d."""
    return "".join(f"{letter}{degree}" for letter, degree in degrees.items() if letter == "d" or degree != 1)


def refused_letter(backend: str, letter: str) -> RuleError:
    """Return the error for a degree that `backend` does not take."""
    row = BACKENDS[backend]
    return RuleError(f"{backend} takes {', '.join(row.letters)} only, not `{letter}`", row.instead, letter=letter)


@dataclass(frozen=True)
class Allocation:
    """Groups of roles: each group has its own devices, and the roles of one group take turns on the same devices."""

    groups: tuple[tuple[RoleAllocation, ...], ...]

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups):
            raise RuleError("no role is given", "write at least one, such as `megatron:d1`")
        self._check_names()
        self._check_shared_sizes()
        self._check_open_groups()

    @cached_property
    def roles(self) -> tuple[RoleAllocation, ...]:
        """All roles, in the order in which they are written."""
        return tuple(role for group in self.groups for role in group)

    def _check_names(self) -> None:
        seen: set[str] = set()
        for index, role in enumerate(self.roles):
            if len(self.roles) > 2 and role.name is None:
                raise RuleError(
                    f"with three or more roles each one is named, but this `{role.backend}` is not",
                    f"write {role.backend}[NAME]:..., for example {role.backend}[{role.role}]:...",
                    role=index,
                )
            if role.role in seen:
                fix = "give each role its own name" if role.name else f"name it: {role.backend}[NAME]:..."
                raise RuleError(f"two roles are both `{role.role}`", fix, role=index)
            seen.add(role.role)

    def _check_shared_sizes(self) -> None:
        for group in self.groups:
            sizes = {role.n_devices: role for role in group if role.n_devices is not None}
            if len(sizes) > 1:
                listed = ", ".join(f"{role.role} {size}" for size, role in sizes.items())
                raise RuleError(
                    f"roles share the same devices (`|`, colocate=true), but their sizes differ: {listed}",
                    "make them equal (`d*` fits a role to the others), or give them separate devices (`+`, "
                    "colocate=false)",
                    role=self.roles.index(list(sizes.values())[1]),
                )

    def _check_open_groups(self) -> None:
        open_groups = [group for group in self.groups if self._known_size(group) is None]
        if len(open_groups) > 1:
            raise RuleError(
                "`d*` means what is left, but two groups of devices ask for it",
                "write the number in all but one, or share devices with `|`",
                letter="d",
                role=self.roles.index(open_groups[1][0]),
            )

    @staticmethod
    def _known_size(group: tuple[RoleAllocation, ...]) -> int | None:
        return next((role.n_devices for role in group if role.n_devices is not None), None)

    @property
    def n_devices(self) -> int | None:
        """Number of devices of all groups together; None while a `d*` is open."""
        sizes = [self._known_size(group) for group in self.groups]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def resolve(self, n_devices: int | None = None) -> dict[str, ParallelLayout]:
        """Return each role's layout by its name; `d*` is filled from `n_devices`, the number of all devices.

        Raises:
            AllocationError: `d*` without a number of devices, or with a number that whole replicas cannot fill.
        """
        sizes = [self._known_size(group) for group in self.groups]
        taken = sum(size for size in sizes if size is not None)
        left = None if n_devices is None else n_devices - taken
        return {
            role.role: role.resolve(left if size is None else size)
            for group, size in zip(self.groups, sizes, strict=True)
            for role in group
        }

    def __str__(self) -> str:
        return "+".join("|".join(str(role) for role in group) for group in self.groups)
