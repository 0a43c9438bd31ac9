"""Runs from Python, as docs/python.md shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fivefold import Run
from fivefold.config.problems import RecipeError
from tests.e2e.conftest import ROOT
from tests.forks import run_forked

PAGE = ROOT / "docs" / "python.md"
CHECK = """
import json
print(json.dumps({
    "first": first, "steps": [row["step"] for row in rewards_of], "summary": summary["steps"], "best": sorted(best),
}))
"""


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    """The blocks run one after another, in one process, below a folder of their own."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    blocks[0] = blocks[0].replace('["total_train_steps=4"', '["valid_dataset.limit=8", "total_train_steps=4"')
    blocks[1] += "\nfirst = [row['step'] for row in run.metrics()]\n"
    blocks[1] += "assert '\"interrupted\"' in (run.folder / 'status.json').read_text()\n"
    blocks[3] += "\nrewards_of = run.metrics()\nassert len(rewards) == 4\n"
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks) + CHECK)
    recipe = (ROOT / "recipes" / "quickstart.yaml").read_text()
    assert "  batch_size: 32 " in recipe
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "quickstart.yaml").write_text(recipe.replace("  batch_size: 32 ", "  batch_size: 4 "))
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = run_forked([str(program)], cwd=tmp_path, environment=environment, timeout=500)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "2 of 4: reward" in done.stdout
    assert "3 of 4" not in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"first": [1, 2], "steps": [1, 2, 3, 4], "summary": 4, "best": [1e-5, 1e-4]}
    run = tmp_path / "runs" / "quickstart" / "from-python"
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_a_recipe_is_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"actor\.optimizer\.lrr"):
        Run(ROOT / "recipes" / "quickstart.yaml", ["actor.optimizer.lrr=1"])
    with pytest.raises(RecipeError, match="train_dataset"):
        Run({"experiment_name": "x", "actor": {"path": "a"}, "gconfig": {}})
    run = Run(ROOT / "recipes" / "tiny-moe-sft.yaml", [f"cluster.fileroot={tmp_path}"])
    assert run.folder.parent.parent == tmp_path
    assert run.metrics() == []
    with pytest.raises(ValueError, match="are for a file or mappings"):
        Run(run.recipe, ["seed=2"])
