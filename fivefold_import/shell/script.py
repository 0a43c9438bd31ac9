"""The arguments that a launch script passes to its training command, found without running anything.

export TP=2                                  assignments, arrays, defaults and arithmetic are followed,
CMD=(python3 -m trainer actor.tp=\\$TP)       `if` and `case` as far as they test variables,
eval "${CMD[@]}" seed=1                      functions where they are called; loops are skipped

-> launches: [["-m", "trainer", "actor.tp=2", "seed=1"]]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from fivefold_import.shell.commands import (
    DECLARATIONS,
    DOTTED,
    OVERRIDE,
    arguments,
    assignment,
    effects,
    plain,
    program,
)
from fivefold_import.shell.conditions import holds
from fivefold_import.shell.cursor import Cursor
from fivefold_import.shell.expand import Expander, Text, Variables
from fivefold_import.shell.words import REDIRECTIONS, Token, Word, tokenize

SUCCEEDING = frozenset({"true", ":", "echo", "set", "cd", "mkdir", "unset", "ulimit", "sleep"})
"""Commands that are taken to succeed: where one of them fails, the script could not work."""
NOT_RUN = "it is not known whether the command before `{}` succeeds, because commands are not run"
MOST_CALLS = 8
"""Functions are followed this deep, so that one that calls itself ends."""
MOST_COMMANDS = 10_000
"""Most commands that are read, those of a function each time that it is called."""
MOST_CHARACTERS = 100_000
"""Most characters of a variable's value."""

Status = bool | None
"""Whether a command succeeds; None if that is not known, because commands are not run."""


@dataclass
class Script:
    """What is found in a script."""

    launches: list[list[Text]] = field(default_factory=list)
    """The arguments of each program that is started with `key=value` arguments."""
    programs: list[str] = field(default_factory=list)
    """The program of each launch: the module after `-m`, or the script's file."""
    problems: list[str] = field(default_factory=list)
    """What of the script is not read, though bash might run it, or would not run it as it is meant."""
    notes: list[str] = field(default_factory=list)
    """Notes on what depends on commands, which are not run."""
    exported: list[str] = field(default_factory=list)
    """Environment variables that the script sets for the program and does not read itself."""


def read_script(text: str, environment: Mapping[str, str]) -> Script:
    """Find the commands that a script would run, with variables from the script and from `environment` filled in.

    Raises:
        ValueError: a quote, a bracket or a compound command of the script is not closed, in the line that the message
            names; or the script runs too many commands, or makes too long a text.
    """
    variables = Variables(environment)
    reader = _Reader(variables, Script())
    reader.run(tokenize(text))
    if not reader.script.launches:
        # Manuals print the command as an array and leave out the line that runs it.
        for items in [items for items in variables.arrays.values() if arguments(items)]:
            reader.evaluate(items)
    reader.script.exported = [name for name in dict.fromkeys(reader.exported) if name not in variables.read]
    return reader.script


class _Reader(Cursor):
    """Reads the statements once, in order.

    Statements in branches that are not taken are parsed with `live=False`, so that they have no effect.
    """

    def __init__(self, variables: Variables, script: Script) -> None:
        super().__init__()
        self._variables = variables
        self._expander = Expander(variables)
        self.script = script
        self.exported: list[str] = []
        self._functions: dict[str, tuple[list[Token], int]] = {}
        self._depth = 0
        self._n_commands = 0

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
            if token is None or token.bare in until or (token.kind == "operator" and token.text in until):
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
                self._tell_unread(operator, start, NOT_RUN.format(operator.text))
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
                self._tell_unread(pipe, start, "commands after a `|` are not followed")
            status = None
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
        }.get(token.bare or "")
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
        keyword, is_done = "if", False
        while keyword != "fi":
            taken = live and not is_done
            if keyword in ("if", "elif"):
                condition = self._statements(live=taken, until=frozenset({"then"}))
                self._expect("then", opened=opened)
                if taken and condition is None:
                    self._note(opened, f"`{keyword}` asks a command, which is not run; taken as false")
                taken = taken and condition is True
            is_done = is_done or taken
            self._statements(live=taken, until=frozenset({"elif", "else", "fi"}))
            keyword = self._expect("elif", "else", "fi", opened=opened)
        return True

    def _case(self, opened: Token, live: bool) -> Status:
        subject = self._word_text()
        self._expect("in", opened=opened)
        is_done = False
        while True:
            self._skip(";;")
            if self._keyword() == "esac" or self._peek() is None:
                break
            patterns = []
            while not self._is_operator(")") and self._peek() is not None:
                if self._is_operator("|", "("):
                    self._at += 1
                else:
                    patterns.append(self._word_text())
            self._at += 1
            taken = live and not is_done and any(fnmatchcase(subject, pattern) for pattern in patterns)
            is_done = is_done or taken
            self._statements(live=taken, until=frozenset({";;", "esac"}))
        self._expect("esac", opened=opened)
        return True

    def _loop(self, opened: Token, live: bool) -> Status:
        start = self._at
        self._statements(live=False, until=frozenset({"do"}))
        self._expect("do", opened=opened)
        self._statements(live=False, until=frozenset({"done"}))
        self._expect("done", opened=opened)
        if live:
            self._tell_unread(opened, start, "loops are not followed")
        return None

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
            status = None
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
                while (token := self._peek()) is not None and token.kind == "word" and token.bare != "]]":
                    words.append(self._word_text())
                part = holds(words)
            status = False if False in (status, part) else None if None in (status, part) else True
            self._skip()
            if not self._is_operator("&&"):
                return status

    # Simple commands

    def _simple(self, *, live: bool) -> Status:
        first = self._peek()
        assert first is not None, "the caller has seen a token"
        words: list[Word] = []
        while (token := self._peek()) is not None and token.kind in ("word", "array"):
            self._at += 1
            if token.kind == "array":
                if live:
                    self._assign_array(token)
            else:
                words.append(token.word)
            self._redirections()
            if len(words) == 1 and self._is_operator("(") and token.bare is not None:
                self._at -= 1
                return self._function(first, live)
        self._redirections()
        return self._execute(words, first) if live else True

    def _redirections(self) -> None:
        while self._is_operator(*REDIRECTIONS):
            self._at += 1
            if (token := self._peek()) is not None and token.kind == "word":
                self._at += 1

    def _word_text(self) -> str:
        token = self._peek()
        self._at += 1
        return "" if token is None else self._expander.text(token.word).text

    def _execute(self, words: list[Word], first: Token) -> Status:
        self._n_commands += 1
        if self._n_commands > MOST_COMMANDS:
            raise ValueError(
                f"line {first.line}: the script runs more than {MOST_COMMANDS:,} commands, too many to read"
            )
        while words and (found := assignment(words[0])) is not None:
            self._assign(*found)
            words = words[1:]
        name = plain(words[0]) if words else None
        if name in DECLARATIONS:
            return self._declare(name, words[1:])
        texts = [text for word in words for text in self._expander.fields(word)]
        match texts[:1]:
            case [Text(text="eval")]:
                return self.evaluate(texts[1:])
            case [Text(text=command)] if command in self._functions and self._depth < MOST_CALLS:
                return self._call(command, texts[1:])
            case [Text(text="[" | "test")]:
                return holds([text.text for text in texts[1:] if text.text != "]"])
            case [Text(text="source" | ".")]:
                self._note(first, f"`source {' '.join(text.text for text in texts[1:])}` is not followed")
                return None
            case [Text(text="shift")]:
                del self._variables.positional[:1]
                return True
            case [Text(text="false")]:
                return False
            case [Text(text=command)] if DOTTED.match(command):
                self._tell_stray(texts, first)
        if not texts or texts[0].text in SUCCEEDING:
            return True
        if launched := arguments(texts):
            self.script.launches.append(launched)
            self.script.programs.append(program(texts))
        return None

    def _call(self, name: str, arguments: list[Text]) -> Status:
        outer = self._variables.positional
        self._variables.positional = arguments
        self._depth += 1
        status = self.run(*self._functions[name])
        self._depth -= 1
        self._variables.positional = outer
        return status

    def _declare(self, keyword: str, words: list[Word]) -> Status:
        for word in words:
            found = assignment(word)
            if found is not None:
                self._assign(*found)
            name = found[0] if found is not None else plain(word)
            if keyword == "export" and name is not None and not name.startswith("-"):
                self.exported.append(name)
        return True

    def _assign(self, name: str, appends: bool, word: Word) -> None:
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

    def _note(self, token: Token, text: str) -> None:
        self.script.notes.append(f"line {token.line}: {text}")

    def _tell_stray(self, texts: Sequence[Text], first: Token) -> None:
        """Tell that arguments begin a command, because the line before them does not continue."""
        keys = sum(bool(OVERRIDE.match(text.text) or text.text.startswith("--")) for text in texts)
        others = f" and the {keys - 1} keys after it" if keys > 2 else " and the key after it" if keys == 2 else ""
        self.script.problems.append(
            f"line {first.line}: bash runs `{texts[0].text}` as a command, so that it{others} are not read; a `\\` "
            "continues a line only as its last character, with no blank and no comment after it"
        )

    def _tell_unread(self, token: Token, start: int, reason: str) -> None:
        """Tell what the tokens from `start` on would set or start, if they do."""
        found = effects(self._tokens[start : self._at], frozenset(self._functions))
        if found:
            self.script.problems.append(f"line {token.line}: {reason}, so that {' and '.join(found)} are not read")
