"""Reads the rows of a data set from a file, a folder, the package, the Hugging Face hub or ModelScope."""

from __future__ import annotations

import hashlib
import random
import re
import struct
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from itertools import islice
from pathlib import Path
from typing import Any

from fivefold.config.paths import user_path
from fivefold.config.schema.data import RowsConfig
from fivefold.config.user_code import load_user_object, one_process, user_traceback
from fivefold.data.files import READERS, Row, read_file

SUFFIXES = tuple(READERS)
_TABLES = (".jsonl", ".parquet")
"""Suffixes that only data sets have. A JSON or CSV file next to them most often describes the data."""
DEFAULT_SPLIT = "train"
_SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Names of splits by which files of a folder are recognised as one split each."""
_PACKAGE = "package:"
_MODELSCOPE = "modelscope:"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?")


def load_rows(config: RowsConfig) -> list[Row]:
    """Return the first `config.limit` rows of `config.path`, as plain Python values.

    `config.path` is a list of several paths, or one of

        data/train.parquet, data/train.jsonl     a file; JSON (a list of objects) and CSV too
        data/train                               a folder of such files, read in the order of their names; JSON and
                                                 CSV files count if there are no others
        data                                     a folder whose files are named after splits; `config.split` is read
        package:arithmetic/train                 a file that ships with Fivefold
        package:arithmetic                       a folder that ships with Fivefold; its file of `config.split`
        openai/gsm8k:main                        a `datasets` name (and configuration); its rows of `config.split`
        modelscope:AI-ModelScope/gsm8k:main      the same of ModelScope

    Raises:
        ValueError: a path that does not exist, a data set without rows, a split that does not exist or that is asked of
            a single file, a file whose content is not what its suffix says, or a user's reader that fails.
    """
    read = read_path if config.reader is None else partial(_read_own, config.reader, config.reader_kwargs)
    paths = [config.path] if isinstance(config.path, str) else config.path
    rows = list(islice((row for path in paths for row in read(path, config.split)), config.limit))
    if not rows:
        raise ValueError(f"the data set {config.path!r} has no rows: check the path, or fill the file")
    return rows


def usage(n_used: int, n_rows: int, n_too_long: int) -> str:
    """Return the use of a data set's rows as a text: `90 of 100 rows, 10 too long`."""
    return f"{n_used:,} of {n_rows:,} rows" + (f", {n_too_long:,} too long" if n_too_long else "")


def dropped_rows(key: str, n_rows: int, n_too_long: int) -> Iterator[str]:
    """Yield a warning if half of a section's rows or more are too long."""
    if 2 * n_too_long >= max(1, n_rows):
        yield (
            f"{n_too_long:,} of {n_rows:,} rows of {key} are dropped, because they have more tokens than "
            f"{key}.max_length: raise it, or look at what the longest rows are"
        )


def repeated_prompts(key: str, prompts: Collection[Hashable]) -> Iterator[str]:
    """Yield a warning if prompts come twice each on average or more often."""
    n_different = len(set(prompts))
    if 2 * n_different <= len(prompts):
        yield (
            f"the {len(prompts):,} prompts of {key} are {n_different:,} different ones: look at a rendered prompt in "
            f"samples.jsonl, for {key}.prompt_key or a chat template may leave out what tells them apart"
        )


def held_out_usage(usage: str, held_out: Iterable[Hashable], trained: Iterable[Hashable]) -> str:
    """Return the use of held-out rows as a text, which tells those that are trained on too.

    Without a `split`, the held-out rows of a folder or a hub name are the split `train`.

    Args:
        usage: the use of the rows.
        held_out: the tokens of each held-out row.
        trained: the tokens of each row that is trained on.
    """
    known = set(trained)
    n = sum(tokens in known for tokens in held_out)
    return f"{usage}, {n:,} of them trained on too" if n else usage


def drawn_apart(n_rows: int, hold_out: float, seed: int) -> frozenset[int]:
    """Return which of `n_rows` rows `train_dataset.hold_out` holds out, drawn by `seed`: at least one of each kind.

    Raises:
        ValueError: there is one row alone, or `hold_out` asks for all.
    """
    if n_rows < 2 or hold_out >= max(1, n_rows):
        raise ValueError(
            f"train_dataset.hold_out={hold_out:g} leaves no rows to train on, for there are {n_rows:,}: lower it"
        )
    n = int(hold_out) if hold_out >= 1 else min(n_rows - 1, max(1, round(hold_out * n_rows)))
    return frozenset(random.Random(f"{seed} held out").sample(range(n_rows), n))


def fingerprint(sequences: Iterable[Sequence[int]], texts: Iterable[str] = ()) -> str:
    """Return a hash of token sequences and texts in their order, by which a resumed run recognizes its data set."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(struct.pack(f"<{len(ids) + 1}q", len(ids), *ids))
    for text in texts:
        content = text.encode(errors="surrogatepass")
        digest.update(struct.pack("<q", len(content)) + content)
    return digest.hexdigest()[:16]


def columns(rows: list[Row]) -> list[str]:
    """Return the names of the columns that any row has."""
    return sorted({name for row in rows for name in row})


def require_column(rows: list[Row], name: str, key: str, path: str | list[str], remedy: str | None = None) -> None:
    """Check that all rows have the column `name`, which the recipe's key `key` asks for.

    Args:
        rows: the rows.
        name: the column.
        key: what asks for it.
        path: where the rows are from.
        remedy: what to do if no row has it; None: set the key to another column, or add this one.

    Raises:
        ValueError: a row without the column.
    """
    lacking = [number for number, row in enumerate(rows, start=1) if name not in row]
    if not lacking:
        return
    which = f"row {lacking[0]} of {path!r} has no column {name!r}, which {key} asks for"
    if len(lacking) < len(rows):
        raise ValueError(
            f"{which}; {len(rows) - len(lacking):,} of {len(rows):,} rows have it: fill it in the others, or drop them"
        )
    remedy = remedy or f"set {key} to one of them, or add the column"
    raise ValueError(f"{which}; the columns found are {columns(rows)}: {remedy}")


def read_path(path: str, split: str | None) -> Iterator[Row]:
    """Yield the rows of one path of a recipe, as they are.

    Args:
        path: as `train_dataset.path` names a file, a folder or a data set.
        split: the split; None: the default.

    Raises:
        ValueError: nothing is there, or it has no such split.
    """
    local = user_path(path)
    if path.startswith(_PACKAGE):
        with as_file(_packaged(path.removeprefix(_PACKAGE), split)) as file:
            yield from read_file(file)
    elif path.startswith(_MODELSCOPE):
        yield from _read_modelscope(path, split or DEFAULT_SPLIT)
    elif local.is_dir():
        for file in _files_of(local, split):
            yield from read_file(file)
    elif local.is_file():
        _refuse_split(path, split)
        yield from read_file(local)
    elif local.suffix in SUFFIXES or not _HUB_NAME.fullmatch(path):
        raise ValueError(
            f"the data set {path!r} does not exist (looked in {Path.cwd()}): give a file, a folder or a hub name"
        )
    else:
        yield from _read_hub(path, split or DEFAULT_SPLIT)


def _read_own(reader: str, kwargs: Mapping[str, Any], path: str, split: str | None) -> Iterator[Row]:
    """Yield the rows that a user's function reads from a path."""
    read = load_user_object("reader", reader)
    if not callable(read):
        raise ValueError(f"reader={reader!r} is a {type(read).__name__}: name a function of a path and a split")
    try:
        with one_process(f"reader={reader}"):
            for number, row in enumerate(read(path, split, **kwargs), start=1):
                if not isinstance(row, Mapping):
                    raise TypeError(f"row {number} is a {type(row).__name__}, not a mapping of columns")
                yield dict(row)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"reader={reader!r} failed on {path!r}:\n{user_traceback(error, (__file__,))}") from error


def _refuse_split(path: str, split: str | None) -> None:
    if split is not None:
        raise ValueError(
            f"the data set {path!r} is one file, which has no split {split!r}: drop split, or give the folder"
        )


def _files_of(folder: Path, split: str | None) -> list[Path]:
    """Return the files of a split in `folder`, or all files if no split is asked for and no file is named after one."""
    found = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not found:
        raise ValueError(f"the folder {str(folder)!r} holds no {' or '.join(SUFFIXES)} file: give the folder that does")
    found = [file for file in found if file.suffix in _TABLES] or found
    if split is None and not any(_is_of_split(file, name) for file in found for name in _SPLIT_NAMES):
        return found
    wanted = split or DEFAULT_SPLIT
    chosen = [file for file in found if _is_of_split(file, wanted)]
    if not chosen:
        raise ValueError(
            f"no file in the folder {str(folder)!r} has the split {wanted!r} in its name; there are "
            f"{', '.join(file.name for file in found)}: give the file, or the split of one of them"
        )
    return chosen


def _is_of_split(file: Path, split: str) -> bool:
    """Return whether the file is named after the split, as `train.jsonl` or `test-00000-of-00002.parquet` is."""
    return re.search(rf"(^|[-_. ]){re.escape(split)}([-_. ]|$)", file.stem) is not None


def _packaged(name: str, split: str | None) -> Traversable:
    root = files("fivefold.data") / "packaged"
    wanted = split or DEFAULT_SPLIT
    for suffix in SUFFIXES:
        if (file := root / f"{name}{suffix}").is_file():
            _refuse_split(f"{_PACKAGE}{name}", split)
            return file
        if (file := root / f"{name}/{wanted}{suffix}").is_file():
            return file
    folders = [folder for folder in root.iterdir() if folder.is_dir()] if root.is_dir() else []
    shipped = sorted(
        f"{folder.name}/{Path(file.name).stem}"
        for folder in folders
        for file in folder.iterdir()
        if file.name.endswith(SUFFIXES)
    )
    raise ValueError(f"no data set {_PACKAGE}{name} (split {wanted!r}) ships with Fivefold; there are {shipped}")


def _read_hub(path: str, split: str) -> Iterator[Row]:
    import datasets

    name, _, configuration = path.partition(":")
    try:
        yield from datasets.load_dataset(name, configuration or None, split=split)
    except ConnectionError as error:
        raise ValueError(
            f"{path!r} is no file or folder here, and {datasets.config.HF_ENDPOINT} could not be reached ({error}): "
            "download it, and give the folder in the place of the name"
        ) from error
    except (datasets.exceptions.DatasetNotFoundError, datasets.exceptions.DataFilesNotFoundError) as error:
        raise ValueError(
            f"{path!r} is no file or folder here, and the Hugging Face hub gives no data set of that name ({error}): "
            "check the spelling, your connection and your access"
        ) from error


def _read_modelscope(path: str, split: str) -> Iterator[Row]:
    import datasets

    try:
        from modelscope import dataset_snapshot_download
        from modelscope.hub.errors import HubError
    except ImportError as error:
        raise ValueError(
            f"the data set {path!r} is read by the package modelscope ({error}): run "
            "`pip install 'fivefold[modelscope]'`"
        ) from error
    name, _, configuration = path.removeprefix(_MODELSCOPE).partition(":")
    try:
        # The files are laid out as on the Hugging Face hub, with the configurations in their README.md.
        folder = dataset_snapshot_download(name)
    except HubError as error:
        raise ValueError(
            f"ModelScope gives no data set {name!r} ({error}): check the spelling, your connection and your access"
        ) from error
    yield from datasets.load_dataset(folder, configuration or None, split=split)
