from fivefold.config.dialects.dialect import Dialect
DIALECT = Dialect("ROLL", lambda d: None, {})
