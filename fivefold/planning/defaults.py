"""Defaults of a plan if neither the recipe nor the command line decides. Help texts name these numbers."""

from __future__ import annotations

DEFAULT_GPU = "h100-80g"
DEFAULT_GPUS_PER_NODE = 8
DEFAULT_SEQUENCE_LENGTH = 4096
"""Tokens of a sequence, prompt and response."""
DEFAULT_SEQUENCES = 256
"""Sequences of an optimizer step."""
DEFAULT_MICRO_TOKENS = 8192
"""Tokens of a micro-batch."""
