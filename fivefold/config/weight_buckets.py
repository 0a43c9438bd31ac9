"""The buckets in which weights travel from a trainer to a rollout, which plans count and trainers allocate."""

GATHER_BYTES = 256 * 2**20
"""Bytes of full tensors that a trainer gathers at one time, unless one is larger."""
DEVICE_BYTES = 512 * 2**20
"""Bytes of a buffer that an engine reads on the trainer's device, unless a tensor is larger. Loaders take long for a
tensor, not for a bucket."""
HOST_BYTES = 128 * 2**20
"""Bytes of a bucket that goes through host memory; it is filled on the trainer's device."""
IPC_BUFFERS = 2
"""Buffers with CUDA IPC: the engine reads one while the other is filled."""
NCCL_BUFFERS = 1
"""Buffers with NCCL, which has sent a bucket before the next is filled."""
