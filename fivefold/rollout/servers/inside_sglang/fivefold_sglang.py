"""Runs as SGLang's server, which asks for a key that no other user of the machine sees.

It is on SGLang's path, so it imports nothing of Fivefold, which need not be installed next to SGLang.

Symptom: SGLang listens on a port of the loopback interface, which every user of the machine reaches, with endpoints
    that load pickled tensors.
Cause: it takes its key from the command line alone, which every user sees.
Instead: the key comes by the environment, which only its user sees, and joins the arguments in this process.
Remove this when SGLang listens at a Unix socket or reads its key from the environment.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    key = os.environ.pop("FIVEFOLD_SERVER_KEY", None)
    if key is not None:
        sys.argv += ["--api-key", key]
    # As `python -m sglang.launch_server`: the processes that it spawns import the main module by its name.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
