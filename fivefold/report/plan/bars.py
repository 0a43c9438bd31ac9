"""Bars of stacked amounts: memory of a rank against its GPU, seconds of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fivefold.planning.memory import RankMemory
from fivefold.planning.rollout_memory import RolloutMemory
from fivefold.planning.timing import StepTime
from fivefold.report.plan.svg import FAINT, INK, LINE, Canvas, text_width

MEMORY_COLOURS = {
    "waiting roles": "#d7dde3",
    "weights": "#4e79a7",
    "reference": "#a0bbd8",
    "gradients": "#f28e2b",
    "optimizer": "#b07aa1",
    "optimizer buckets": "#c9a0bb",
    "weight buckets": "#86a9cc",
    "activations": "#59a14f",
    "log-probs": "#edc948",
    "temporaries": "#d4a83f",
    "KV cache": "#76b7b2",
    "buffers": "#9c755f",
    "CUDA, NCCL": "#bab0ac",
}
TIME_COLOURS = {
    "layers": "#59a14f",
    "LM head": "#edc948",
    "recomputation": "#f28e2b",
    "waits for the host": "#bab0ac",
    "tp, cp, ep traffic": "#e15759",
    "bubble": "#d7dde3",
    "dp traffic": "#b07aa1",
    "optimizer": "#4e79a7",
}


@dataclass(frozen=True)
class Bar:
    """One bar with its label, its parts and a note after it."""

    label: str
    parts: Mapping[str, float]
    note: str
    is_bold: bool = False
    """Whether label and note are bold."""


def trainer_parts(memory: RankMemory, others: int) -> dict[str, float]:
    """Return the memory of a rank by kind at its peak. Waiting roles keep `others` bytes on the same GPU."""
    turn = (
        {"log-probs": memory.logprobs} if memory.logprobs >= memory.temporaries else {"temporaries": memory.temporaries}
    )
    moments: tuple[dict[str, float], ...] = (
        {"activations": memory.activations, **turn},
        {"optimizer buckets": memory.update},
        {"weight buckets": memory.sending},
    )
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    return {
        "waiting roles": others,
        "weights": memory.weights,
        "reference": memory.reference,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        **fullest,
        "buffers": memory.buffers,
        "CUDA, NCCL": memory.context,
    }


def rollout_parts(memory: RolloutMemory, others: int) -> dict[str, float]:
    """Return the memory of a generating rank by kind."""
    return {
        "waiting roles": others,
        "weights": memory.weights,
        "KV cache": memory.kv_cache,
        "buffers": memory.workspace,
        "CUDA, NCCL": memory.context,
    }


def time_parts(time: StepTime) -> dict[str, float]:
    """Return the seconds of a step by part, on the slowest stage."""
    return {
        "layers": time.layers,
        "LM head": time.head,
        "recomputation": time.recompute,
        "waits for the host": time.launching,
        "tp, cp, ep traffic": time.exposed,
        "bubble": time.bubble,
        "dp traffic": time.data_parallel,
        "optimizer": time.optimizer,
    }


def draw_bars(
    canvas: Canvas, bars: Sequence[Bar], colours: Mapping[str, str], *, x: float, y: float, width: float,
    full: float, limit: str = "",
) -> float:  # fmt: skip
    """Draw bars one below another and return the y below them. A line labelled `limit` marks `full` on the scale."""
    label_width, note_width = 190.0, 190.0
    scale = (width - label_width - note_width) / max(full, *(sum(bar.parts.values()) for bar in bars))
    top = y
    for bar in bars:
        canvas.text(x, y + 14, bar.label, bold=bar.is_bold)
        left = x + label_width
        for name, amount in bar.parts.items():
            canvas.rectangle(left, y, amount * scale, 20, fill=colours[name], tooltip=name)
            left += amount * scale
        canvas.text(x + width - note_width + 16, y + 14, bar.note, size=11, fill=INK if bar.is_bold else FAINT)
        y += 26
    if limit:
        end = x + label_width + full * scale
        canvas.line(end, top - 6, end, y - 2, stroke=INK, width=1.5)
        canvas.text(end, top - 10, limit, size=11, anchor="middle")
    return _legend(canvas, bars, colours, x + label_width, y + 4, width - label_width)


def _legend(canvas: Canvas, bars: Sequence[Bar], colours: Mapping[str, str], x: float, y: float, width: float) -> float:
    left = x
    for name, colour in colours.items():
        if not any(bar.parts.get(name, 0) > 0 for bar in bars):
            continue
        needed = 16 + text_width(name, 11) + 16
        if left + needed > x + width:
            left, y = x, y + 18
        canvas.rectangle(left, y, 11, 11, fill=colour, stroke=LINE, radius=2)
        canvas.text(left + 16, y + 10, name, size=11, fill=FAINT)
        left += needed
    return y + 22
