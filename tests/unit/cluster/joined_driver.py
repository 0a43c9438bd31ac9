"""A run on a Ray cluster that is already running: prints, as JSON, the devices that its workers see."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import engines

from fivefold.cluster.role import Role
from fivefold.cluster.session import Session
from fivefold.config.schema.machines import ClusterConfig, SchedulerConfig
from fivefold.layout.placement import Device
from fivefold.observe.timers import PhaseTimers

if __name__ == "__main__":
    address, logs = sys.argv[1:3]
    try:
        impatient = SchedulerConfig(type="ray", address=address, wait_s=1)
        Session.open(impatient, ClusterConfig(n_gpus_per_node=5), Path(logs), PhaseTimers())
    except ValueError as error:
        refused = str(error)
    # A driver before this one gives its devices back a while after its end.
    scheduler = SchedulerConfig(type="ray", address=address, wait_s=engines.SOON_S)
    devices = [Device(0, 0), Device(0, 1)]
    with Session.open(scheduler, ClusterConfig(n_gpus_per_node=3), Path(logs), PhaseTimers()) as session:
        roles = (Role("actor", devices, engines.Engine), Role("rollout", devices[::-1], engines.Engine))
        groups = session.launch(*roles) if "launch" in sys.argv else {}
        seen = {name: group.call(engines.Engine.environment, "CUDA_VISIBLE_DEVICES") for name, group in groups.items()}
    print(json.dumps({"refused": refused, "seen": seen}))
