"""The largest numbers that a recipe or a command line may give.

They are far above what any run needs. Without them, a slip such as a digit too many would make a plan or a run compute
for hours, or fill the memory, before anything is said. This file imports nothing, so that the command line's options
may use it.
"""

LARGEST = 1_000_000_000
"""Largest number that is computed with and never counted through, such as a number of tokens or of steps."""
MOST_DEVICES = 32_768
"""Most devices, on all nodes together: a plan looks at each rank."""
MOST_SEQUENCES = 65_536
"""Longest list that is made at once: completions of a prompt, rows of a decoding batch, micro-batches."""
MOST_LAYERS = 1_000
"""Most layers that a model may have."""
MOST_PASSES = 10_000
"""Most passes over the same data."""
LARGEST_SEED = 2**32 - 1
"""Largest seed: every library takes 32 bits."""
MOST_SECONDS = 100_000_000
"""Longest time-out, in seconds: about three years. Clocks of libraries overflow far beyond."""
MOST_STALENESS = 1_000
"""Most training steps by which rollouts may be ahead."""
