"""The weight files of a Hugging Face folder, as their headers and their index describe them.

    model.safetensors                                          one file, or
    model.safetensors.index.json ──tensor: file──> shards      several

A safetensors file is the length of its header (8 bytes), the header (JSON: dtype, shape and place of each tensor), and
the data. The size of a file that is whole follows from its header, so nothing beyond it is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from safetensors import SafetensorError, safe_open

from fivefold.families.torch_dist import is_torch_dist
from fivefold.json_text import parsed, read_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
    "*.jinja",
    "*.model",
    "tekken.json",
    "tokenization_*.py",
)
"""Patterns of the files that make up a tokenizer; some have code next to a tokenizer.json."""
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files that say how images and videos become a model's input."""
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf", "*.pt", "*.pth")
"""Patterns of weight files that are not read."""
_FUSED = re.compile(r"(model\.language_model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")
"""Matrices of all experts in one tensor, as folders of Qwen3.5 and of Qwen3-VL with experts have them."""
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""These tensors' names, and the matrices of an expert in each, one after the other."""
_OF_FUSED = re.compile(r"(model\.language_model\.layers\.\d+\.mlp\.experts)\.(\d+)\.((?:gate|up|down)_proj)\.weight")
_JOINT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(?:gate_up|down)_proj(?:_bias)?")
"""Tensors of all experts in one, as GPT-OSS's folders have them; each expert's is a part along the first dimension."""
_OF_JOINT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.((?:gate_up|down)_proj(?:_bias)?)")
_GIT_LFS_POINTER = b"version https://git-lfs"
LENGTH_BYTES = 8
"""Bytes of the length of the header, a little-endian number at the start of the file."""
_LONGEST_HEADER = 100_000_000
"""Most bytes of a header that safetensors reads."""
_LISTED = 3
"""Most names in a line of an error."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, as the file's header describes it."""

    file: str
    """Name of the file, relative to the model's folder."""
    dtype: str
    """Dtype as safetensors writes it, such as `BF16`."""
    shape: tuple[int, ...]
    within: tuple[str, int, int] | None = None
    """The tensor of all experts [E, rows, columns] that an expert's matrix lies in, the expert, and its first row."""
    is_turned: bool = False
    """Whether the matrix lies there as columns [E, columns, rows], and `within` has its first column."""


@dataclass(frozen=True)
class WeightFiles:
    """What the weight files of a folder hold, and what is wrong with them."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    """Tensors of all files whose header can be read, by name."""
    problems: tuple[str, ...]
    """A line for each problem, with the file and the fix; none if every file is there and whole."""
    unread: frozenset[str] = frozenset()
    """Tensors that a problem above keeps from being read, where the index names them."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors that can be read."""
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.tensors[name].shape

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self.tensors[name].file


def survey(folder: Path) -> WeightFiles:
    """Return what the weight files in `folder` hold. Each file is opened once, and only its header is read."""
    # A link that leads nowhere counts as a file that is there: it is then reported by its name.
    has_single, has_index = (os.path.lexists(folder / file) for file in (SINGLE_FILE, INDEX_FILE))
    if not has_index:
        if not has_single:
            return WeightFiles(folder, {}, (_no_weights(folder),))
        return _survey_files(folder, [SINGLE_FILE], {})
    try:
        placed = _read_index(folder / INDEX_FILE)
    except (OSError, ValueError) as error:
        return WeightFiles(folder, {}, (f"{INDEX_FILE} cannot be read ({error}): fetch it again",))
    files = sorted(set(placed.values()))
    if has_single and files != [SINGLE_FILE]:
        # transformers would read the one and the trainer the other.
        problem = f"{SINGLE_FILE} is there next to {INDEX_FILE}, which names other files: delete the one that is stale"
        return WeightFiles(folder, {}, (problem,))
    return _survey_files(folder, files, placed)


def _survey_files(folder: Path, files: Iterable[str], placed: Mapping[str, str]) -> WeightFiles:
    """Return what `files` hold; `placed` is the file of each tensor as the index says, empty without an index."""
    tensors: dict[str, StoredTensor] = {}
    problems = []
    unread: set[str] = set()
    misplaced = []
    for file in files:
        claimed = {name for name, place in placed.items() if place == file}
        try:
            held = _read_header(folder, file)
        except _DamagedFileError as error:
            lost = f" ({len(claimed)} tensors, among them {min(claimed)})" if claimed else ""
            problems.append(f"{file}{lost} {error}")
            unread |= claimed
            continue
        tensors |= {name: tensor for name, tensor in held.items() if placed.get(name, file) == file}
        misplaced += sorted(claimed - held.keys())
    if misplaced:
        shown = ", ".join(f"{name} in {placed[name]}" for name in misplaced[:_LISTED])
        more = f" and {len(misplaced) - _LISTED} more" if len(misplaced) > _LISTED else ""
        problems.append(
            f"{INDEX_FILE} places tensors in files that do not hold them: {shown}{more}: fetch the index and these "
            "files again, from one version of the model"
        )
    single = {
        part: expert for name, tensor in tensors.items() for part, expert in _single_experts(name, tensor, tensors)
    }
    return WeightFiles(folder, single, tuple(problems), frozenset(unread.union(misplaced)))


def _single_experts(
    name: str, tensor: StoredTensor, tensors: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensor; in place of one of the `tensors` that holds all experts' matrices, yield each matrix."""
    if _JOINT.fullmatch(name) is not None:
        for expert in range(tensor.shape[0]):
            yield part_of_joint(name, expert), replace(tensor, shape=tensor.shape[1:], within=(name, expert, 0))
        return
    match = _FUSED.fullmatch(name)
    if match is None or len(tensor.shape) != 3:
        yield name, tensor
        return
    is_turned = _is_turned(tensors, match[1])
    n_experts, *matrix = tensor.shape
    rows, columns = reversed(matrix) if is_turned else matrix
    kinds = FUSED[match[2]]
    share = rows // len(kinds)
    for expert, (index, kind) in product(range(n_experts), enumerate(kinds)):
        part = replace(tensor, shape=(share, columns), within=(name, expert, index * share), is_turned=is_turned)
        yield f"{match[1]}.{expert}.{kind}.weight", part


def _is_turned(tensors: Mapping[str, StoredTensor], layer: str) -> bool:
    """Return whether the experts of a layer are [E, in, out] in files, and not [E, out, in].

    The inputs of gate and up are the outputs of down, and in neither form are other sizes equal at these places.
    """
    pair = [tensors.get(f"{layer}.{kind}") for kind in FUSED]
    if None in pair or any(len(each.shape) != 3 for each in pair if each is not None):
        return False
    gate_up, down = (each.shape for each in pair if each is not None)
    return gate_up[1] == down[2]


def of_fused(name: str) -> tuple[str, int, str] | None:
    """Return the tensor of all experts that an expert's matrix is part of in some files, the expert, and the
    matrix's own name among `FUSED`; None: it is of no such expert."""
    match = _OF_FUSED.fullmatch(name)
    if match is None:
        return None
    [whole] = (whole for whole, kinds in FUSED.items() if match[3] in kinds)
    return f"{match[1]}.{whole}", int(match[2]), match[3]


def of_joint(name: str) -> tuple[str, int] | None:
    """Return the tensor of all experts in files that a joint expert's tensor is part of, and the expert; None: none."""
    match = _OF_JOINT.fullmatch(name)
    return None if match is None else (f"{match[1]}.{match[3]}", int(match[2]))


def part_of_joint(whole: str, expert: int) -> str:
    """Return the name of an expert's part of the tensor `whole` of all experts."""
    path, _, kind = whole.rpartition(".")
    return f"{path}.{expert}.{kind}"


def _no_weights(folder: Path) -> str:
    others = sorted({file.name for pattern in _OTHER_WEIGHTS for file in folder.glob(pattern)})
    if shards := [name for name in others if _SHARD.fullmatch(name)]:
        shown = shards[0] if len(shards) == 1 else f"{shards[0]} and {len(shards) - 1} more"
        return f"{INDEX_FILE} is missing next to {shown}, and says which tensor is in which of them: fetch it"
    problem = f"{SINGLE_FILE} and {INDEX_FILE} are both missing, and only safetensors files are read"
    if any(name.endswith(".bin") for name in others):
        load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype='auto')"
        fix = f"convert it once with transformers: {load}.save_pretrained({str(folder)!r})"
    elif any(name.endswith(".gguf") for name in others):
        fix = "convert it once with `fivefold convert`"
    elif is_torch_dist(folder):
        fix = (
            "the folder is a Megatron-Core checkpoint: convert it with `fivefold convert`, or train from it with "
            f"actor.megatron.use_dist_checkpointing=true actor.megatron.dist_checkpointing_path={folder}"
        )
    else:
        fix = "fetch the weights, or set actor.init_from_scratch=true to train from random ones"
    found = f" (found {', '.join(others[:_LISTED])}{', ...' if len(others) > _LISTED else ''})" if others else ""
    return f"{problem}{found}: {fix}"


def _read_index(file: Path) -> dict[str, str]:
    """Return the file of each tensor.

    Raises:
        OSError: the index cannot be opened.
        ValueError: it is not JSON, or not an index.
    """
    placed = read_object(file).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(name, str) for name in placed.values()):
        raise ValueError("it has no weight_map from tensors to files")
    return placed


class _DamagedFileError(Exception):
    """A file that cannot be read; the message continues after the file's name."""


def _read_header(folder: Path, name: str) -> dict[str, StoredTensor]:
    """Return the tensors of the file `name` in a folder, which may lie in a folder within, by their names.

    Raises:
        _DamagedFileError: the file is missing, or it is not a whole safetensors file.
    """
    file = folder / name
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (it is no mapping)
            return {
                key: StoredTensor(name, tensor.get_dtype(), tuple(tensor.get_shape())) for key, tensor in slices.items()
            }
    except FileNotFoundError as error:
        raise _DamagedFileError("is missing: complete the download") from error
    except OSError as error:
        raise _DamagedFileError(f"cannot be opened: {error}") from error
    except SafetensorError as error:
        raise _DamagedFileError(_damage(file, error)) from error


def _damage(file: Path, error: SafetensorError) -> str:
    """Return what is wrong with a file that safetensors refuses, and the fix."""
    with file.open("rb") as opened:
        if opened.read(len(_GIT_LFS_POINTER)) == _GIT_LFS_POINTER:
            return "is a Git LFS pointer instead of the weights: run `git lfs pull` in the folder"
    size, whole = file.stat().st_size, _described_bytes(file)
    if whole is not None and size < whole:
        return f"is truncated: it has {size:,} bytes, and its header describes {whole:,}: fetch it again"
    return f"has {size:,} bytes and is not a whole safetensors file ({error}): fetch it again"


def _described_bytes(file: Path) -> int | None:
    """Return the bytes that a file should have (at least, if it ends in its header); None for a broken header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
        if length > _LONGEST_HEADER:
            return None
        header = opened.read(length)
    if len(header) < length:
        return LENGTH_BYTES + length
    try:
        tensors = [entry for name, entry in parsed(header).items() if name != "__metadata__"]
        return LENGTH_BYTES + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):  # it may be any JSON
        return None
