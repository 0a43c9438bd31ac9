"""Llama 2 and 3, SmolLM2, and others that declare themselves `llama`."""

from __future__ import annotations

from fivefold.families.decoder import read_dense
from fivefold.families.family import Family, GGUFArchitecture

LLAMA = Family(
    "llama",
    read=read_dense,
    # Files from before grouped-query attention do not state the key/value heads.
    defaults={"num_key_value_heads": None},
    gguf=GGUFArchitecture("llama", "LlamaForCausalLM", rotates_neighbours=True),
)
