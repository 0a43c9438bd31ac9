"""Print the oldest minor release of each library that pyproject.toml admits, as constraints for pip.

    python scripts/floors.py > floors.txt
    PIP_CONSTRAINT=floors.txt VENV=.venv-floors bash scripts/install.sh

torch is left out: `scripts/install.sh` names its release.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
EXTRAS = ("gguf", "report", "tests", "dev")
"""What `scripts/install.sh` installs."""


def floors() -> Iterator[str]:
    """Yield `name==version.*` of each requirement that has a least version."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    texts = [*project["dependencies"], *(text for name in EXTRAS for text in project["optional-dependencies"][name])]
    for requirement in map(Requirement, texts):
        least = [each.version for each in requirement.specifier if each.operator == ">="]
        if least and requirement.name != "torch":
            version = least[0] if "." in least[0] else f"{least[0]}.0"
            yield f"{requirement.name}=={version}.*"


if __name__ == "__main__":
    print("\n".join(floors()))
