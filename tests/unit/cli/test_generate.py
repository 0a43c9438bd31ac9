"""`fivefold generate` on a tiny random model, against transformers' own generation."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from fivefold.cli.main import app

PROMPTS = ("abc", "x")
N_TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    words = ["<unk>", "</s>", *string.ascii_lowercase]
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=len(words), bos_token_id=None, eos_token_id=1, initializer_range=0.5)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def generate(model: str, *args: str) -> Result:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    return CliRunner().invoke(
        app, ["generate", "--model", model, *prompts, "--max-new-tokens", str(N_TOKENS), "--json", *args]
    )


def completions(model: str, *args: str) -> list[list[str]]:
    result = generate(model, *args)
    assert result.exit_code == 0, result.output
    return [json.loads(line)["completions"] for line in result.stdout.splitlines()]


def test_greedy_completions_are_those_of_transformers(model: str) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    reference = LlamaForCausalLM.from_pretrained(model)
    expected = []
    for prompt in PROMPTS:
        token_ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        answer = reference.generate(token_ids, do_sample=False, max_new_tokens=N_TOKENS, pad_token_id=0)
        expected.append([tokenizer.decode(answer[0, token_ids.shape[1] :], skip_special_tokens=True)])
    assert all(text for (text,) in expected)
    assert completions(model, "--greedy") == expected


def test_a_seed_gives_the_same_samples_again(model: str) -> None:
    first = completions(model, "--n", "3", "--seed", "7")
    assert [len(samples) for samples in first] == [3, 3]
    assert first == completions(model, "--n", "3", "--seed", "7")
    assert first != completions(model, "--n", "3", "--seed", "8")


def test_the_prompts_of_a_file_are_its_lines(model: str, tmp_path: Path) -> None:
    """Programs of Windows put a byte-order mark before the first line, and end each with two characters."""
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfabc\r\n\r\nx\r\n")
    words = ["generate", "--model", model, "--file", str(file), "--max-new-tokens", str(N_TOKENS), "--json"]
    result = CliRunner().invoke(app, [*words, "--greedy"])
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == [*PROMPTS]
    assert [json.loads(line)["completions"] for line in result.stdout.splitlines()] == completions(model, "--greedy")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--device", "cuda:99"], "this machine has no device 'cuda:99': give one of cpu"),
        (["--device", "gpu"], "this machine has no device 'gpu'"),
        (
            ["--max-new-tokens", "9999"],
            "a prompt of 3 tokens with max_new_tokens=9999 exceeds the model's 2048 positions",
        ),
    ],
)
def test_devices_and_lengths_that_do_not_exist_are_told(model: str, words: list[str], problem: str) -> None:
    result = generate(model, *words)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert "gconfig" not in result.stderr


def test_an_answer_to_a_message_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.generate.generate", lambda model, prompts, config, **options: [["5", "6"]])
    words = ["generate", "--model", "m", "--prompt", "2+3=", "--n", "2"]
    assert CliRunner().invoke(app, words).stdout == "2+3=5\n2+3=6\n"
    assert CliRunner().invoke(app, [*words, "--chat"]).stdout == "2+3=\n5\n2+3=\n6\n"


def test_what_cannot_be_done_is_said_in_a_line(model: str) -> None:
    no_template = generate(model, "--chat")
    assert no_template.exit_code == 2
    assert "chat template" in no_template.stderr
    missing = CliRunner().invoke(app, ["generate", "--model", "./no-such-folder", "--prompt", "a"])
    assert missing.exit_code == 2
    assert "no such folder" in missing.stderr
    empty = CliRunner().invoke(app, ["generate", "--model", model], input="\n")
    assert empty.exit_code == 2
    assert "there is no prompt" in empty.stderr
