"""The arguments that a launch script passes to its training command, found without running anything.

export TP=2                                  assignments, arrays, defaults and arithmetic are followed,
CMD=(python3 -m trainer actor.tp=\\$TP)       `if` and `case` as far as they test variables,
eval "${CMD[@]}" seed=1                      functions where they are called; loops are skipped

-> launches: [["-m", "trainer", "actor.tp=2", "seed=1"]]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from fivefold.config.text_files import read_text
from fivefold_import.shell.commands import DECLARATIONS, DOTTED, assignment, effects, launched
from fivefold_import.shell.conditions import holds
from fivefold_import.shell.expand import Expander, Text, Unknown, Variables
from fivefold_import.shell.findings import Script, stray
from fivefold_import.shell.loops import MOST_TURNS, Counted, counted, sourced
from fivefold_import.shell.tokens import REDIRECTIONS, Cursor, Token, tokenize

SUCCEEDING = frozenset({"true", ":", "echo", "set", "cd", "mkdir", "unset", "ulimit", "sleep"})
"""Commands that are taken to succeed: where one of them fails, the script could not work."""
NOT_RUN = "commands are not run"
NOT_READ, UNCERTAIN = "not read", "uncertain"
MOST_CALLS = 8
"""Functions are followed this deep, so that one that calls itself ends."""
MOST_COMMANDS = 10_000
"""Most commands that are read; a function's commands count at each call."""
MOST_CHARACTERS = 100_000
"""Most characters of a variable's value."""

Status = bool | None
"""Whether a command succeeds; None if that is not known, because commands are not run."""
Starts = Callable[[Sequence[Text]], tuple[str, list[Text]] | None]
"""Returns the program that a command starts and its arguments; None if it is not a command that is looked for."""


def read_script(
    text: str, environment: Mapping[str, str], starts: Starts = launched, folder: Path | None = None
) -> Script:
    """Find the commands that a script would run, with variables from the script and from `environment` filled in.

    Args:
        text: the script.
        environment: variables that it may read.
        starts: finds the commands that are looked for; by default those with `key=value` arguments.
        folder: where the script is, whose `source` is then followed; None: it is not.

    Raises:
        ValueError: a quote, a bracket or a compound command of the script is not closed (the message names the line);
            or the script runs too many commands, or builds too long a text.
    """
    variables = Variables(environment)
    reader = _Reader(variables, Script(), starts, folder)
    reader.run(tokenize(text))
    if not reader.script.launches:
        # Manuals print the command as an array and leave out the line that runs it.
        for items in [items for items in variables.arrays.values() if starts(items)]:
            reader.evaluate(items)
    reader.script.drop_unused()
    reader.script.exported = [name for name in dict.fromkeys(reader.exported) if name not in variables.read]
    return reader.script


class _Reader(Cursor):
    """Reads the statements once, in order.

    Statements of branches that are not taken are parsed with `live=False`, so that they have no effect.
    """

    def __init__(self, variables: Variables, script: Script, starts: Starts, folder: Path | None) -> None:
        super().__init__()
        self._starts = starts
        self._folder = folder
        self._variables = variables
        self._expander = Expander(variables)
        self.script = script
        self.exported: list[str] = []
        self._functions: dict[str, tuple[list[Token], int]] = {}
        self._depth = 0
        self._n_commands = 0
        self._doubt = NOT_RUN
        """Why the last status that is not known is not."""

    def run(self, tokens: list[Token], body: int | None = None) -> Status:
        """Read the statements of `tokens`, or only the command at position `body`."""
        outer = self._tokens, self._at
        self._tokens, self._at = tokens, body or 0
        status = self._statements(live=True, until=frozenset()) if body is None else self._command(live=True)
        self._tokens, self._at = outer
        return status

    def evaluate(self, words: Sequence[Text]) -> Status:
        """Read the words of an `eval` as a command; notes on a `key=value` word stay with that key."""
        notes = {word.text.partition("=")[0]: word.notes for word in words}
        before = len(self.script.launches)
        status = self.run(tokenize(" ".join(word.text for word in words)))
        self.script.launches[before:] = [
            [Text(word.text, notes.get(word.text.partition("=")[0], ()) + word.notes) for word in launch]
            for launch in self.script.launches[before:]
        ]
        return status

    # Statements

    def _statements(self, *, live: bool, until: frozenset[str]) -> Status:
        status: Status = True
        while True:
            self._skip(";", "&")
            token = self._peek()
            if token is None or (token.kind in ("word", "operator") and token.text in until):
                return status
            before = self._at
            status = self._and_or(live=live)
            if self._at == before:
                self._at += 1  # an operator that no statement begins with

    def _and_or(self, *, live: bool) -> Status:
        status = self._pipeline(live=live)
        while self._is_operator("&&", "||"):
            operator, start = self._tokens[self._at], self._at
            self._at += 1
            self._skip()
            runs = status is (operator.text == "&&")
            following = self._pipeline(live=live and runs)
            if live and status is None:
                doubt = f"it is not known whether the command before `{operator.text}` succeeds, because {self._doubt}"
                self._report_unread(operator, start, doubt)
            status = following if runs else status
        return status

    def _pipeline(self, *, live: bool) -> Status:
        negates = self._keyword() == "!"
        self._at += negates
        status = self._command(live=live)
        while self._is_operator("|", "|&"):
            pipe, start = self._tokens[self._at], self._at
            self._at += 1
            self._skip()
            self._command(live=False)
            if live:
                self._report_unread(pipe, start, "commands after a `|` are not followed")
            status = self._unknown(NOT_RUN)
        return (not status if status is not None else None) if negates else status

    def _command(self, *, live: bool) -> Status:
        token = self._peek()
        if token is None:
            return True
        if token.kind == "arithmetic":
            self._at += 1
            return self._expander.arithmetic(token.text, []) not in ("", "0")
        compound = {
            "if": self._if,
            "case": self._case,
            "for": self._loop,
            "while": self._loop,
            "until": self._loop,
            "select": self._loop,
            "{": self._group,
            "function": self._function,
            "[[": self._conditional,
        }.get(self._keyword() or "")
        if compound is not None:
            self._at += 1
            status = compound(token, live)
            self._redirections()
            return status
        if self._is_operator("("):
            self._at += 1
            status = self._statements(live=live, until=frozenset({")"}))
            self._at += 1
            return status
        return self._simple(live=live)

    def _if(self, opened: Token, live: bool) -> Status:
        keyword, is_done, doubt, start = "if", False, "", self._at
        while keyword != "fi":
            taken = live and not is_done
            if keyword in ("if", "elif"):
                condition = self._statements(live=taken, until=frozenset({"then"}))
                self._expect("then", opened=opened)
                if taken and condition is None:
                    doubt = doubt or f"the condition of `{keyword}` is taken as false, because {self._doubt}"
                taken = taken and condition is True
            is_done = is_done or taken
            self._statements(live=taken, until=frozenset({"elif", "else", "fi"}))
            keyword = self._expect("elif", "else", "fi", opened=opened)
        if doubt:
            self._report_unread(opened, start, doubt, UNCERTAIN)
        return True

    def _case(self, opened: Token, live: bool) -> Status:
        written, start = self._keyword() or "", self._at
        subject = self._word_text()
        self._expect("in", opened=opened)
        doubt = self._why_unknown([written])
        is_done = bool(doubt)
        while True:
            self._skip(";;")
            if self._keyword() == "esac" or self._peek() is None:
                break
            patterns = []
            while not self._is_operator(")") and self._peek() is not None:
                if self._is_operator("|", "("):
                    self._at += 1
                else:
                    patterns.append(self._word_text().text)
            self._at += 1
            taken = live and not is_done and any(fnmatchcase(subject.text, pattern) for pattern in patterns)
            is_done = is_done or taken
            self._statements(live=taken, until=frozenset({";;", "esac"}))
        self._expect("esac", opened=opened)
        if live and doubt:
            self._report_unread(opened, start, f"no branch of `case {written}` is taken, because {doubt}")
        return True

    def _loop(self, opened: Token, live: bool) -> Status:
        start = self._at
        header = self._peek()
        self._statements(live=False, until=frozenset({"do"}))
        self._expect("do", opened=opened)
        body = self._at
        self._statements(live=False, until=frozenset({"done"}))
        self._expect("done", opened=opened)
        if live and header is not None and header.kind == "arithmetic" and (counts := counted(header.text)):
            return self._count(counts, body)
        if live:
            self._report_unread(opened, start, "loops are not followed")
        return self._unknown(NOT_RUN)

    def _count(self, counts: Counted, body: int) -> Status:
        """Read the body of a loop that counts, as often as it runs."""
        end, expression = self._at, counts.start
        for _ in range(MOST_TURNS):
            self._variables.texts[counts.name] = Text(self._expander.arithmetic(expression, []))
            if self._expander.arithmetic(counts.condition, []) in ("", "0"):
                break
            self._at, expression = body, counts.next
            self._statements(live=True, until=frozenset({"done"}))
        self._at = end
        return True

    def _group(self, opened: Token, live: bool) -> Status:
        status = self._statements(live=live, until=frozenset({"}"}))
        self._expect("}", opened=opened)
        return status

    def _function(self, opened: Token, live: bool) -> Status:
        name = self._keyword() or ""
        self._at += 1
        self._skip("(", ")")
        self._functions[name] = (self._tokens, self._at)
        self._command(live=False)
        return True

    def _conditional(self, opened: Token, live: bool) -> Status:
        """Read `[[ ... ]]`, where tests are joined by `&&`, `||` and brackets."""
        status = self._alternatives()
        if self._keyword() != "]]":
            while self._keyword() != "]]" and self._peek() is not None:
                self._at += 1  # a kind of test that is not followed
            status = self._unknown(NOT_RUN)
        self._expect("]]", opened=opened)
        return status

    def _alternatives(self) -> Status:
        status = self._conjunction()
        while self._is_operator("||"):
            self._at += 1
            other = self._conjunction()
            status = True if True in (status, other) else None if None in (status, other) else False
        return status

    def _conjunction(self) -> Status:
        status: Status = True
        while True:
            self._skip("&&")
            if self._is_operator("("):
                self._at += 1
                part = self._alternatives()
                self._skip(")")
            else:
                words: list[str] = []
                while (word := self._keyword()) is not None and word != "]]":
                    words.append(word)
                    self._at += 1
                part = self._test(words, [self._expander.text(word) for word in words])
            status = False if False in (status, part) else None if None in (status, part) else True
            self._skip()
            if not self._is_operator("&&"):
                return status

    # Simple commands

    def _simple(self, *, live: bool) -> Status:
        first = self._peek()
        assert first is not None, "the caller has seen a token"
        words: list[str] = []
        while (token := self._peek()) is not None and token.kind in ("word", "array"):
            self._at += 1
            if token.kind == "word":
                words.append(token.text)
            elif live:
                self._assign_array(token)
            self._redirections()
            if len(words) == 1 and self._is_operator("(") and token.kind == "word":
                self._at -= 1
                return self._function(first, live)
        self._redirections()
        return self._execute(words, first) if live else True

    def _redirections(self) -> None:
        while self._is_operator(*REDIRECTIONS):
            self._at += 1
            self._at += self._keyword() is not None

    def _word_text(self) -> Text:
        token = self._peek()
        self._at += 1
        return Text("") if token is None else self._expander.text(token.text)

    def _execute(self, words: list[str], first: Token) -> Status:
        self._n_commands += 1
        if self._n_commands > MOST_COMMANDS:
            raise ValueError(
                f"line {first.line}: the script runs more than {MOST_COMMANDS:,} commands, too many to read"
            )
        while words and (found := assignment(words[0])) is not None:
            self._assign(*found)
            words = words[1:]
        if words and words[0] in DECLARATIONS:
            return self._declare(words)
        texts = [text for word in words for text in self._expander.fields(word)]
        match texts[:1]:
            case [Text(text="eval")]:
                return self.evaluate(texts[1:])
            case [Text(text=command)] if command in self._functions and self._depth < MOST_CALLS:
                return self._call(command, texts[1:])
            case [Text(text="[" | "test")]:
                return self._test(words, [text for text in texts[1:] if text.text != "]"])
            case [Text(text="source" | ".")]:
                return self._source(texts[1:], first)
            case [Text(text="shift")]:
                del self._variables.positional[:1]
                return True
            case [Text(text="false")]:
                return False
            case [Text(text=command)] if DOTTED.match(command):
                self.script.problems.append(stray([text.text for text in texts], first.line))
        if not texts or texts[0].text in SUCCEEDING:
            return True
        if found_launch := self._starts(texts):
            self.script.programs.append(found_launch[0])
            self.script.launches.append(found_launch[1])
        return self._unknown(NOT_RUN)

    def _source(self, texts: Sequence[Text], first: Token) -> Status:
        """Read the file of a `source`, if the folder of the script is known."""
        name = texts[0].text if texts else ""
        file = sourced(name, self._folder) if self._folder is not None and name else None
        if file is None or self._depth >= MOST_CALLS:
            self.script.notes.append(f"line {first.line}: `source {name}` is not followed")
            return self._unknown(NOT_RUN)
        outer, self._folder = self._folder, file.parent
        self._depth += 1
        status = self.run(tokenize(read_text(file, str(file))))
        self._depth -= 1
        self._folder = outer
        return status

    def _test(self, words: Sequence[str], texts: Sequence[Text]) -> Status:
        """Return whether the test that `words` expand to as `texts` holds."""
        doubt = self._why_unknown(words)
        status = None if doubt else holds([text.text for text in texts])
        return self._unknown(doubt or NOT_RUN) if status is None else status

    def _unknown(self, doubt: str) -> Status:
        self._doubt = doubt
        return None

    def _why_unknown(self, words: Sequence[str]) -> str:
        """Return why the values of some of `words` are not known, by the names of variables; empty if all are known."""
        notes = dict.fromkeys(note for word in words for note in self._expander.text(word).unknown)
        names = dict.fromkeys(re.findall(r"\$\{?(\w+)", " ".join(words)))
        unknown = [name for name in names if (value := self._variables.get(name)) is not None and value.unknown]
        if not unknown:
            return "; ".join(notes)
        are = "is" if len(unknown) == 1 else "are"
        fix = f"set it before the command: {unknown[0]}=... fivefold import"
        return f"${' and $'.join(unknown)} {are} not known ({'; '.join(notes)}); {fix}"

    def _call(self, name: str, arguments: list[Text]) -> Status:
        outer = self._variables.positional
        self._variables.positional = arguments
        self._depth += 1
        status = self.run(*self._functions[name])
        self._depth -= 1
        self._variables.positional = outer
        return status

    def _declare(self, words: Sequence[str]) -> Status:
        for word in words[1:]:
            found = assignment(word)
            if found is not None:
                self._assign(*found)
            name = found[0] if found is not None else self._expander.text(word).text
            if words[0] == "export" and not name.startswith("-"):
                self.exported.append(name)
        return True

    def _assign(self, name: str, appends: bool, word: str) -> None:
        value = self._expander.text(word)
        before = self._variables.get(name) if appends else None
        if before is not None:
            value = Text(before.text + value.text, before.notes + value.notes)
        if len(value.text) > MOST_CHARACTERS:
            raise ValueError(f"the value of {name} has more than {MOST_CHARACTERS:,} characters, too many to read")
        self._variables.texts[name] = value

    def _assign_array(self, token: Token) -> None:
        items = [text for word in token.items for text in self._expander.fields(word)]
        before = self._variables.arrays.get(token.text, []) if token.appends else []
        self._variables.arrays[token.text] = [*before, *items]

    # Reports

    def _report_unread(self, token: Token, start: int, reason: str, what: str = NOT_READ) -> None:
        """Report what the tokens from `start` on would set or start; the variables are not known from here on."""
        names, programs = effects(self._tokens[start : self._at], frozenset(self._functions))
        found = [f"the values of {', '.join(names)}"] if names else []
        found += [f"the arguments of {name}" for name in programs]
        if not found:
            return
        problem = f"line {token.line}: {' and '.join(found)} are {what}: {reason}"
        arrays = {one.text for one in self._tokens[start : self._at] if one.kind == "array"} | set(
            self._variables.arrays
        )
        notes = {name: Unknown(f"${name} depends on line {token.line}, which is not followed") for name in names}
        self.script.report(problem, () if programs or arrays.intersection(names) else notes.values())
        for name in names:
            before = self._variables.get(name) or Text("")
            if name not in self._variables.arrays:
                self._variables.texts[name] = Text(before.text, (*before.notes, notes[name]))
