"""The few SVG elements that the pictures use, and their colours."""

from __future__ import annotations

import colorsys
from xml.sax.saxutils import escape

INK, FAINT, LINE, PAPER = "#1f2933", "#66727f", "#c5ccd3", "#ffffff"
FONT = "Inter, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"

_STAGES = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#e15759", "#9c755f")


class Canvas:
    """Elements in drawing order. Lengths are in pixels, y grows downwards."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.height = 0.0
        self._elements: list[str] = []

    def rectangle(
        self, x: float, y: float, width: float, height: float, *, fill: str = "none", stroke: str = "none",
        radius: float = 0, dash: str = "", tooltip: str = "", name: str = "",
    ) -> None:  # fmt: skip
        """Add a rectangle, with a tooltip for browsers and a name for scripts."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        named = f' id="{name}"' if name else ""
        inner = f"<title>{escape(tooltip)}</title>" if tooltip else ""
        self._elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" rx="{radius}" '
            f'fill="{fill}" stroke="{stroke}"{dashes}{named}>{inner}</rect>'
        )
        self.height = max(self.height, y + height)

    def text(
        self, x: float, y: float, text: str, *, size: float = 12, fill: str = INK, bold: bool = False,
        anchor: str = "start", mono: bool = False,
    ) -> None:  # fmt: skip
        """Add a text whose baseline is at y."""
        weight = ' font-weight="600"' if bold else ""
        family = " font-family=\"'JetBrains Mono', 'DejaVu Sans Mono', Menlo, monospace\"" if mono else ""
        self._elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}{family}>'
            f"{escape(text)}</text>"
        )
        self.height = max(self.height, y + size / 2)

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = LINE, width: float = 1) -> None:
        """Add a straight line from (x1, y1) to (x2, y2)."""
        self._elements.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width}"/>'
        )

    def render(self, title: str) -> str:
        """Return the document."""
        width, height = round(self.width), round(self.height + 24)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" font-family="{FONT}" role="img">',
                f"<title>{escape(title)}</title>",
                f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
                *self._elements,
                "</svg>",
                "",
            ]
        )


def text_width(text: str, size: float) -> float:
    """Return the approximate width of a text in pixels."""
    return len(text) * size * 0.56


def stage_colour(stage: int) -> str:
    """Return the colour of a pipeline stage. The eight colours repeat, darker each time."""
    colour = _STAGES[stage % len(_STAGES)]
    return mix(colour, INK, 0.25 * min(stage // len(_STAGES), 2))


def tint(colour: str) -> str:
    """Return a pale shade of a colour, as a background for text."""
    return mix(colour, PAPER, 0.74)


def shard_colour(kind: str, index: int, count: int) -> str:
    """Return a colour for shard `index` of `count`; each kind has its own range: t blue to violet, c yellow to red."""
    share = index / max(count - 1, 1)
    hue, lightness, saturation = {
        "t": (0.53 + 0.27 * share, 0.82, 0.62),
        "c": (0.14 - 0.15 * share, 0.79, 0.75),
        "d": (0.58, 0.93 - 0.16 * share, 0.10),
        "e": (0.25 + 0.85 * index / max(count, 1), 0.81, 0.55),
    }[kind]
    red, green, blue = colorsys.hls_to_rgb(hue % 1.0, lightness, saturation)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def mix(colour: str, other: str, share: float) -> str:
    """Return `colour` mixed with a share of `other`."""
    channels = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in channels)


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[start : start + 2], 16) for start in (1, 3, 5))
