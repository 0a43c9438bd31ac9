"""Llama 2 and 3, SmolLM2, and others that declare themselves `llama`."""

from __future__ import annotations

from fivefold.bridge.families.family import Family

LLAMA = Family("llama")
