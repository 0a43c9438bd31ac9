"""Devices that an actor and a rollout share: who has how much of their memory, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fivefold.config.schema.engine import MicroBatchConfig
from fivefold.engine.contract import OFFLOADABLE, Offloadable
from fivefold.engine.packing import BatchPlanner
from fivefold.layout.parser import parse_role
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.hand_over import RolesInTurn
from fivefold.roles.models import TrainedModel, Trainer, Turn
from fivefold.roles.rollout import Rollout
from fivefold.roles.trainer_worker import TrainerWorker
from fivefold.roles.weight_sync import WeightSync

PARAMS, GRADS, OPTIMIZER, BUCKETS, CACHED = 20, 40, 60, 1, 7
SIZES: dict[Offloadable, int] = {"params": PARAMS, "grads": GRADS, "optimizer": OPTIMIZER}


class Device:
    """Memory that both roles use; `peak` is the most that both had together."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}
        self.peak = 0
        self.memory = 1000

    def set(self, name: str, size: int) -> None:
        self.used[name] = size
        self.peak = max(self.peak, sum(self.used.values()))


class SharedRollout(Rollout):
    """An engine whose cache takes all that the actor leaves of `memory` at that moment."""

    device_share = None

    def __init__(self, device: Device, memory: int) -> None:
        self.shares_devices, self.version = True, None
        self._device, self._memory = device, memory
        self.cache = self.used_while_sent = 0

    def can_generate(self) -> bool:
        return True

    def sleep(self) -> None:
        self.version = None
        self._device.set("rollout's weights", 0)
        self._device.set("cache", 0)

    def wake_weights(self) -> bool:
        self._device.set("rollout's weights", PARAMS)
        return True

    def wake(self) -> None:
        self.cache = self._memory - sum(self._device.used.values())
        self._device.set("cache", self.cache)

    def take_weights(self, version: int) -> None:
        assert self._device.used["rollout's weights"] == PARAMS
        self.used_while_sent = sum(self._device.used.values())


class SharedGroup:
    """The processes of a role: the first has all that is counted, and the second half of it."""

    def __init__(self, device: Device, prefix: str = "") -> None:
        self._device, self._prefix = device, prefix

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        if method is TrainerWorker.release_cache:
            self._device.set("activations in torch's cache", 0)
            return [None, None]
        if method is TrainerWorker.free_memory:
            return [self._device.memory - sum(self._device.used.values()), None]
        size = {TrainerWorker.offload: lambda kind: 0, TrainerWorker.onload: SIZES.__getitem__}[method]
        before = sum(self._device.used.values())
        for kind in args[0]:
            self._device.set(self._prefix + kind, size(kind))
        moved = abs(sum(self._device.used.values()) - before)
        return [moved, moved // 2]


class SharedActor(Actor):
    def __init__(self, device: Device, offloaded: tuple[Offloadable, ...], *, streams_frozen: bool = False) -> None:
        layout = parse_role("megatron:d2").resolve(2)
        planner = BatchPlanner.of(MicroBatchConfig(), layout, 100.0)
        trainer = Trainer(SharedGroup(device), planner)  # type: ignore[arg-type]
        super().__init__(trainer, away=offloaded, streams_frozen=streams_frozen)
        self._device = device
        for kind, size in SIZES.items():
            device.set(kind, size)

    def train(self) -> None:
        assert all(self._device.used[kind] == size for kind, size in SIZES.items())
        self._device.set("activations in torch's cache", CACHED)


class SharedSync(WeightSync):
    """Fills buckets of the actor's weights, which the rollout takes."""

    def __init__(self, device: Device, rollout: SharedRollout) -> None:
        self._device, self._rollout = device, rollout
        self.needs = PARAMS
        """Bytes of the actor's weights on the device while they are sent."""

    def send(self, version: int) -> None:
        assert self._device.used["params"] == self.needs
        self._device.set("buckets", BUCKETS)
        self._rollout.take_weights(version)
        self._device.set("buckets", 0)


def roles_of(
    actor: SharedActor, rollout: SharedRollout, further: Mapping[str, TrainedModel] | None = None
) -> RolesInTurn:
    return RolesInTurn(actor, further or {}, rollout=rollout, sync=SharedSync(rollout._device, rollout))


@pytest.mark.parametrize("offloaded", [(), ("grads",), ("grads", "optimizer"), OFFLOADABLE])
def test_the_cache_comes_last_and_gets_all_that_the_actor_leaves(offloaded: tuple[Offloadable, ...]) -> None:
    device, timers = Device(), PhaseTimers()
    kept = sum(size for kind, size in SIZES.items() if kind not in offloaded)
    memory = PARAMS + GRADS + OPTIMIZER + PARAMS + BUCKETS
    actor, rollout = SharedActor(device, offloaded), SharedRollout(device, memory)
    roles = roles_of(actor, rollout)
    for step in range(3):
        if step > 0:
            with roles.training(timers):
                actor.train()
        roles.send_weights(step, timers)
        assert rollout.version == step
        assert rollout.cache == memory - kept - PARAMS
        # Two copies of the weights, and what the actor keeps of the rest.
        assert rollout.used_while_sent == PARAMS + PARAMS + BUCKETS + kept - ("params" not in offloaded) * PARAMS
    assert device.peak == memory
    assert set(timers.take()) == {"hand-over", "weight sync"}


def test_weights_that_are_sent_from_the_host_are_never_on_the_device_twice() -> None:
    device, timers = Device(), PhaseTimers()
    actor = SharedActor(device, OFFLOADABLE, streams_frozen=True)
    rollout = SharedRollout(device, PARAMS + BUCKETS)
    roles = roles_of(actor, rollout)
    assert isinstance(roles.sync, SharedSync)
    roles.sync.needs = 0
    for step in range(3):
        if step > 0:
            with roles.training(timers):
                actor.train()
        roles.send_weights(step, timers)
        assert rollout.used_while_sent == PARAMS + BUCKETS
        assert device.used["params"] == 0


class ServerRollout(SharedRollout):
    """An engine whose cache takes the rest of the share that it has had from its start."""

    def __init__(self, device: Device, share: int) -> None:
        super().__init__(device, share)
        self.device_share = share

    def wake(self) -> None:
        self.cache = self.device_share - PARAMS
        self._device.set("cache", self.cache)


def test_the_weights_go_too_once_the_cache_does_not_fit_beside_them() -> None:
    device, timers = Device(), PhaseTimers()
    share = PARAMS + 30
    device.memory = PARAMS + share + 3
    actor, rollout = SharedActor(device, ("grads", "optimizer")), ServerRollout(device, share)
    roles = roles_of(actor, rollout)
    roles.send_weights(0, timers)
    assert (device.used["params"], rollout.cache) == (PARAMS, 30)
    with roles.training(timers):
        device.set("segments that cannot be released", 4)
    for version in (1, 2):
        roles.send_weights(version, timers)
        assert (device.used["params"], rollout.cache) == (0, 30)
        assert sum(device.used.values()) <= device.memory
        with roles.training(timers):
            assert device.used["params"] == PARAMS


class DyingServer(SharedRollout):
    """A server that dies while it takes the weights of version 1 for the first time."""

    def __init__(self, device: Device, memory: int) -> None:
        super().__init__(device, memory)
        self.taken: list[int] = []

    def can_generate(self) -> bool:
        return self.taken != [0, 1]

    def take_weights(self, version: int) -> None:
        super().take_weights(version)
        self.taken.append(version)


def test_a_server_that_dies_while_it_takes_weights_gets_them_again_in_the_same_memory() -> None:
    device, timers = Device(), PhaseTimers()
    memory = PARAMS + PARAMS + BUCKETS + GRADS + OPTIMIZER
    rollout = DyingServer(device, memory)
    roles = roles_of(SharedActor(device, OFFLOADABLE), rollout)
    for version in (0, 1):
        roles.send_weights(version, timers)
        with roles.training(timers):
            pass
    assert rollout.taken == [0, 1, 1]
    roles.send_weights(2, timers)
    roles.send_weights(2, timers)
    assert rollout.taken == [0, 1, 1, 2, 2]
    assert device.peak == memory


class DyingAsleep(ServerRollout):
    """A server that dies while it sleeps for the first time, and takes its whole share when it is started again."""

    is_dead = False
    n_sleeps = n_starts = 0

    def sleep(self) -> None:
        super().sleep()
        self.n_sleeps += 1
        self.is_dead = self.n_sleeps == 1

    def wake_weights(self) -> bool:
        return not self.is_dead and super().wake_weights()

    def revive(self) -> None:
        assert self.is_dead
        self.is_dead = False
        self.n_starts += 1
        self._device.set("cache", self.device_share)
        self._device.set("cache", 0)


@pytest.mark.parametrize("offloaded", [("grads", "optimizer"), OFFLOADABLE])
def test_a_server_that_dies_asleep_is_started_again_in_the_memory_of_one_that_is_awake(
    offloaded: tuple[Offloadable, ...],
) -> None:
    device, timers = Device(), PhaseTimers()
    kept = sum(size for kind, size in SIZES.items() if kind not in offloaded)
    rollout = DyingAsleep(device, share=PARAMS + 100)
    roles = roles_of(SharedActor(device, offloaded), rollout)
    for version in range(3):
        roles.send_weights(version, timers)
        assert (rollout.version, device.used["params"]) == (version, kept)
        with roles.training(timers):
            assert all(device.used[kind] == size for kind, size in SIZES.items())
    assert rollout.n_starts == 1
    assert device.peak == PARAMS + 100 + kept


def test_a_step_counts_what_the_actor_moves_off_and_back() -> None:
    device, timers = Device(), PhaseTimers()
    roles = roles_of(SharedActor(device, ("grads", "optimizer")), SharedRollout(device, 0))
    roles.send_weights(0, timers)
    roles.take_moved()
    assert roles.take_moved() == {}
    with roles.training(timers):
        pass
    roles.send_weights(1, timers)
    moved = (GRADS + OPTIMIZER) / 1e9
    assert roles.take_moved() == {"offload/freed_gb": moved, "offload/restored_gb": moved}


def test_a_checkpoint_of_offloaded_state_gives_the_rollout_its_weights_back() -> None:
    device, timers = Device(), PhaseTimers()
    memory = PARAMS + GRADS + OPTIMIZER
    actor, rollout = SharedActor(device, ("grads", "optimizer")), SharedRollout(device, memory)
    roles = roles_of(actor, rollout)
    with roles.on_device(actor, timers, "params", "optimizer"):
        # Before the first weights there are none to send again.
        assert device.used["optimizer"] == OPTIMIZER
    assert rollout.version is None
    roles.send_weights(4, timers)
    with roles.on_device(actor, timers, "params"):
        assert (device.used["optimizer"], rollout.version) == (0, 4)
    with roles.on_device(actor, timers, "params", "optimizer"):
        assert (device.used["optimizer"], rollout.version) == (OPTIMIZER, None)
    assert (device.used["optimizer"], rollout.version) == (0, 4)


def test_a_critic_is_on_shared_devices_only_while_it_works() -> None:
    device, timers = Device(), PhaseTimers()
    actor, rollout = SharedActor(device, OFFLOADABLE), SharedRollout(device, 10 * PARAMS)
    trainer = Trainer(SharedGroup(device, "critic's "), actor.trainer._planner)  # type: ignore[arg-type]
    critic = TrainedModel(trainer, Turn(OFFLOADABLE, actor, OFFLOADABLE, actor.in_turn))
    roles = roles_of(actor, rollout, {"critic": critic})

    def used() -> set[str]:
        return {name for name, size in device.used.items() if size and name not in ("cache", "rollout's weights")}

    own = {f"critic's {kind}" for kind in OFFLOADABLE}
    roles.send_weights(0, timers)
    assert used() == set()
    with roles.training(timers):
        with critic.working("params"):
            assert used() == {"critic's params"}
        assert used() == set(OFFLOADABLE)
        with critic.working(*OFFLOADABLE):
            assert used() == own
        actor.train()
    roles.send_weights(1, timers)
    assert used() == set()
    with roles.on_device(critic, timers, "params", "optimizer"):
        assert used() == {"critic's params", "critic's optimizer"}
        assert rollout.version is None
    assert (used(), rollout.version) == (set(), 1)
    with roles.on_device(TrainedModel(trainer), timers, "params"):
        assert rollout.version == 1


def test_a_frozen_model_works_beside_the_training_only_on_devices_of_its_own() -> None:
    device, timers = Device(), PhaseTimers()
    roles = roles_of(actor := SharedActor(device, OFFLOADABLE), SharedRollout(device, 10 * PARAMS))
    alone, shared = FrozenModel(actor.trainer), FrozenModel(actor.trainer, Turn(neighbour=actor, lock=actor.in_turn))
    worked = {id(model): threading.Event() for model in (alone, shared)}

    def work(model: FrozenModel) -> None:
        with model.working():
            worked[id(model)].set()

    threads = [threading.Thread(target=work, args=(model,), daemon=True) for model in (alone, shared)]
    roles.send_weights(0, timers)
    with roles.training(timers):
        for thread in threads:
            thread.start()
        assert worked[id(alone)].wait(120)
        assert not worked[id(shared)].wait(0.05)
    assert worked[id(shared)].wait(120)
