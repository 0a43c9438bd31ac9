"""Stand-ins for the programs that the Slurm script of docs/cluster.md calls: `slurm_stand_in.py NAME ARGUMENTS`.

There are the nodes n1 and n2, with the addresses 127.0.0.2 and 127.0.0.3. Ray is the real one, with options that make
it small. `fivefold train` reserves the devices of its recipe, prints the nodes, and exits with 130.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from tests.nodes.cluster import NO_SPARE_WORKERS, ROOT, small

ADDRESSES = {"n1": "127.0.0.2", "n2": "127.0.0.3"}
HERE = "STAND_IN_ADDRESS"
"""Variable for the address of the node that a program runs on."""


def srun(words: list[str]) -> int:
    """Run a command on the nodes that the options name."""
    options = {}
    while words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        options[name] = value
    nodes = [options["--nodelist"]] if "--nodelist" in options else [n for n in ADDRESSES if n != options["--exclude"]]
    assert options["--nodes"] == options["--ntasks"] == str(len(nodes)), options
    running = [subprocess.Popen(words, env={**os.environ, HERE: ADDRESSES[node]}) for node in nodes]
    return max(process.wait() for process in running)


def scontrol(words: list[str]) -> int:
    """Print the names of the job's nodes, or write down that the job was put into the queue again."""
    if words == ["show", "hostnames", "n[1-2]"]:
        print("\n".join(ADDRESSES))
    else:
        print("scontrol", *words)
    return 0


def hostname(words: list[str]) -> int:
    """Print the addresses of the first node."""
    assert words == ["-I"]
    print(ADDRESSES["n1"], "10.0.0.1 ")
    return 0


def ray(words: list[str]) -> int:
    """Run Ray's own command."""
    folder = Path(tempfile.mkdtemp(dir=os.environ["STAND_IN_FOLDER"]))
    options = small(os.environ[HERE], 8, folder) if words[0] == "start" else []
    program = Path(sys.executable).with_name("ray")
    os.execve(program, [str(program), *words, *options], {**os.environ, **NO_SPARE_WORKERS})


def fivefold(words: list[str]) -> int:
    """Reserve the devices that the recipe asks for, as a run does that is interrupted afterwards."""
    from tests.nodes.driver import open_session

    assert words[:2] == ["train", "recipe.yaml"]
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", words[2:], TrainRecipe)
    assert recipe.recover.save_before == 3.75 * 3600
    folder = Path(os.environ["STAND_IN_FOLDER"])
    with open_session(recipe.scheduler.address, folder, recipe.cluster.n_nodes, 8) as session:
        print("nodes", *(node.host for node in session.nodes), flush=True)
    return 130


PROGRAMS = {program.__name__: program for program in (srun, scontrol, hostname, ray, fivefold)}

if __name__ == "__main__":
    sys.exit(PROGRAMS[sys.argv[1]](sys.argv[2:]))
