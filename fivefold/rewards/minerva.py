"""Short mathematical answers in one form, as in the evaluation of Minerva (Lewkowycz et al. 2022, arXiv 2206.14858).

Appendix D.1 of the paper lists the rules. DAPO's reward compares answers in this form too.
"""

from __future__ import annotations

import re

REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
"""Texts that become others, one after the other."""
REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", r"\ldots", "sue"),
    *("points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges"),
    *("students", "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
"""Units and other texts that do not count."""
PATTERNS = (
    (re.compile(r".*?(\$)(.*?)\$.*"), r"$\2$"),
    *((re.compile(rf"\\{command}\{{(.*?)\}}"), r"\1") for command in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)
"""LaTeX that becomes shorter, or whose arguments get braces: `\\frac12` becomes `\\frac{1}{2}`."""


def minerva_form(answer: str) -> str:
    """Return the form in which an answer is compared: without what it is equal to, units, words and spaces."""
    form = answer.rpartition("=")[2]
    for before, after in REPLACED:
        form = form.replace(before, after)
    for text in REMOVED:
        form = form.replace(text, "")
    for pattern, after in PATTERNS:
        form = pattern.sub(after, form)
    form = form.replace("$", "")
    digits = form.replace(",", "")
    return digits if digits.isdigit() else form.strip()
