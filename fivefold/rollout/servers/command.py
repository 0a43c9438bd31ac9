"""The command line that starts a server, and what is checked of it before anything is started."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.config.paths import resolve_model_path
from fivefold.config.schema.rollout import SpeculativeConfig
from fivefold.families.read import load_shape
from fivefold.json_text import parsed
from fivefold.rollout.replica import ReplicaNode, ReplicaSpec
from fivefold.rollout.servers.client import Address
from fivefold.rollout.servers.dialect import Dialect

RAW_PATCH = 3 * 2 * 14 * 14
"""Numbers of a patch that SGLang's Qwen2.5-VL takes for pixels."""
COPIES = ("--data-parallel", "-dp", "--dp", "--enable-dp-attention")
"""How the arguments of vLLM and SGLang begin that give a replica further copies of the attention, or of all of it."""


def server_command(dialect: Dialect, spec: ReplicaSpec, address: Address) -> list[str]:
    """The program and the arguments that start the server of `spec` on its node, which will listen at `address`."""
    program = [spec.python or sys.executable, "-m", *dialect.program(spec.node)]
    return [*program, *dialect.arguments(spec, address), *spec.arguments]


def check_command(dialect: Dialect, spec: ReplicaSpec) -> None:
    """Refuse a server that is not installed, or whose further arguments repeat what other keys say.

    Raises:
        ValueError: naming the package and how to install it, or the argument, or a key of a model that sees images.
    """
    if spec.python is None and find_spec(dialect.package) is None:
        raise ValueError(
            f"{spec.section}.backend is {spec.backend}, which is not installed next to Fivefold: install it, in a "
            f"separate environment if need be, whose Python {spec.section}.server_python then names"
        )
    if spec.python is not None and shutil.which(spec.python) is None:
        raise ValueError(
            f"{spec.section}.server_python={spec.python} is no program: name the Python of the environment that has "
            f"{spec.backend}, for example /opt/{spec.backend}/bin/python"
        )
    if spec.sees:
        folder = resolve_model_folder(resolve_model_path(spec.path))
        _check_positions(spec, folder)
        _check_patches(spec, folder)
    written = {argument.split("=")[0].replace("_", "-") for argument in spec.arguments}
    if taken := _own_flags(dialect, spec) & written:
        raise ValueError(
            f"{spec.section}.server_args has {', '.join(sorted(taken))}, which follows from other keys of the recipe: "
            "drop it"
        )
    if copies := {name for name in written if name.startswith(COPIES)}:
        raise ValueError(
            f"{spec.section}.server_args has {', '.join(sorted(copies))}, but a replica has no copies of attention: "
            f"drop it, and count replicas in {spec.section}.backend, such as {spec.backend}:d2t4"
        )


def _check_patches(spec: ReplicaSpec, folder: Path) -> None:
    """Refuse a tower that SGLang does not run: it takes patches of another size for features that it has computed.

    Raises:
        ValueError: naming the sizes.
    """
    vision = load_shape(folder).vision
    if spec.backend != "sglang" or vision is None or not vision.is_windowed or vision.patch_values == RAW_PATCH:
        return
    raise ValueError(
        f"{folder} has patches of {vision.patch_values} numbers, and SGLang runs the tower of Qwen2.5-VL only with "
        f"{RAW_PATCH}, as published models have: set {spec.section}.backend=vllm:d1 or transformers:d1"
    )


def _check_positions(spec: ReplicaSpec, folder: Path) -> None:
    """Refuse a model's folder if the server reads other positions of images from it than the trainer has.

    Raises:
        ValueError: naming the key of its config.json.
    """
    config, vision = parsed((folder / "config.json").read_text()), load_shape(folder).vision
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if vision is None or ("mrope_section" in rope and rope.get("mrope_interleaved", False) is vision.is_interleaved):
        return
    wanted = {"mrope_section": list(vision.rope_sections), "mrope_interleaved": vision.is_interleaved}
    raise ValueError(
        f"{folder}/config.json does not tell {spec.backend} how tokens of images turn: write {json.dumps(wanted)} "
        f"among the keys of the language model's rope_parameters, or set {spec.section}.backend=transformers:d1"
    )


def _own_flags(dialect: Dialect, spec: ReplicaSpec) -> set[str]:
    """Every argument that can follow from a recipe, those that `spec` does not give included."""
    from fivefold.families.adapters import AdapterShape
    from fivefold.families.served import ServedAdapters

    node = ReplicaNode(n_nodes=2)
    full = replace(spec, can_sleep=True, memory_fraction=0.5, node=node, sees=True, most_pixels=1)
    adapters = ServedAdapters(AdapterShape(1, None, 1.0), 1, (), ())
    drafts = SpeculativeConfig(method="mtp")
    changes: list[dict[str, Any]] = [
        *({"load_weights": loads, "speculative": drafted} for loads in (False, True) for drafted in (None, drafts)),
        {"adapters": adapters},
        {"sees": False},
    ]
    specs = [replace(full, **change) for change in changes]
    words = [word for each in specs for word in dialect.arguments(each, address=0)]
    return {word for word in words if word.startswith("--")} | dialect.aliases
