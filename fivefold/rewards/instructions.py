"""The reward `instructions`: whether a response does what an instruction asks that a program can check.

{"func_name": "verify_paragraph_count", "N": 3}      the ground truth: the function and its arguments

Names and arguments are as in the data set allenai/RLVR-IFeval; arguments of other functions may be there as null.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fivefold.json_text import parsed
from fivefold.rewards.contract import QuickReward
from fivefold.rewards.reward import after_thoughts

FUNCTION = "func_name"
SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?])\s")
"""White space behind a sentence; not behind `e.g.` or `Dr.`."""
LANGUAGE = "validate_response_language"
QUANTIFIERS = ("at least", "around", "at most")


def _enclosed(line: str, opening: str, closing: str) -> int:
    """Return the number of parts of a line between two marks, in time that grows with its length alone."""
    count, place = 0, line.find(opening)
    while place >= 0 and (end := line.find(closing, place + len(opening))) >= 0:
        count, place = count + 1, line.find(opening, end + len(closing))
    return count


def _holds(count: int, quantifier: str, n: int, tolerance: int) -> bool:
    match quantifier:
        case "at least":
            return count >= n
        case "at most":
            return count <= n
        case _:
            return abs(count - n) <= tolerance


def _keywords(text: str, keyword_list: Collection[str]) -> bool:
    return all(word.lower() in text.lower() for word in keyword_list)


def _keyword_frequency(text: str, word: str, N: int) -> bool:
    return re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == N


def _forbidden_words(text: str, forbidden_words: Collection[str]) -> bool:
    return not any(word.lower() in text.lower() for word in forbidden_words)


def _letter_frequency(text: str, letter: str, N: int) -> bool:
    return text.count(letter) == N


def _language(text: str, language: str) -> bool:
    detector = _language_detector()
    try:
        return bool(detector.detect(text) == language)
    except detector.LangDetectException:  # a text without letters
        return False


def _paragraph_count(text: str, N: int) -> bool:
    lines = "\n".join(line.strip() for line in text.splitlines())
    paragraphs = lines.split("* * *")
    return len(paragraphs) == N and all(map(str.strip, paragraphs))


def _word_count(text: str, N: int, quantifier: str) -> bool:
    return _holds(len(text.split()), quantifier, N, max(round(N * 0.1), 1))


def _sentence_count(text: str, N: int, quantifier: str) -> bool:
    return _holds(len(SENTENCE_END.split(text)), quantifier, N, 1)


def _paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    paragraphs = text.split("\n\n")
    return len(paragraphs) == N and paragraphs[i - 1].strip().startswith(first_word)


def _postscript(text: str, postscript_marker: str) -> bool:
    _, marker, rest = text.partition(postscript_marker)
    return bool(marker and rest.strip())


def _placeholders(text: str, N: int) -> bool:
    return sum(_enclosed(line, "[", "]") for line in text.split("\n")) >= N


def _bullet_points(text: str, N: int) -> bool:
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N


def _title(text: str) -> bool:
    return any(_enclosed(line, "<<", ">>") for line in text.split("\n"))


def _one_of(text: str, options: Collection[str]) -> bool:
    return bool(text.strip()) and any(text.strip() in option for option in options)


def _highlighted(text: str, N: int) -> bool:
    return sum(_enclosed(line, "*", "*") for line in text.split("\n")) >= N


def _sections(text: str, N: int, section_splitter: str) -> bool:
    return len(text.removeprefix(section_splitter).split(section_splitter)) == N


def _json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _repeats_prompt(text: str, original_prompt: str) -> bool:
    return text.startswith(original_prompt)


def _two_responses(text: str) -> bool:
    first, *others = map(str.strip, text.split("******"))
    return len(others) == 1 and first != others[0]


def _capital_words(text: str, N: int, quantifier: str) -> bool:
    return _holds(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N, 0)


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.endswith(end_phrase)


CHECKS: Mapping[str, Callable[..., bool]] = {
    "verify_keywords": _keywords,
    "verify_keyword_frequency": _keyword_frequency,
    "validate_forbidden_words": _forbidden_words,
    "verify_letter_frequency": _letter_frequency,
    LANGUAGE: _language,
    "verify_paragraph_count": _paragraph_count,
    "validate_word_constraint": _word_count,
    "verify_sentence_constraint": _sentence_count,
    "validate_paragraphs": _paragraphs,
    "verify_postscript": _postscript,
    "validate_placeholders": _placeholders,
    "verify_bullet_points": _bullet_points,
    "validate_title": _title,
    "validate_choice": _one_of,
    "validate_highlighted_sections": _highlighted,
    "validate_sections": _sections,
    "validate_json_format": _json,
    "validate_repeat_prompt": _repeats_prompt,
    "validate_two_responses": _two_responses,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": _capital_words,
    "validate_end": _ends_with,
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
    "validate_no_commas": lambda text: "," not in text,
}


@dataclass(frozen=True)
class Instructions(QuickReward):
    """1 for a response that does what the ground truth asks; thoughts up to the last `</think>` do not count."""

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Refuse a ground truth that is no known instruction.

        Raises:
            ValueError: see `_read`; or a library is missing that finds out the language of a text.
        """
        name, _ = _read(ground_truth)
        if name == LANGUAGE:
            _language_detector()

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        """Return 1.0 for a response that follows the instruction, and 0.0 for any other."""
        name, arguments = _read(ground_truth)
        return float(CHECKS[name](after_thoughts(response), **arguments))


def _read(ground_truth: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of an instruction, and its arguments.

    Raises:
        ValueError: it is no mapping or JSON of one, names no known function, or lacks an argument.
    """
    form = f'give a mapping with "{FUNCTION}" and its arguments, or its JSON'
    try:
        truth = parsed(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except ValueError as error:
        raise ValueError(f"the ground truth is no JSON ({error}): {form}") from error
    if not isinstance(truth, Mapping):
        raise ValueError(f"the ground truth is a {type(truth).__name__}: {form}")
    name = truth.get(FUNCTION)
    if not isinstance(name, str) or name not in CHECKS:
        raise ValueError(f"the ground truth has {FUNCTION}={name!r}, which is none of {', '.join(CHECKS)}")
    _, *wanted = inspect.signature(CHECKS[name]).parameters
    if missing := [argument for argument in wanted if truth.get(argument) is None]:
        raise ValueError(f"the ground truth of {name} lacks {', '.join(missing)}: {form}")
    if (quantifier := truth.get("quantifier")) not in QUANTIFIERS and "quantifier" in wanted:
        raise ValueError(f"the ground truth has quantifier={quantifier!r}: give one of {', '.join(QUANTIFIERS)}")
    return name, {argument: truth[argument] for argument in wanted}


def _language_detector() -> ModuleType:
    try:
        import langdetect
    except ImportError as error:
        raise ValueError(
            f"the instruction {LANGUAGE} needs the library langdetect: pip install 'fivefold[instructions]', or drop "
            "its rows"
        ) from error
    langdetect.DetectorFactory.seed = 0  # otherwise a text may be found to be in another language each time
    module: ModuleType = langdetect
    return module
