"""Draw the lifecycle from `learnkit.engine.events` as an SVG: `python docs/lifecycle_svg.py` writes docs/lifecycle.svg.

A box is a loop. A bar is a level, from its `before_` to its `after_`, which a Cancel exception leaves early. Colors
follow the surrounding text where the picture is part of a page, and the reader's light or dark setting where it is a
file. The text can be selected."""

from __future__ import annotations

from html import escape
from pathlib import Path

from learnkit.engine.events import LEVELS, LIFECYCLE, LifecycleRow

FILE = Path(__file__).with_name('lifecycle.svg')
# pixels: a line, one depth, the margins, the picture
ROW = 24
STEP = 24
LEFT = 18
TOP = 8
WIDTH = 580

STYLE = """
  svg:root { color: #1f2328; --accent: #0a58ca; background: #ffffff; }
  @media (prefers-color-scheme: dark) { svg:root { color: #e6edf3; --accent: #79b8ff; background: #0d1117; } }
  .lifecycle text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: currentColor; }
  .lifecycle .note, .lifecycle .why { font-family: system-ui, sans-serif; font-size: 13px; }
  .lifecycle .note { font-weight: 600; }
  .lifecycle .cancel { fill-opacity: .75; }
  .lifecycle .after { font-weight: 400; font-style: italic; }
  .lifecycle .box { fill: currentColor; fill-opacity: .035; stroke: currentColor; stroke-opacity: .4; }
  .lifecycle .level { stroke: var(--accent, currentColor); stroke-width: 2.5; stroke-linecap: round; }
""".strip('\n')


def is_loop(moment: LifecycleRow) -> bool:
    return moment.event.startswith('[for each')


def loop_end(start: int) -> int:
    "Return the row after the last row of the loop whose note is at row `start`."
    inner = LIFECYCLE[start + 1].depth  # as deep as the note, or one deeper
    for row in range(start + 1, len(LIFECYCLE)):
        moment = LIFECYCLE[row]
        if moment.depth < inner or (moment.depth == inner and moment.event.startswith('[after')):
            return row
    return len(LIFECYCLE)


def loops() -> list[tuple[int, int]]:
    "Return the first row of every loop, its note, and the row after its last row."
    return [(row, loop_end(row)) for row, moment in enumerate(LIFECYCLE) if is_loop(moment)]


def levels() -> list[tuple[int, int, int]]:
    "Return the depth of every level that is drawn, the row of its `before_` event and the row of its `after_` event."
    ends = {level.before: level.after for level in LEVELS.values()}
    found = []
    for start, moment in enumerate(LIFECYCLE):
        if moment.event not in ends:
            continue
        end = next(
            row
            for row in range(start, len(LIFECYCLE))
            if LIFECYCLE[row].event == ends[moment.event]
        )
        found.append((moment.depth, start, end))
    return found


def x(depth: int) -> int:
    return LEFT + depth * STEP


def y(row: int) -> int:
    return TOP + row * ROW


def box(start: int, end: int) -> str:
    "Return the box of a loop."
    around = [LIFECYCLE[other].depth for other, other_end in loops() if other < start < other_end]
    left = x(LIFECYCLE[start].depth) - 12 + 3 * around.count(LIFECYCLE[start].depth)
    width = WIDTH - 8 * len(around) - 6 - left
    height = (end - start) * ROW - 2
    return f'<rect class="box" x="{left}" y="{y(start) + 2}" width="{width}" height="{height}" rx="6"/>'


def bar(depth: int, start: int, end: int) -> str:
    "Return the line from the `before_` event of a level to its `after_` event."
    left = x(depth) - 6
    return f'<path class="level" d="M{left} {y(start) + 7}V{y(end) + ROW - 7}"/>'


def words(row: int, moment: LifecycleRow) -> str:
    "One line: the event, or the note, and what leads to a cancel; a pointer on it shows what is true then."
    left = x(moment.depth)
    baseline = y(row) + 17
    kind = 'event'
    text = moment.event
    why = ''
    if is_loop(moment):
        kind = 'note'
        text = f'↻ {text.strip("[]")}'
    elif moment.is_note:
        kind = 'note after'
        text = text.strip('[]')
    elif '_cancel_' in text:
        kind = 'cancel'
        why = f'<tspan class="why" dx="10">{escape(moment.doc.split()[0])}</tspan>'
    title = f'<title>{escape(moment.doc)}</title>' if moment.doc else ''
    return f'<text class="{kind}" x="{left}" y="{baseline}">{title}{escape(text)}{why}</text>'


def draw() -> str:
    "Return the picture."
    height = y(len(LIFECYCLE)) + TOP
    return '\n'.join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="lifecycle" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-label="The lifecycle: every event in firing order">',
            f'<style>\n{STYLE}\n</style>',
            *[box(*loop) for loop in loops()],
            *[bar(*level) for level in levels()],
            *[words(row, moment) for row, moment in enumerate(LIFECYCLE)],
            '</svg>',
            '',
        ]
    )


if __name__ == '__main__':
    FILE.write_text(draw(), 'utf-8')
