"""Run a command beside a Ray cluster of pretend nodes on this machine, whose ranks may share one GPU.

    python benchmarks/pretend_nodes.py 4 fivefold train recipes/quickstart.yaml scheduler.type=ray \\
        scheduler.address={address} cluster.n_nodes=4 cluster.n_gpus_per_node=1 ...

Each node has an address of its own on the loopback interface, and one GPU: the first of the machine. `{address}` is
that of the head. NCCL lets several ranks share a GPU from version 2.30 on, if NCCL_MULTI_RANK_GPU_ENABLE=1; LD_PRELOAD
puts such a version before torch's own. So layouts and replicas over nodes run with all of their communication on one
GPU: slowly, because the ranks take turns, but as they do on several.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.nodes.cluster import PretendCluster


def main() -> None:
    n_nodes, command = int(sys.argv[1]), sys.argv[2:]
    with PretendCluster.running(n_nodes, n_gpus=1) as cluster:
        words = [word.replace("{address}", cluster.address) for word in command]
        code = subprocess.run(words, env=dict(cluster.environment)).returncode
    sys.exit(code)


if __name__ == "__main__":
    main()
