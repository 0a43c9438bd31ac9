"""Hugging Face folders with low-rank adapters, as PEFT writes them, merged into the weights: W + scale * B A."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fivefold.bridge.adapters import scale_of
from fivefold.bridge.bridge import checked_source
from fivefold.bridge.decoder import expected_tensors, file_tensors
from fivefold.bridge.hf_reader import HFWeights, resolve_model_folder
from fivefold.bridge.hf_writer import save_hf
from fivefold.bridge.shard_plan import TensorSpec
from fivefold.bridge.weight_files import of_joint, part_of_joint
from fivefold.config.paths import user_path
from fivefold.convert.megatron import Converted, has_further_layers, left_out
from fivefold.convert.target import Progress, free_target
from fivefold.families.adapters import CONFIG, MATRICES, PREFIX, WEIGHTS, adapter_name
from fivefold.families.read import load_shape
from fivefold.json_text import read_object


def convert_adapted(
    source: str | Path,
    adapters: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write a model with adapters merged into its weights, in float32 and then rounded to their dtype.

    Args:
        source: the model's folder.
        adapters: the folder of adapters.
        out: the folder to write. It appears when it is complete.
        dtype: dtype of the weights; None: as they are.
        overwrite: whether an earlier model folder at `out` may be replaced.
        progress: receives how far the conversion is.

    Raises:
        ValueError: no such model or adapters, adapters of other layers than the model has, or something at `out`.
        OSError: the disk is full, or the file system refuses to write.
    """
    target, folder = free_target(out, overwrite=overwrite), resolve_model_folder(source)
    shape, given = load_shape(folder), AdapterFiles(user_path(adapters))
    with HFWeights(folder) as stored:
        checked_source(shape, stored)
        given.check(expected_tensors(shape))
        specs = {
            name: TensorSpec(dtype or stored.dtype(parts_of(name, full, stored)[0]) or torch.bfloat16, full)
            for name, full in file_tensors(shape).items()
        }
        save_hf(target, _merged(stored, given, specs, progress), folder, tensors=specs)
        return Converted(shape, len(specs), left_out(further_layers=has_further_layers(stored, shape)))


class AdapterFiles:
    """A folder of adapters, by the names of the weights that they adapt."""

    def __init__(self, folder: Path) -> None:
        """Open the folder.

        Raises:
            ValueError: it cannot be read, or holds more than LoRA's matrices.
        """
        self._folder = folder
        try:
            self._config = read_object(folder / CONFIG)
            self._file = safe_open(folder / WEIGHTS, "pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{str(folder)!r} is no folder of adapters that can be read: {error}") from error
        self._names = {name.removeprefix(PREFIX) for name in self._file.keys()}  # noqa: SIM118 - not a mapping
        for option in ("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save"):
            if self._config.get(option):
                raise ValueError(f"{str(folder)!r} has {option}, which is not merged: only matrices A and B are")

    def check(self, weights: Iterable[str]) -> None:
        """Refuse adapters that the model has no weight for.

        Raises:
            ValueError: naming the first.
        """
        known = {adapter_name(weight, matrix) for weight in weights for matrix in MATRICES}
        if strays := sorted(self._names - known):
            raise ValueError(
                f"{str(self._folder)!r} has {strays[0]}, and {len(strays) - 1} more, for which the model has no "
                "weight: give the model that they adapt"
            )

    def addition(self, weight: str, full: tuple[int, ...]) -> Tensor | None:
        """Return what the adapter of a weight adds to it, float32; None: it has none.

        Raises:
            ValueError: half of it is missing, or it has another size.
        """
        names = adapter_name(weight, "A"), adapter_name(weight, "B")
        if not self._names.intersection(names):
            return None
        for name in names:
            if name not in self._names:
                raise ValueError(f"{str(self._folder)!r} lacks {name}: fetch the adapters again")
        a, b = (self._file.get_tensor(PREFIX + name).float() for name in names)
        if of_joint(weight) is not None:
            full = full[::-1]
        if (len(b), a.shape[1]) != tuple(full):
            raise ValueError(
                f"{str(self._folder)!r} has {names[0]} for {[len(b), a.shape[1]]}, and the weight is {list(full)}: "
                "give the model that they adapt"
            )
        added = scale_of(self._config, weight.removesuffix(".weight"), len(a)) * (b @ a)
        return added if of_joint(weight) is None else added.T


def parts_of(name: str, full: tuple[int, ...], stored: HFWeights) -> list[str]:
    """Return the tensors that make up one of a file: itself, or each expert's part."""
    return [name] if name in stored.names else [part_of_joint(name, expert) for expert in range(full[0])]


def _merged(
    stored: HFWeights, given: AdapterFiles, specs: dict[str, TensorSpec], progress: Progress | None
) -> Iterator[tuple[str, Tensor]]:
    done, total = 0, sum(spec.n_elements for spec in specs.values())
    for name, spec in specs.items():
        parts = []
        for part in parts_of(name, spec.shape, stored):
            weight, added = stored.read(part), given.addition(part, stored.shape(part))
            parts.append((weight if added is None else weight.float() + added).to(spec.dtype))
        yield name, parts[0] if name in stored.names else torch.stack(parts)
        done += spec.n_elements
        if progress is not None:
            progress("writing", done, total)
