"""Qwen3, dense."""

from __future__ import annotations

from fivefold.bridge.families.family import Family

QWEN3 = Family("qwen3")
