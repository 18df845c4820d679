"""A prediction as a picture: staleness and divisions, one SVG file without any library."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from asyppo_async.trainer.coordinator.simulate.plan import Prediction

_WIDTH, _HEIGHT, _LEFT, _TOP = 360, 200, 50, 40
_BLUE, _ORANGE = "#3b6ea8", "#c8772c"


def svg_of(title: str, prediction: Prediction, predictions: Sequence[Prediction]) -> str:
    """Panels side by side: share of tokens by staleness, and step time by number of servers if it was varied."""
    panels = [_bars("share of trained tokens, by staleness", prediction.figures.staleness_histogram)]
    if len(predictions) > 1:
        points = [(float(one.division.num_servers), one.figures.step_s) for one in predictions]
        panels.append(_line("seconds of a step, by servers", points))
    step = _WIDTH + 2 * _LEFT
    body = "".join(
        f'<g transform="translate({_LEFT + index * step},{_TOP})">{panel}</g>'
        for index, panel in enumerate(panels)
    )
    width, height = step * len(panels), _HEIGHT + 2 * _TOP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="8" y="14" font-size="13">{escape(title)}</text>{body}</svg>\n'
    )


def _bars(caption: str, shares: Sequence[float]) -> str:
    highest = max([*shares, 1e-9])
    slot = _WIDTH / max(1, len(shares))
    parts = [_frame(caption, highest)]
    for age, share in enumerate(shares):
        height = _HEIGHT * share / highest
        parts.append(
            f'<rect x="{slot * age + 2:.1f}" y="{_HEIGHT - height:.1f}" width="{max(1.0, slot - 4):.1f}" '
            f'height="{height:.1f}" fill="{_BLUE}"/>'
            f'<text x="{slot * (age + 0.5):.1f}" y="{_HEIGHT + 14}" text-anchor="middle">{age}</text>'
        )
    return "".join(parts)


def _line(caption: str, points: Sequence[tuple[float, float]]) -> str:
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    highest = max(y for _, y in points)
    placed = [
        (_WIDTH * (x - low) / max(1e-9, high - low), _HEIGHT * (1 - y / max(1e-9, highest)), x)
        for x, y in points
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in placed)
    marks = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_ORANGE}"/>'
        f'<text x="{x:.1f}" y="{_HEIGHT + 14}" text-anchor="middle">{value:g}</text>'
        for x, y, value in placed
    )
    return f'{_frame(caption, highest)}<polyline points="{path}" fill="none" stroke="{_ORANGE}"/>{marks}'


def _frame(caption: str, highest: float) -> str:
    return (
        f'<text x="0" y="-8">{escape(caption)}</text>'
        f'<line x1="0" y1="0" x2="0" y2="{_HEIGHT}" stroke="black"/>'
        f'<line x1="0" y1="{_HEIGHT}" x2="{_WIDTH}" y2="{_HEIGHT}" stroke="black"/>'
        f'<text x="-4" y="8" text-anchor="end">{highest:.3g}</text>'
        f'<text x="-4" y="{_HEIGHT}" text-anchor="end">0</text>'
    )
