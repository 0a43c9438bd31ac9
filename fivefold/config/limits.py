"""The largest numbers that a recipe or a command line may give.

They are far above what any run needs. Without them, a slip such as a digit too many would make a plan or a run compute
for hours, or fill the memory, before anything is said. This file imports nothing, so that the command line's options
may use it.
"""

LARGEST = 1_000_000_000
"""Of numbers that are computed with and never counted through, such as tokens and steps."""
MOST_DEVICES = 32_768
"""Of devices, on all nodes together; a plan looks at each rank."""
MOST_SEQUENCES = 65_536
"""Of lists that are made at once: completions of a prompt, rows of a decoding batch, micro-batches."""
MOST_LAYERS = 1_000
"""Of a model's layers."""
MOST_PASSES = 10_000
"""Of passes over the same data."""
LARGEST_SEED = 2**32 - 1
"""Of seeds: every library takes 32 bits."""
MOST_SECONDS = 100_000_000
"""Of time-outs: about three years. Clocks of libraries overflow far beyond."""
MOST_STALENESS = 1_000
"""Of training steps by which rollouts may be ahead."""
