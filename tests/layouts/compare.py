"""Comparisons of named tensors, each relative to its own scale."""

from __future__ import annotations

from hf_reference import Tensors


def relative_errors(got: Tensors, want: Tensors) -> dict[str, float]:
    """Return max |got - want| / max |want| of each tensor; the names must be the same."""
    assert got.keys() == want.keys(), f"only in one of the two: {sorted(got.keys() ^ want.keys())}"
    errors = {}
    for name, wanted in want.items():
        difference = (got[name].double() - wanted.double()).abs().max()
        errors[name] = float(difference / wanted.double().abs().max().clamp(min=1e-12))
    return errors


def assert_close(got: Tensors, want: Tensors, tolerance: float) -> None:
    """Assert that every tensor is within `tolerance` of the wanted one, relative to its largest element."""
    far = {name: error for name, error in relative_errors(got, want).items() if not error <= tolerance}
    worst = sorted(far, key=lambda name: -far[name])[:5]
    assert not far, f"{len(far)} of {len(want)} tensors differ: " + ", ".join(f"{n} by {far[n]:.1e}" for n in worst)


def difference(after: Tensors, before: Tensors) -> Tensors:
    """Return after - before, by name."""
    return {name: after[name].double() - before[name].double() for name in before}
