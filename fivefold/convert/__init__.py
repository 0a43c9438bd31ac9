"""Other model formats to Hugging Face folders."""

from __future__ import annotations

from fivefold.convert.gguf_model import convert_gguf

__all__ = ["convert_gguf"]
