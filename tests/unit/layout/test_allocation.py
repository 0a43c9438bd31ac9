"""Allocation strings: their values, the carets of their errors, and that a printed allocation parses to the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.layout.allocation import Allocation, RoleAllocation
from fivefold.layout.errors import AllocationError, RuleError
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.parser import parse, parse_backend

LETTERS_OF = {"megatron": "dtpcev", "fsdp": "dtc", "transformers": "d", "vllm": "dtp", "sglang": "dtp"}


def layout(backend: str, **degrees: int) -> ParallelLayout:
    return ParallelLayout(
        backend, **{**dict.fromkeys(("tp", "pp", "cp", "dp", "vpp", "ep", "etp", "edp"), 1), **degrees}
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", layout("megatron", tp=2, pp=4, cp=2, ep=4)),
        ("megatron:d2p2t2c2e2", layout("megatron", dp=2, pp=2, tp=2, cp=2, ep=2, edp=4)),
        ("megatron:(attn:d4t2|ffn:t2e2)", layout("megatron", dp=4, tp=2, etp=2, ep=2, edp=2)),
        ("megatron:p2v4", layout("megatron", pp=2, vpp=4)),
        ("megatron:(attn:d2p2v2|ffn:p2v2e2)", layout("megatron", dp=2, pp=2, vpp=2, ep=2)),
        ("fsdp:d2t2c2", layout("fsdp", dp=2, tp=2, cp=2, etp=2, edp=4)),
        ("sglang:d4t4", layout("sglang", dp=4, tp=4, etp=4, edp=4)),
        ("vllm:t2p2", layout("vllm", tp=2, pp=2, etp=2)),
        ("transformers:d2", layout("transformers", dp=2, edp=2)),
        ("megatron:d8t2p2v8c1e4", layout("megatron", dp=8, tp=2, pp=2, vpp=8, ep=4, edp=4)),
        ("megatron:d2t2\n", layout("megatron", dp=2, tp=2, edp=4)),
        (" megatron : ( attn : d2 | ffn : e2 ) ", layout("megatron", dp=2, ep=2)),
    ],
)
def test_a_role_has_the_degrees_that_are_written(text: str, expected: ParallelLayout) -> None:
    assert parse_backend(text) == expected


@pytest.mark.parametrize(
    ("text", "sizes", "n_devices"),
    [
        ("sglang:d4+megatron:d4", {"rollout": 4, "actor": 4}, 8),
        ("sglang:d4t4+megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", {"rollout": 16, "actor": 16}, 32),
        ("sglang[rollout]:d2+fsdp[actor]:d4|fsdp[critic]:d4", {"rollout": 2, "actor": 4, "critic": 4}, 6),
        ("vllm:d4t2|megatron:d2p4", {"rollout": 8, "actor": 8}, 8),
        ("megatron[a-1]:(attn:t2c2|ffn:t2e2)+vllm[b_2]:d4", {"a-1": 4, "b_2": 4}, 8),
        ("megatron[actor]:d2+megatron[ref]:d1", {"actor": 2, "ref": 1}, 3),
    ],
)
def test_several_roles_have_their_names_and_sizes(text: str, sizes: dict[str, int], n_devices: int) -> None:
    allocation = parse(text)
    assert {name: role.world_size for name, role in allocation.resolve().items()} == sizes
    assert allocation.n_devices == n_devices
    assert parse(str(allocation)) == allocation


@pytest.mark.parametrize("backend", LETTERS_OF)
def test_every_backend_takes_every_letter_with_a_degree_of_1(backend: str) -> None:
    assert parse(f"{backend}:d4t1p1c1e1v1") == parse(f"{backend}:d4")


def test_both_parts_of_a_folded_layout_take_a_degree_of_1() -> None:
    assert parse("megatron:(attn:d2e1|ffn:e2c1)") == parse("megatron:(attn:d2|ffn:e2)")


def test_sharing_binds_tighter_than_separating() -> None:
    groups = parse("vllm[a]:d1|fsdp[b]:d1+fsdp[c]:d2|vllm[d]:d2").groups
    assert [[role.name for role in group] for group in groups] == [["a", "b"], ["c", "d"]]


REFUSED = [
    # text, the character under the caret (its index), a part of the rule
    ("", 0, "a backend is expected"),
    ("megatrn:d4", 0, "unknown backend `megatrn`"),
    ("archon:d4", 0, "archon backend is not offered"),
    ("megatron d4", 9, "a `:` follows"),
    ("megatron:", 9, "degrees are expected"),
    ("megatron:D2", 9, "unknown dimension `D`"),
    ("megatron:attn:d2|ffn:e2", 9, "two parts stands in parentheses"),
    ("megatron:d", 10, "a number is missing"),
    ("megatron:d²", 10, "a number is missing"),
    ("megatron:d02", 10, "a degree is 1 or more"),
    ("megatron:d1234567", 10, "at most 6 digits"),
    ("megatron:d" + "0" * 5000, 10, "a degree is 1 or more"),
    ("m" * 5000 + ":d1", 0, "unknown backend `mmmmm"),
    ("megatron:d1" + " " * 10_000, 10_000, "10,011 characters are more than the 10,000 of the longest layout"),
    ("megatron:d40000", 0, "40,000 devices are more than the 32,768 that can be laid out"),
    ("vllm:d999999t999999p999999", 0, "are more than the 32,768 that can be laid out"),
    ("megatron:d*t99999", 0, "are more than the 32,768 that can be laid out"),
    ("megatron:(attn:t2t2|ffn:e2)", 17, "`t` (tensor) is given twice"),
    ("megatron:t*", 10, "goes with d only"),
    ("megatron:d2v2", 11, "one stage only"),
    ("megatron:e2", 9, "does not divide the 1 rank"),
    ("megatron:d2t2e3", 13, "does not divide the 4 ranks"),
    ("megatron:d1)", 11, "closes nothing"),
    ("megatron:d1,fsdp:d1", 11, "does not belong here"),
    ("megatron:(attn:d1|ffn:e1", 24, "is not closed"),
    ("megatron:(attn:d1)", 17, "`|ffn:...` follows"),
    ("megatron:(attn:d1|mlp:d1)", 18, "`ffn:` is expected"),
    ("megatron:(attn:d2e2|ffn:e2)", 17, "attn takes"),
    ("megatron:(attn:d2|ffn:c2)", 22, "ffn takes"),
    ("megatron:(attn:d2p2v2|ffn:v4e2)", 26, "share the pipeline"),
    ("megatron:(attn:d2t2|ffn:d2e4)", 24, "fill the same ranks"),
    ("megatron:(attn:d*t3|ffn:d2e2)", 24, "fill the same ranks"),
    ("megatron:(attn:d2t2|ffn:t4e2)", 26, "does not divide the 4 ranks"),
    ("megatron:(attn:d2t2|ffn:t3)", 24, "does not divide the 4 ranks"),
    ("fsdp:(attn:d1|ffn:d1)", 5, "one layout for all layers"),
    ("megatron[1a]:d1", 9, "a role's name is expected"),
    ("megatron[a:d1", 10, "is not closed"),
    ("sglang:d1|", 10, "a backend is expected"),
    ("+sglang:d1", 0, "a backend is expected"),
    ("megatron:d1+megatron:d1", 12, "two roles are both `actor`"),
    ("vllm[actor]:d1+fsdp:d1", 15, "two roles are both `actor`"),
    ("vllm[a]:d1+fsdp:d1+fsdp[c]:d1", 11, "each one is named"),
    ("vllm[a]:d2|fsdp[b]:d2+vllm[c]:d2|fsdp[d]:d4", 33, "their sizes differ"),
    ("vllm:d*+megatron:d*", 17, "two groups of devices ask for it"),
]


@pytest.mark.parametrize(("text", "position", "rule"), REFUSED)
def test_an_error_has_a_caret_under_the_character_at_fault(text: str, position: int, rule: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse(text)
    error = caught.value
    assert rule in error.rule
    assert error.position == position
    assert error.fix
    shown, caret = str(error).splitlines()[1:3]
    assert shown == f"  {text}" or len(text) > 200 > len(shown) - 10
    assert caret.strip() == "^"
    assert f"{shown} "[len(caret) - 1] == f"{text} "[position]


@pytest.mark.parametrize(
    ("layout", "fix", "mended"),
    [
        ("megatron:e2", "drop it, or make d a multiple of 2", "megatron:d2e2"),
        ("megatron:d2t2e3", "choose a divisor of 4, or make d a multiple of 3", "megatron:d3t2e3"),
        (
            "megatron:(attn:d2t2|ffn:t4e2)",
            "choose a divisor of 4, or make d a multiple of 4",
            "megatron:(attn:d4t2|ffn:t4e2)",
        ),
    ],
)
def test_too_many_parts_of_experts_are_told_how_many_ranks_they_need(layout: str, fix: str, mended: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse(layout)
    assert caught.value.fix.endswith(fix)
    parse(mended)


@pytest.mark.parametrize(("backend", "letters"), LETTERS_OF.items())
def test_a_backend_refuses_the_letters_that_it_does_not_take(backend: str, letters: str) -> None:
    for letter in set("dtpcev") - set(letters):
        with pytest.raises(
            AllocationError, match=f"{backend} takes {', '.join(letters)} only, not `{letter}`"
        ) as caught:
            parse_backend(f"{backend}:d2{letter}2")
        assert caught.value.position == len(f"{backend}:d2")
        assert caught.value.fix


def test_a_close_backend_is_suggested() -> None:
    with pytest.raises(AllocationError, match="write `megatron`"):
        parse("megatrn:d4")
    with pytest.raises(AllocationError, match="write `vllm`"):
        parse("vLLM:d4")


@pytest.mark.parametrize(
    ("text", "position", "rule"),
    [
        ("sglang:d4+megatron:d4", 9, "lays out one role"),
        ("megatron[actor]:d4", 8, "names the role already"),
    ],
)
def test_a_key_of_one_role_takes_one_role_without_a_name(text: str, position: int, rule: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse_backend(text)
    assert rule in caught.value.rule
    assert caught.value.position == position


@pytest.mark.parametrize(
    ("text", "n_devices", "dp"),
    [
        ("megatron:d*t2p2", 16, {"actor": 4}),
        ("vllm:d2t2+megatron:d*t2", 8, {"rollout": 2, "actor": 2}),
        ("vllm:d*t2|megatron:d4t2", 64, {"rollout": 4, "actor": 4}),
        ("vllm:d*t2|megatron:d*t4", 16, {"rollout": 8, "actor": 4}),
        ("vllm[a]:d1+fsdp[b]:d*|fsdp[c]:d*t2", 5, {"a": 1, "b": 4, "c": 2}),
        ("megatron:(attn:d*t2c2|ffn:t2e2)", 8, {"actor": 2}),
    ],
)
def test_a_star_takes_the_devices_that_are_left(text: str, n_devices: int, dp: dict[str, int]) -> None:
    assert {name: role.dp for name, role in parse(text).resolve(n_devices).items()} == dp


def test_a_star_follows_from_the_other_part_of_a_hybrid() -> None:
    assert parse_backend("megatron:(attn:d*t2|ffn:d2t2e2)").dp == 4
    assert parse_backend("megatron:(attn:d4t2|ffn:d*t2e2)").edp == 2


@pytest.mark.parametrize(
    ("text", "n_devices", "rule"),
    [
        ("megatron:d*", None, "not known"),
        ("megatron:d*t4", 6, "one replica takes t*p*c = 4"),
        ("vllm:d8+megatron:d*", 8, "`d*` has 0 devices"),
        ("megatron:d*e4", 6, "`d*` is d6 on 6 devices: e4 does not divide the 6 ranks"),
    ],
)
def test_a_star_that_cannot_be_filled_is_an_error(text: str, n_devices: int | None, rule: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse(text).resolve(n_devices)
    assert rule in caught.value.rule
    assert caught.value.text[caught.value.position] == "*"


def test_values_obey_the_same_rules_as_strings() -> None:
    with pytest.raises(RuleError, match="does not divide"):
        RoleAllocation("megatron", dp=2, ep=3)
    with pytest.raises(RuleError, match="fsdp takes d, t, c only"):
        RoleAllocation("fsdp", pp=2)
    with pytest.raises(RuleError, match="unknown backend"):
        RoleAllocation("deepspeed")
    with pytest.raises(RuleError, match="at least 1"):
        RoleAllocation("megatron", tp=0)
    with pytest.raises(RuleError, match="not a name"):
        RoleAllocation("megatron", name="a b")
    with pytest.raises(RuleError, match="no role"):
        Allocation(())
    with pytest.raises(ValueError, match="share the ranks of a stage"):
        layout("megatron", dp=2, ep=4)


@st.composite
def roles(draw: st.DrawFn, is_open: bool | None = None) -> RoleAllocation:
    """Any valid role, without a name."""
    backend = draw(st.sampled_from(sorted(LETTERS_OF)))
    degree = st.integers(1, 6)
    tp, pp, cp = (draw(degree) if letter in LETTERS_OF[backend] else 1 for letter in "tpc")
    vpp = draw(degree) if pp > 1 and backend == "megatron" else 1
    dp = None if (draw(st.booleans()) if is_open is None else is_open) else draw(degree)
    ep = etp = 1
    if backend == "megatron":
        ranks = (dp or 12) * tp * cp
        ep = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
        etp = draw(st.sampled_from([n for n in range(1, ranks // ep + 1) if ranks // ep % n == 0]))
    return RoleAllocation(backend, dp=dp, tp=tp, pp=pp, cp=cp, vpp=vpp, ep=ep, etp=etp)


@st.composite
def allocations(draw: st.DrawFn) -> Allocation:
    """Any valid allocation: up to three groups, at most one of them open, of up to three roles of equal size."""
    open_group = draw(st.integers(0, 3))
    groups = []
    for index in range(draw(st.integers(1, 3))):
        first = draw(roles(is_open=index == open_group))
        others = draw(st.lists(roles(is_open=True), max_size=2)) + ([first] if draw(st.booleans()) else [])
        groups.append([first, *others])
    name = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
    total = sum(len(group) for group in groups)
    names = iter(draw(st.lists(name, min_size=total, max_size=total, unique=True)))
    fields = ("backend", "dp", "tp", "pp", "cp", "vpp", "ep", "etp")
    return Allocation(
        tuple(
            tuple(
                RoleAllocation(name=next(names), **{field: getattr(role, field) for field in fields}) for role in group
            )
            for group in groups
        )
    )


@given(allocations())
def test_printed_allocations_parse_to_the_same(allocation: Allocation) -> None:
    assert parse(str(allocation)) == allocation


@given(roles())
def test_printed_roles_parse_to_the_same(role: RoleAllocation) -> None:
    assert parse(str(role)) == Allocation(((role,),))


@given(roles(is_open=False))
def test_both_sides_of_a_layout_fill_its_world(role: RoleAllocation) -> None:
    resolved = role.resolve()
    assert resolved.world_size == role.n_devices
    assert resolved.world_size == resolved.edp * resolved.etp * resolved.ep * resolved.pp
    assert resolved.world_size == resolved.dp * resolved.tp * resolved.cp * resolved.pp


@given(st.text(alphabet="megatronvlfsd:()|+[]*0123456789 xpc", max_size=30))
def test_no_text_escapes_as_another_error(text: str) -> None:
    try:
        allocation = parse(text)
    except AllocationError as error:
        assert 0 <= error.position <= len(text)
    else:
        assert parse(str(allocation)) == allocation
