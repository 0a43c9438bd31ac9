"""The rewards `choice`, `countdown`, `instructions` and `repetition`."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards.instructions import CHECKS
from fivefold.rewards.resolve import resolve_reward
from fivefold.rewards.reward_set import check_ground_truths
from fivefold.types import Prompt
from tests.unit.rewards.conftest import judge

GRADES = {"right": 1, "right_unboxed": 0.5, "wrong": -0.5, "wrong_unboxed": -1}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"so \boxed{B}", 1.0),
        (r"\boxed{A}, no: \boxed{(B) seven}", 1.0),
        (r"\boxed{A}", -0.5),
        (r"\boxed{b}", -0.5),
        ("Not A. The Answer is: B", 0.5),
        ("the answer is A, not B", -1.0),
        ("B", 0.5),
        ("no idea", -1.0),
        (r"<think>\boxed{A}</think>B", 0.5),
        ("", -1.0),
    ],
)
def test_a_choice_is_the_first_capital_letter_of_the_answer(response: str, reward: float) -> None:
    assert judge(resolve_reward(RewardConfig(fn="choice", kwargs=GRADES)), response, "B) seven") == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>(44 + 19) + 35</answer>", 1.0),
        ("<answer>1</answer> or <answer> 35 + 19\n+ 44 </answer>", 1.0),
        ("<answer>44 + 19 + 35 + 0</answer>", 0.1),
        ("<answer>44 + 19 * 35 / 0</answer>", 0.1),
        ("<answer>44 + 19 + 35 = 98</answer>", 0.1),
        ("<answer>__import__('os')</answer>", 0.1),
        ("<answer>9 ** 9 ** 9 ** 9</answer>", 0.1),
        ("<answer>" + "(" * 400 + "</answer>", 0.1),
        ("<answer>98</answer>", 0.1),
        ("44 + 19 + 35", 0.0),
        ("<think><answer>44 + 19 + 35</answer></think>no", 0.0),
    ],
)
def test_a_countdown_uses_each_number_once_and_reaches_the_target(response: str, reward: float) -> None:
    truth = {"target": 98, "numbers": [44, 19, 35]}
    for given in (truth, json.dumps(truth)):
        assert judge(resolve_reward(RewardConfig(fn="countdown")), response, given) == reward
    assert judge(resolve_reward(RewardConfig(fn="countdown")), "<answer>-(3 - 8 / 3) * 6</answer>",
                 {"target": -2, "numbers": [3, 3, 6, 8]}) == 1.0  # fmt: skip


INSTRUCTIONS: list[tuple[str, dict[str, Any], str, str]] = [
    ("verify_keywords", {"keyword_list": ["Sun", "moon"]}, "sun and MOON", "sun"),
    ("verify_keyword_frequency", {"word": "Cat", "N": 2}, "cat, cats, CAT", "cat cat cat"),
    ("validate_forbidden_words", {"forbidden_words": ["rain"]}, "dry", "Rainy"),
    ("verify_letter_frequency", {"letter": "e", "N": 2}, "Eee", "e"),
    ("verify_paragraph_count", {"N": 2}, "a\n* * *\nb", "a\n* * *\n"),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "w " * 22, "w " * 23),
    ("validate_word_constraint", {"N": 2, "quantifier": "at least"}, "a b", "a"),
    ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, "a b", "a b c"),
    ("verify_sentence_constraint", {"N": 1, "quantifier": "at most"}, "Dr. No, e.g. him.", "One. Two. Three."),
    ("validate_paragraphs", {"N": 2, "first_word": "So", "i": 2}, "a\n\nSo b", "So\n\na"),
    ("verify_postscript", {"postscript_marker": "P.S."}, "a P.S. b", "a P.S. "),
    ("validate_placeholders", {"N": 2}, "[name] [street]", "[name]"),
    ("verify_bullet_points", {"N": 2}, "* a\n - b\nc", "* a"),
    ("validate_title", {}, "<<poem>>", "<poem>"),
    ("validate_choice", {"options": ["My answer is yes.", "My answer is no."]}, "My answer is no.", " "),
    ("validate_highlighted_sections", {"N": 1}, "a *b* c", "a * b"),
    ("validate_sections", {"N": 2, "section_splitter": "SECTION"}, "SECTION 1 a SECTION 2 b", "SECTION 1"),
    ("validate_json_format", {}, '{"a": [1]}', "{a}"),
    ("validate_repeat_prompt", {"original_prompt": "Say hi."}, "Say hi. Hi.", "Hi. Say hi."),
    ("validate_two_responses", {}, "a******b", "a****** a"),
    ("validate_uppercase", {}, "HI, 2!", "Hi"),
    ("validate_lowercase", {}, "hi, 2!", "Hi"),
    ("validate_frequency_capital_words", {"N": 1, "quantifier": "around"}, "an OAK", "A OAK"),
    ("validate_end", {"end_phrase": "Bye."}, "Hi. Bye.", "Bye. "),
    ("validate_quotation", {}, '"hi"', '"hi".'),
    ("validate_no_commas", {}, "a b", "a, b"),
]


def test_every_instruction_but_the_one_of_languages_is_tried_here() -> None:
    assert {name for name, *_ in INSTRUCTIONS} == CHECKS.keys() - {"validate_response_language"}


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), INSTRUCTIONS)
def test_instructions_are_followed_or_not(name: str, arguments: dict[str, Any], right: str, wrong: str) -> None:
    reward = resolve_reward(RewardConfig(fn="instructions"))
    truth = {"func_name": name, "language": None, **arguments}
    assert [judge(reward, text, truth) for text in (right, wrong)] == [1.0, 0.0]
    assert judge(reward, f"<think>{wrong}</think>\n{right}", json.dumps(truth)) == 1.0


def test_marked_parts_are_counted_as_by_a_regular_expression_but_without_its_time() -> None:
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choices("[]<>* a\n", k=draw.randrange(40)))
        for name, pattern in (("placeholders", r"\[.*?\]"), ("highlighted_sections", r"\*.*?\*")):
            count = len(re.findall(pattern, text))
            assert [CHECKS[f"validate_{name}"](text, N=n) for n in (count, count + 1)] == [True, False]
        assert CHECKS["validate_title"](text) is (re.search("<<.*?>>", text) is not None)
    # The expression would take minutes.
    assert not CHECKS["validate_placeholders"]("[" * 300_000, N=1)
    assert not CHECKS["validate_title"]("<" * 300_000)


def test_languages_are_found_out() -> None:
    pytest.importorskip("langdetect")
    reward = resolve_reward(RewardConfig(fn="instructions"))
    truth = {"func_name": "validate_response_language", "language": "de"}
    texts = ("Das ist ein Satz auf Deutsch.", "This is a sentence in English.", "123")
    assert [judge(reward, text, truth) for text in texts] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("fn", "truth", "message"),
    [
        ("choice", "b", "give the letter of the right choice"),
        ("countdown", {"target": 98}, 'give {"target": 98, "numbers"'),
        ("instructions", "not JSON", "the ground truth is no JSON"),
        ("instructions", ["a"], "the ground truth is a list"),
        ("instructions", {"func_name": "fly"}, "func_name='fly', which is none of verify_keywords"),
        ("instructions", {"func_name": "verify_paragraph_count", "N": None}, "lacks N"),
        ("instructions", {"func_name": "validate_word_constraint", "N": 1, "quantifier": "some"}, "quantifier='some'"),
    ],
)
def test_ground_truths_of_another_form_are_refused_before_a_run(fn: str, truth: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_ground_truths(resolve_reward(RewardConfig(fn=fn)), [Prompt(0, "q", (1,), truth)])


@pytest.mark.parametrize(
    ("kwargs", "response", "reward"),
    [
        ({}, "a b c d", 0.0),
        ({}, "a b c A b\nc", -0.25),
        ({}, "a a a a", -0.5),
        ({}, "a b", 0.0),
        ({"n": 1}, "a a b b", -0.5),
    ],
)
def test_repetition_is_minus_the_share_of_runs_that_came_before(
    kwargs: dict[str, Any], response: str, reward: float
) -> None:
    assert judge(resolve_reward(RewardConfig(fn="repetition", kwargs=kwargs)), response, None) == reward


@pytest.mark.parametrize(("fn", "kwargs"), [("repetition", {"n": 0}), ("choice", {"wrong": float("nan")})])
def test_arguments_that_cannot_work_are_refused(fn: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"reward\.kwargs\.(n=0|wrong=nan) must be"):
        resolve_reward(RewardConfig(fn=fn, kwargs=kwargs))
