"""The frameworks whose files are imported, by the names that the command line knows them by."""

from __future__ import annotations

from typing import Literal

Framework = Literal["areal", "roll", "siirl", "trinity", "verl"]
