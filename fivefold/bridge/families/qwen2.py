"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from fivefold.bridge.families.family import Family

QWEN2 = Family("qwen2")
