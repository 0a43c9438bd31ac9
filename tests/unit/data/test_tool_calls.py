"""Sums for a calculator, made-up facts, and conversations that call tools for both."""

from __future__ import annotations

import json
import random
import re
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from fivefold.config.schema.data import SFTRowsConfig
from fivefold.data.chains import chain_rows, chains
from fivefold.data.made_up_facts import question_rows, the_world
from fivefold.data.sft import load_sft
from fivefold.data.tool_calls import conversations, write_tool_calls
from fivefold.environments.agents.parsing import _CALL
from fivefold.environments.small_tools import calculate, search
from fivefold.rollout.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("fivefold/models/tiny-moe-tools")
TOOLS = {"calculate": calculate, "search": search}


def asked(row: dict[str, Any]) -> str:
    return str(row["prompt"][0]["content"])


def made(n_calling: int, n_mixed: int) -> list[list[dict[str, str]]]:
    return [row["messages"] for row in conversations(n_calling, n_mixed, 0.25, "train", seed=1)]


def test_chains_have_the_results_that_python_calculates() -> None:
    for row in [*chain_rows("train", 300), *chain_rows("test", 100)]:
        result = eval(asked(row))
        assert re.fullmatch(r"\d{3,4}([+-]\d{3,4}){1,2}", asked(row))
        assert row["reward_model"]["ground_truth"] == str(result)
        assert result >= 0


def test_no_held_out_chain_is_asked_or_shown_in_training() -> None:
    held_out = {chain.text for chain in islice(chains("test", random.Random(0)), 3000)}
    shown = {messages[1]["content"] for messages in made(2000, 2000)}
    assert not held_out & (shown | {asked(row) for row in chain_rows("train", 1000)})


def test_the_tool_finds_every_answer_and_test_questions_ask_for_other_persons() -> None:
    world = the_world()
    assert len(set(world.facts)) == 200
    persons: dict[str, set[str]] = {}
    for split in ("train", "test"):
        for row in question_rows(split):
            [person] = [word for word in asked(row).split() if word in world.town_of]
            persons.setdefault(split, set()).add(person)
            answer = search(person).split()[-1]
            if "land" in asked(row):
                answer = search(f"the town {answer}").split()[-1]
            assert row["reward_model"]["ground_truth"] == answer
    assert not persons["train"] & persons["test"]
    assert {split: len(names) for split, names in persons.items()} == {"train": 90, "test": 30}
    assert search("nobody") == "nothing is known"


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12+30", "42"),
        ("12 - 30", "-18"),
        ("-5+3", "-2"),
        ("1+2+3", "write two numbers"),
        ("__import__('os')", "write two numbers"),
    ],
)
def test_the_calculator_does_one_operation(expression: str, result: str) -> None:
    assert calculate(expression) == result


def test_calls_of_the_demonstrations_have_the_results_of_the_tools_and_lead_to_the_answer() -> None:
    for system, question, *rest in made(300, 0):
        *calls, answer = rest
        for said, result in zip(calls[::2], calls[1::2], strict=True):
            call = json.loads(_CALL.fullmatch(said["content"])[1])  # type: ignore[index]
            assert system["content"].startswith(call["name"])
            if call["name"] == "calculate":
                assert calculate(**call["arguments"]) == result["content"]
            else:
                assert result["content"].startswith(call["arguments"]["query"])
        assert calls[-1]["content"].endswith(answer["content"])
        assert len(calls) == 2 * (
            2 if "land" in question["content"] or len(re.findall(r"\d+", question["content"])) == 3 else 1
        )


def test_the_second_part_calls_as_often_as_asked() -> None:
    rows = made(0, 2000)
    assert sum(len(messages) > 3 for messages in rows) / len(rows) == pytest.approx(0.25, abs=0.04)


def test_demonstrations_begin_as_prompts_with_the_tools_do() -> None:
    """The chat template writes a tool's schema as the demonstrations' system message has it."""
    for system, question, *_ in made(50, 0):
        [tool] = [tool for name, tool in TOOLS.items() if system["content"].startswith(name)]
        with_tools = TOKENIZER.apply_chat_template(
            [question], tools=[get_json_schema(tool)], tokenize=False, add_generation_prompt=True
        )
        assert with_tools == TOKENIZER.apply_chat_template(
            [system, question], tokenize=False, add_generation_prompt=True
        )


def test_a_conversation_is_one_example_in_which_every_answer_is_learned(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in conversations(20, 0, 1.0, "train", seed=2)))
    examples = load_sft(SFTRowsConfig(path=str(path), messages_key="messages", max_length=256), TOKENIZER)
    assert len(examples) == 20
    for messages, example in zip(
        (json.loads(line)["messages"] for line in path.read_text().splitlines()), examples.examples, strict=True
    ):
        tokens = [*example.prompt_ids, *example.response_ids]
        learned = [token for token, is_learned in zip(tokens, example.mask(), strict=True) if is_learned]
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        assert TOKENIZER.decode(learned) == "".join(f"{text}<|im_end|>" for text in said)


def test_the_packaged_files_are_what_the_command_writes(tmp_path: Path) -> None:
    written = write_tool_calls(tmp_path, n_calling=2, n_mixed=2)
    for name in ("calculator/train", "calculator/test", "search/train", "search/test"):
        shipped = files("fivefold.data") / "packaged" / f"{name}.jsonl"
        assert written[name].read_bytes() == shipped.read_bytes()
