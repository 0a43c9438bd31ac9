"""Blocks of data that a page unpacks when it shows them: gzip, and base64 where they stand in the page itself.

table block    uint32 size of the header | header, JSON | padding | float32 columns, one behind the other
text block     JSON
script block   JavaScript
"""

from __future__ import annotations

import base64
import gzip
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.observe.jsonl import finite

LEVEL = 6
"""Level of gzip: higher ones take several times as long for a few percent."""
WORD = 4
"""Bytes of a number. Columns begin at a multiple of it."""


def table_block(columns: Mapping[str, npt.NDArray[np.float32]], **facts: Any) -> bytes:
    """Return float32 columns [n], by name, as one block; `facts` stand in its header."""
    n = len(next(iter(columns.values()), ()))
    header = json.dumps({"names": list(columns), "n": n, **finite(facts)}).encode()
    header += b" " * (-len(header) % WORD)
    body = b"".join(np.ascontiguousarray(column, dtype="<f4").tobytes() for column in columns.values())
    return _packed(struct.pack("<I", len(header)) + header + body)


def text_block(value: Any) -> bytes:
    """Return any value that JSON can hold as one block."""
    return _packed(json.dumps(finite(value), ensure_ascii=False, separators=(",", ":")).encode(errors="replace"))


def script_block(source: str) -> bytes:
    """Return a script as one block."""
    return _packed(source.encode())


def inline(block: bytes) -> str:
    """Return a block as it stands in a page."""
    return base64.b64encode(block).decode()


def _packed(content: bytes) -> bytes:
    return gzip.compress(content, LEVEL, mtime=0)
