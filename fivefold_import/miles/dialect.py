"""miles, which took slime's flags over, and has some others."""

from __future__ import annotations

from functools import partial

from fivefold_import.dialect import Conversion, Dialect
from fivefold_import.slime import dialect as slime
from fivefold_import.slime import files
from fivefold_import.slime.rules import RULES as OF_SLIME
from fivefold_import.tables import read_tables
from fivefold_import.tasks import REINFORCEMENT, SFT

RULES = read_tables("miles", {}, {"slime": {"top": OF_SLIME}})["top"]
DIALECT = Dialect(
    "miles",
    {
        REINFORCEMENT: Conversion(partial(slime.convert, rules=RULES), RULES.defaults),
        SFT: Conversion(partial(slime.convert_given, rules=RULES), {}),
    },
    slime.SIGNS,
    files.merge,
    files.read,
)
