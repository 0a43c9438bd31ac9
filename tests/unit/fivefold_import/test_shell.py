"""Launch scripts: the arguments that bash would pass on, found without running anything."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
from dialect_conversion import ENVIRONMENT, FIXTURES, bash_arguments
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold_import.shell.script import read_script
from fivefold_import.slime.files import starts
from fivefold_import.source import read_document

SNIPPETS = {
    "quotes": """A='x  y'; python3 -m t a="$A" b='$A' c=\\$A d="it's" e='say "no"' f="a\\"b\\$c" g=$'h'""",
    "splitting": """A='x=1 y=2'; B=; python3 -m t $A "$A" z=$B "" $B end=1""",
    "defaults": """E=; python3 -m t a=${E:-d} b=${E-d} c=${U-d} d=${U:-"two words"} e=${U:-${V:-deep}} f=${HOME:+set} g=${U+set}""",
    "assigning default": """: ${A:=7}; python3 -m t a=$A b=${A:-8}""",
    "trimming": """P=/a/b.c/run.tar.gz; python3 -m t a=${P##*/} b=${P#*/} c=${P%.*} d=${P%%.*} e=${P/a/x} f=${P//\\//_} g=${#P}""",
    "quotes in defaults": """X='a b'; python3 -m t ${U:-"a=1 b=2"} ${U:-c=3 d=4} e=${U:-x"$X"y} $'f=it\\'s' """,
    "quotes in quoted defaults": """X='a b'; python3 -m t a="${U:-'x y'}" b="${U:-"x y"}" c="${U:-'$X'}" d="${U:-"'$X'"}" """
    """e="${U:-a\\"b}" f="${U:-a\\'b}" g="${U:-a\\b}" h="${U:-\\$X}" i="${X:+'q'}" j="${U:-${V:-'deep'}}" """
    """k=${U:-"${V:-'deep'}"} l=${U:-'x}y'} m="${U:-'x}y'}" n="${W:='v w'}" o="$W" p=${U:-a\\}b} q="${U:-a\\}b}" """,
    "quotes in quoted patterns": """P=abc; python3 -m t a="${P#'a'}" b="${P%'c'}" c="${P/'b'/x}" """,
    "upper and lower case": """A='Hello World'; python3 -m t a="${A,,}" b="${A^^}" c="${A,}" d="${A^}" e=${U,,}""",
    "parts of texts": """A='Hello World'; N=2; python3 -m t a="${A:1:2}" b="${A:6}" c="${A: -3}" d="${A:1:-2}" e="${A:(-3):2}" """
    """f="${A:20}" g="${A:0:0}" h="${A: -20}" i="${A: -20:3}" j="${A:N}" k="${A:$N:3}" l="${A:N+1:$((N+1))}" m="${A::4}" """
    """n="${A:3:}" o=${A:-2} p=${U:1:2}""",
    "patterns": """P=a/b*c; S=b; python3 -m t a=${P/#a/x} b=${P/%c/x} c="${P//'*'/-}" d=${P/\\*/-} e=${P/$S\\*/"$S"} f=${P//[/x}""",
    "arguments of functions": """run() { local N=$1; shift; python3 -m t n=$N c=$# d=${3:-none} "$@"; }; run 4 a=1 "b=2 3" """,
    "arithmetic": """A=6; B=4; python3 -m t a=$((A * B)) b=$(($A*$B+1)) c=$((-7 / 2)) d=$((-7 % 3)) e=$(((A+B)*2)) f=$((A>B))""",
    "arrays": """L=(a=1 "b=2 3"); L+=(c=$((1+1))); python3 -m t "${L[@]}" n=${#L[@]} first="${L[0]}" last="${L[2]}" """,
    "empty array": """L=(); python3 -m t "${L[@]}" a=1""",
    "continued": "python3 -m t \\\n  a=1 \\\n  # b=2\n",
    "continued in words": 'python3 -m t b="x\\\ny" c=x\\\ny\n',
    "comments": "# python3 -m t a=0\npython3 -m t a=1#2 # b=3\n",
    "if": """A=2; if [ "$A" -eq 1 ]; then B=one; elif [[ $A == 2 && -n "$A" ]]; then B=two; else B=other; fi
             python3 -m t b=$B""",
    "nested if": """A=; if [ -z "$A" ]; then if [ "x" != "x" ]; then B=1; else B=2; fi; fi; python3 -m t b=$B""",
    "and, or": """A=1; [ "$A" = 2 ] && B=x || B=y; [[ $A -lt 3 ]] && C=z; ! false && D=w; python3 -m t b=$B c=$C d=$D""",
    "negated tests": """A=; [ ! -n "$A" ] && B=x; [[ ! -z $A ]] || C=y; python3 -m t b=$B c=$C""",
    "brackets in tests": """A=1; if [[ ( $A == 1 || $A == 2 ) && -n x ]]; then B=in; fi; [[ $A == 3 || $A == 1 ]] && C=or; python3 -m t b=$B c=$C""",
    "arithmetic command": """A=2; ((A > 1)) && B=x || B=y; python3 -m t b=$B""",
    "items of arrays": """L=(a b); python3 -m t x="${L[1]}" y="${L[5]}" z=$L w=$((MISSING + 1))""",
    "group": """{ A=1; B=2; }; python3 -m t a=$A b=$B""",
    "case with brackets": """M=y; case $M in (x|y) K=1;; (*) K=2;; esac; python3 -m t k=$K""",
    "case": """M=qwen3-moe; case "$M" in llama*) K=1;; qwen3-moe|qwen3) K=2 ;; *) K=3;; esac; python3 -m t k=$K""",
    "function": """f() { A=$((A + 1)); }; function g { f; f; }; A=1; g; python3 -m t a=$A""",
    "defined, not called": """f() { A=2; python3 -m t a=9; }; A=1; python3 -m t a=$A""",
    "eval": """A=5; C=(python3 -m t a=\\$A "b=\\$((A + 1))"); A=6; eval "${C[@]}" c=\\$A""",
    "here-document": """cat > /dev/null <<EOF\npython3 -m t a=2\nEOF\npython3 -m t a=1""",
    "quoted here-document": """cat <<'E' > /dev/null\nit's $(not closed\nE\npython3 -m t a=1""",
    "piped": """python3 -m t a=1 | cat""",
    "exported": """export A=1 B="x y"; C=3 python3 -m t a=$A b="$B" """,
    "appended": """A=a=1; A+=,2; python3 -m t $A""",
    "subshell": """(A=1; python3 -m t a=$A)""",
    "no arguments": """main() { python3 -m t a=1 "$@"; }; main "$@" """,
    "braces of others": """python3 -m t 'a=${b.c}' b='{x: 1}' c=[1,2] d={} """,
}


def arguments(script: str) -> list[str]:
    (launch,) = read_script(script, ENVIRONMENT).launches
    return [word.text for word in launch]


def test_arguments_are_those_of_bash() -> None:
    for name, script in SNIPPETS.items():
        assert arguments(script) == bash_arguments(script), name


def test_a_line_continues_only_where_bash_continues_it_and_the_rest_is_told() -> None:
    cases = {
        # A blank after the backslash: bash passes the blank on, and ends the command.
        "python3 -m t a.b=1 \\ \n  a.c=2 \\\n  a.d=3\ntrue": (2, "a.c=2", "the key after it"),
        "python3 -m t a.b=1 \\ # why\n  +a.c=2 a.d=3 a.e=4\ntrue": (2, "+a.c=2", "the 2 keys after it"),
        # A backslash in a comment is a part of it.
        "python3 -m t a.b=1 \\\n  # a.x=0 \\\n  --flag=2 \\\n  a.c=3\ntrue": (3, "--flag=2", "the key after it"),
        "python3 -m t a.b=1 # one \\\n  a.c=2\ntrue": (2, "a.c=2", "it are not read"),
    }
    for text, (line, first, others) in cases.items():
        script = read_script(text, {})
        assert [word.text for word in script.launches[0]] == bash_arguments(text), text
        (problem,) = script.problems
        assert problem.startswith(f"line {line}: bash runs `{first}` as a command"), text
        assert others in problem, text


def test_what_is_not_read_because_commands_are_not_run_is_told() -> None:
    launch = "\npython3 -m t b.c=$A"
    for text, line, words in (
        ("[ -f x ] || A=1", 1, "before `||` succeeds"),
        ("\nnvidia-smi && export A=1 B=2", 2, "the values of A, B"),
        ("nvidia-smi && { A=1; L=(x); }", 1, "the values of A, L"),
        ("f() { A=1; }; nvidia-smi || f", 1, "the arguments of f"),
        ("for i in 1 2; do A=$i; done", 1, "loops are not followed"),
        ("while read x; do python3 -m other a.b=$x; done", 1, "the arguments of python3"),
        ("cat list | python3 -m other a.b=1", 1, "after a `|`"),
    ):
        (problem,) = read_script(text + launch, {}).problems
        assert problem.startswith(f"line {line}: "), text
        assert words in problem, text
    for text in ("mkdir -p x && A=1", "nvidia-smi || exit 1", "python3 -m t a=1 2>&1 | tee log", "f() { x || A=1; }"):
        assert read_script(text + launch, {}).problems == [], text


def test_a_script_that_launches_nothing_says_what_was_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("conda activate x && python3 -m t a.b=1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"no command with key=value.*the arguments of python3 are not read"):
        read_document(path, {})


def test_the_program_of_a_launch_is_known() -> None:
    for script, program in {
        "python3 -m verl.trainer.main_ppo a=1": "verl.trainer.main_ppo",
        "torchrun --nproc-per-node 8 -m verl.trainer.sft_trainer a=1": "verl.trainer.sft_trainer",
        "nohup python -u examples/run.py --config x.yaml a=1 &": "examples/run.py",
        "env VLLM_USE_V1=1 python3 -m verl.trainer.main_ppo a=1": "verl.trainer.main_ppo",
    }.items():
        assert read_script(script, {}).programs == [program], script


def test_fixtures_give_the_arguments_that_bash_gives() -> None:
    for script in sorted(FIXTURES.glob("*.sh")):
        text = script.read_text(encoding="utf-8")
        run = '\neval "${TRAINING_CMD[@]}"\n' if "TRAINING_CMD" in text else ""
        if script.name.startswith(("slime_", "miles_")):
            ((_, *expected), (launch,)) = bash_arguments(text), read_script(text, {}, starts).launches
            assert [word.text for word in launch] == expected, script.name
        else:
            assert arguments(text) == bash_arguments(text + run), script.name


def test_single_quotes_keep_a_backslash_before_the_end_of_a_line() -> None:
    assert arguments("python3 -m t a='x\\\ny'") == ["-m", "t", "a=x\\\ny"]


def test_redirections_are_no_arguments() -> None:
    launches = read_script("python3 -m t a=1 2>&1 > /dev/stderr b=2; python3 -m t a=1 b=2", {}).launches
    assert [[word.text for word in launch] for launch in launches] == [["-m", "t", "a=1", "b=2"]] * 2


def expressions() -> st.SearchStrategy[tuple[str, int]]:
    """Return arithmetic expressions with their values: the shell rounds towards 0, a remainder has its dividend's sign."""

    def join(left: tuple[str, int], sign: str, right: tuple[str, int]) -> tuple[str, int]:
        a, b = left[1], right[1]
        if sign in "/%" and b == 0:
            sign = "+"
        quotient = math.trunc(Fraction(a, b)) if sign in "/%" else 0
        value = {"+": a + b, "-": a - b, "*": a * b, "/": quotient, "%": a - b * quotient}[sign]
        return f"({left[0]}) {sign} ({right[0]})", value

    numbers = st.integers(-50, 50).map(lambda value: (str(value), value))
    return st.recursive(numbers, lambda inner: st.builds(join, inner, st.sampled_from("+-*/%"), inner), max_leaves=6)


@settings(max_examples=100, deadline=None)
@given(expressions())
def test_arithmetic_is_that_of_whole_numbers(case: tuple[str, int]) -> None:
    expression, value = case
    assert arguments(f"python3 -m t a=$(({expression}))") == ["-m", "t", f"a={value}"]


def test_commands_are_not_run_and_their_output_is_left_empty_with_a_note(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    script = f"A=$(touch {mark}); B=`touch {mark}`; eval touch {mark}; python3 -m t a=x$A b=$B c=1; touch {mark}"
    (launch,) = read_script(script, {}).launches
    assert not mark.exists()
    assert [word.text for word in launch] == ["-m", "t", "a=x", "b=", "c=1"]
    assert "touch" in launch[2].notes[0]
    assert "not run" in launch[3].notes[0]
    assert launch[4].notes == ()


def test_a_variable_that_nothing_sets_is_named_with_the_way_to_set_it() -> None:
    (launch,) = read_script("python3 -m t data.train_files=$DATA", {}).launches
    assert "DATA=..." in launch[2].notes[0]
    (launch,) = read_script("python3 -m t data.train_files=$DATA", {"DATA": "/d"}).launches
    assert launch[2].text == "data.train_files=/d"
    assert launch[2].notes == ()


def test_an_if_that_depends_on_a_command_is_taken_as_false_and_is_a_problem() -> None:
    script = read_script("A=1\nif nvidia-smi | grep -q H100; then\n A=2\nfi\npython3 -m t a=$A", {})
    (word,) = [word for word in script.launches[0] if word.text == "a=1"]
    assert word.notes == ("$A depends on line 2, which is not followed",)
    assert re.search(r"line 2: the values of A are uncertain: .*taken as false", script.problems[0])
    assert read_script("if nvidia-smi; then\n echo H100\nfi\npython3 -m t a=1", {}).problems == []


def test_a_choice_by_the_output_of_a_command_is_a_problem_that_names_the_variable() -> None:
    device = 'D=${D:-$(python3 -c "import torch_npu" && echo npu || echo gpu)}\n'
    launch = "\npython3 -m t a.tp=$TP a.b=1"
    case = 'case "$D" in gpu) TP=4 ;; npu) TP=8 ;; *) exit 1 ;; esac'
    either = 'if [ "$D" = npu ]; then TP=8; else TP=4; fi'
    for text, tp, what in (
        (case, "", "no branch"),
        (either, "4", "taken as false"),
        (either.replace("[ ", "[[ ").replace(" ]", " ]]"), "4", "taken as false"),
        ("TP=4; [ $D = npu ] && TP=8", "4", "before `&&` succeeds"),
    ):
        script = read_script(device + text + launch, {})
        (problem,) = script.problems
        assert problem.startswith("line 2: the values of TP are "), text
        for part in (what, "$D is not known", "it prints npu or gpu", "D=... fivefold import"):
            assert part in problem, (text, part)
        (word,) = [word for word in script.launches[0] if word.text.startswith("a.tp=")]
        assert word.text == f"a.tp={tp}", text
        assert word.notes == ("$TP depends on line 2, which is not followed",), text
        known = read_script(device + text + launch, {"D": "npu"})
        assert known.problems == [], text
        assert "a.tp=8" in [word.text for word in known.launches[0]], text


def test_a_command_that_may_fail_has_two_outcomes() -> None:
    script = read_script("nvidia-smi && A=1 || A=2\npython3 -m t a.b=$A", {})
    assert [problem.partition(":")[0] for problem in script.problems] == ["line 1", "line 1"]
    assert ["the values of A" in problem for problem in script.problems] == [True, True]


def test_a_file_that_is_sourced_is_not_followed() -> None:
    script = read_script("source env.sh\npython3 -m t a=1", {})
    assert [word.text for word in script.launches[0]] == ["-m", "t", "a=1"]
    assert re.search(r"line 1.*`source env.sh` is not followed", script.notes[0])


def test_a_placeholder_of_a_manual_is_a_word() -> None:
    assert arguments("python3 -m t path=x <your/model> a=1") == ["-m", "t", "path=x", "<your/model>", "a=1"]


def test_loops_are_skipped() -> None:
    assert arguments("A=1; for i in 1 2; do A=$i; python3 -m t a=$i; done; python3 -m t a=$A") == ["-m", "t", "a=1"]


def test_functions_that_call_themselves_end() -> None:
    assert read_script("f() { f; }; f; python3 -m t a=1", {}).launches


def test_launches_are_programs_with_overrides() -> None:
    for script, expected in {
        "torchrun --nproc-per-node 8 train.py a=1": [["a=1"]],
        "/opt/env/bin/python3.11 -m verl.trainer.main_ppo a=1": [["-m", "verl.trainer.main_ppo", "a=1"]],
        "nohup python -u run.py --config x.yaml a=1 &": [["--config", "x.yaml", "a=1"]],
        "CUDA_VISIBLE_DEVICES=0,1 PYTHONPATH=. python run.py +a=1": [["+a=1"]],
        "ssh host ls key=1": [],
        "pip install 'torch>=2'; export A=1": [],
    }.items():
        launches = read_script(script, {}).launches
        assert [[word.text for word in launch] for launch in launches] == expected, script


def test_environment_variables_for_the_program_are_listed() -> None:
    script = read_script("export NCCL_DEBUG=INFO TP=2; python3 -m t tp=$TP", {})
    assert script.exported == ["NCCL_DEBUG"]


def test_scripts_that_are_not_closed_are_refused_with_the_line() -> None:
    for script, line in {
        "A=1\npython3 -m t a='x\n": 2,
        "\n\nif true; then A=1\n": 3,
        "L=(a\nb\n": 1,
        "A=${B\n": 1,
        "f() {\n a\n": 1,
    }.items():
        with pytest.raises(ValueError, match=rf"line {line}\b"):
            read_script(script, {})


def test_loops_that_count_are_followed() -> None:
    for header, expected in {
        "i=0; i<3; i++": [0, 1, 2],
        "i = 4; i > 0; i -= 2": [4, 2],
        "i=N; i<=N+4; i+=2": [3, 5, 7],
        "i=0; i<0; i++": [],
    }.items():
        loop = f"N=3; L=(a=1); for (({header})); do if (( i >= 0 )); then L+=(x$i=2); fi; done"
        script = f'{loop}\npython3 -m t "${{L[@]}}"'
        assert arguments(script) == ["-m", "t", "a=1", *(f"x{i}=2" for i in expected)], header
        assert arguments(script) == bash_arguments(script), header


def test_a_loop_that_never_ends_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 10,000 commands"):
        read_script("for ((i=0; i<1; i+=0)); do A=$i; done; python3 -m t a=1", {})
