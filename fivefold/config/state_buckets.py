"""The buckets in which optimizer state goes through a device, which plans count and trainers allocate."""

BUCKET_SIZE = 2**25
"""Elements of a bucket: enough for a transfer at the speed of the link."""
SLOTS = 3
"""Buckets on the device if the state is on the host: one arrives, one is updated, one leaves."""
