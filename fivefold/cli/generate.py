"""`fivefold generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from fivefold.cli.command import reporting_errors
from fivefold.config.limits import LARGEST_SEED
from fivefold.imports import large_imports

if TYPE_CHECKING:
    from fivefold.config.schema.rollout import GenerationConfig

ModelPath = Annotated[str, typer.Option(help="Hugging Face folder, hub name or package:NAME.", show_default=False)]
Prompts = Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.", show_default=False)]
PromptFile = Annotated[
    typer.FileText | None,
    typer.Option(encoding="utf-8", help="File with one prompt a line; - is standard input.", show_default=False),
]
NumberOfCompletions = Annotated[int, typer.Option(min=1, help="Number of completions for each prompt.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest completion, in tokens.")]
Temperature = Annotated[float, typer.Option(help="Above 0; higher is more varied.")]
TopP = Annotated[float, typer.Option(help="Sample among the most likely tokens that hold this much probability.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample among this many most likely tokens; 0 is all of them.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the most likely token.")]
StopTexts = Annotated[
    list[str] | None, typer.Option(help="Stop after this text; may be given several times.", show_default=False)
]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="The same seed gives the same completions.")]
Chat = Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")]
WeightType = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option(help="Number format of the weights.  [default: bfloat16 on a GPU, else float32]", show_default=False),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N.  [default: the GPU if there is one]", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for each prompt, for scripts.")]


def generate(
    model: ModelPath,
    prompt: Prompts = None,
    file: PromptFile = None,
    n: NumberOfCompletions = 1,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    greedy: Greedy = False,
    stop: StopTexts = None,
    seed: Seed = 1,
    chat: Chat = False,
    dtype: WeightType = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Let a model complete prompts, in this process.

    \b
    Examples:
      fivefold generate --model package:tiny-moe --prompt "12+34="
      fivefold generate --model runs/quickstart/trial-0/weights --prompt "12+34=" --n 4 --temperature 0.7
      cat prompts.txt | fivefold generate --model Qwen/Qwen3-0.6B --chat --greedy --json
    """
    with reporting_errors():
        prompts = _prompts(prompt or [], file)
        config = _generation_config(
            n_samples=n,
            max_new_tokens=max_new_tokens,
            greedy=greedy,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop=stop or [],
        )
        # The options are checked before torch is imported.
        with large_imports():
            from fivefold.generate import generate

        completions = generate(model, prompts, config, seed=seed, chat=chat, dtype=dtype, device=device)
        for text, answers in zip(prompts, completions, strict=True):
            _print_completions(text, answers, chat=chat, as_json=as_json)


def _prompts(texts: Sequence[str], file: IO[str] | None) -> list[str]:
    """Return the prompts given as options, then those in `file`; without either, those from standard input."""
    if not texts and file is None and not sys.stdin.isatty():
        file = sys.stdin
    prompts = [*texts, *(line for line in _lines(file) if line.strip())]
    for number, prompt in enumerate(prompts, start=1):
        if not _is_text(prompt):
            raise ValueError(f"prompt {number} is not a text in UTF-8: {prompt[:60]!a}; write it in UTF-8")
    return prompts


def _lines(file: IO[str] | None) -> list[str]:
    """Return the lines of `file`, without their ends; none if there is no file."""
    if file is None:
        return []
    try:
        # Programs of Windows put a byte-order mark before the first line.
        return [line.rstrip("\n").removeprefix("\ufeff") for line in file]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name} is not a text in UTF-8 ({error.reason}): save it as UTF-8") from error


def _is_text(prompt: str) -> bool:
    """Whether it is all characters: bytes of a command line that are not UTF-8 become halves of characters."""
    return not any("\ud800" <= character <= "\udfff" for character in prompt)


def _generation_config(**values: Any) -> GenerationConfig:
    from pydantic import ValidationError

    from fivefold.config.problems import RecipeError, problems_of
    from fivefold.config.schema.rollout import GenerationConfig

    try:
        return GenerationConfig(**values)
    except ValidationError as error:
        raise RecipeError("command line", problems_of(error, GenerationConfig)) from error


def _print_completions(prompt: str, completions: Sequence[str], *, chat: bool, as_json: bool) -> None:
    """Print each completion right after its prompt; the answer to a message gets a separate line."""
    if as_json:
        typer.echo(json.dumps({"prompt": prompt, "completions": completions}, ensure_ascii=False))
        return
    for completion in completions:
        typer.secho(prompt, dim=True, nl=chat)
        typer.echo(completion)
