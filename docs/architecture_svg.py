"""Draw the packages of learnkit as an SVG: `python docs/architecture_svg.py` writes docs/architecture.svg.

A box is a package or a module; it imports only from boxes in lower rows, and from boxes to its left. Numbered circles
mark the files that a training batch passes, squares with letters the files that a checkpoint passes. Colors follow the
surrounding text where the picture is part of a page, and the reader's light or dark setting where it is a file."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

FILE = Path(__file__).with_name('architecture.svg')
# pixels: the picture, its margin, the space between boxes, a line of text, the head of a box
WIDTH = 840
MARGIN = 10
GAP = 12
LINE = 20
HEAD = 30
MARK = 20  # the width of a mark

STYLE = """
  svg:root { color: #1f2328; --accent: #0a58ca; background: #ffffff; }
  @media (prefers-color-scheme: dark) { svg:root { color: #e6edf3; --accent: #79b8ff; background: #0d1117; } }
  .architecture text { font: 13px system-ui, sans-serif; fill: currentColor; }
  .architecture .package { font: 600 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
  .architecture .box { fill: currentColor; fill-opacity: .035; stroke: currentColor; stroke-opacity: .4; }
  .architecture .mark { fill: none; stroke: var(--accent, currentColor); stroke-width: 1.5; }
  .architecture .sign { font-size: 11px; font-weight: 600; text-anchor: middle; }
""".strip('\n')


@dataclass(frozen=True)
class Box:
    "A package or a module, with a description."

    name: str
    lines: tuple[str, ...]  # `#1` and `#A` before a text are marks
    share: float = 1  # share of the width of its row
    columns: int = 1  # the lines fill one row of columns after the other


# from the top to the bottom: PACKAGES of tests/project/test_package.py, its end first
ROWS = (
    (
        Box('learner', ('#1 a method for each feature',), 2.05),
        Box('sklearn', ('estimators',), 0.95),
        Box('interop', ('adapters',), 0.85),
        Box('learnkit', ('names',), 0.85),
        Box('testing', ('for tests',), 0.85),
        Box('demo', ('digits',), 0.7),
        Box('all', ('notebooks',), 0.95),
    ),
    (
        Box('callbacks', ('#8 recorder, schedules, precision', '#A #C checkpoint'), 1.2),
        Box('monitors', ('speed, memory, optimizers', 'activations, data'), 1.05),
        Box('loggers', ('base: what all share', 'files, console, services')),
        Box('debug', ('explain, trace, doc', 'repr: of a Learner'), 0.8),
    ),
    (
        Box(
            'checkpoint',
            (
                '#B state: collect',
                '#D #E #F resume: find, restore',
                '#C #D file: one safetensors file',
                '#C #D folder: find, prune',
            ),
            1.2,
        ),
        Box(
            'distributed',
            ('callback, processes', 'ddp, fsdp: replicas, shards', 'launch, failures'),
        ),
        Box(
            'inference',
            ('predict, gather', 'sinks: into files', 'interpretation, show'),
            0.8,
        ),
    ),
    (
        Box(
            'engine',
            (
                *(
                    '#2 run: around the loop',
                    '#3 loop: a method a level',
                    '#8 train_eval: counters',
                ),
                *(
                    'events: the lifecycle',
                    'dispatch: events to handlers',
                    'callback: the base class',
                ),
                *(
                    '#B #F callback_state',
                    '#4 #B positions: in the data',
                    '#F resumed_run: ResumedRun',
                ),
                *(
                    '#B #F processes: one process',
                    'evaluation_schedule: what is due',
                    'seams, snapshot, traits',
                ),
            ),
            columns=3,
        ),
    ),
    (
        Box('optim', ('#7 wrapper: OptimWrapper', 'optimizers, annealing')),
        Box('losses', ("#6 by fastai's names",)),
        Box('data', ('#4 dataloaders, prefetch', '#B #F position, shard')),
        Box('metrics', ('#8 averages', 'functional, whole_set')),
    ),
    (
        Box(
            'core',
            (
                *('#5 batch: split, move, count', '#B #F random: generators'),
                *('#C files: atomic writes', 'errors, time, plain, html'),
            ),
            2.2,
            columns=2,
        ),
        Box('comm', ('ranks: collectives', 'dtensor: sharded tensors')),
    ),
)

LEGEND = (
    (MARGIN, 'Imports go down, and to the left within a row.'),
    (330, '#1 the path of a batch'),
    (520, '#A the path of a checkpoint'),
)


def height(row: tuple[Box, ...]) -> int:
    return HEAD + LINE * max(-(-len(box.lines) // box.columns) for box in row) + 4


def words(x: float, y: float, line: str) -> list[str]:
    "Return one line of a box: a circle or a square for each mark, followed by the text."
    parts = []
    while line.startswith('#'):
        sign, _, line = line[1:].partition(' ')
        parts += mark(x, y, sign)
        x += MARK
    return [*parts, f'<text x="{x:g}" y="{y:g}">{escape(line)}</text>']


def mark(x: float, y: float, sign: str) -> list[str]:
    "Return a circle with a number (path of a batch) or a square with a letter (path of a checkpoint)."
    shape = (
        f'<circle class="mark" cx="{x + 8:g}" cy="{y - 4.5:g}" r="8"/>'
        if sign.isdigit()
        else f'<rect class="mark" x="{x:g}" y="{y - 12.5:g}" width="16" height="16" rx="2"/>'
    )
    return [shape, f'<text class="sign" x="{x + 8:g}" y="{y - 0.5:g}">{sign}</text>']


def draw_row(row: tuple[Box, ...], y: float) -> list[str]:
    "Return the boxes of a row whose top is at `y`."
    parts = []
    x = float(MARGIN)
    whole = WIDTH - 2 * MARGIN - GAP * (len(row) - 1)
    for box in row:
        width = whole * box.share / sum(other.share for other in row)
        parts += [
            f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height(row)}" rx="6"/>',
            f'<text class="package" x="{x + 10:.1f}" y="{y + 21:g}">{box.name}</text>',
        ]
        for i, line in enumerate(box.lines):
            row_of_lines, column = divmod(i, box.columns)
            left = x + 10 + column * (width - 10) / box.columns
            parts += words(round(left, 1), y + HEAD + 13 + row_of_lines * LINE, line)
        x += width + GAP
    return parts


def draw() -> str:
    "Return the picture."
    parts = []
    y = float(MARGIN)
    for row in ROWS:
        parts += draw_row(row, y)
        y += height(row) + GAP
    for left, line in LEGEND:
        parts += words(left, y + 14, line)
    total = int(y + 14 + MARGIN)
    return '\n'.join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="architecture" viewBox="0 0 {WIDTH} {total}" '
            f'width="{WIDTH}" height="{total}" role="img" aria-label="The packages of learnkit, '
            'in the order of their imports">',
            f'<style>\n{STYLE}\n</style>',
            *parts,
            '</svg>',
            '',
        ]
    )


if __name__ == '__main__':
    FILE.write_text(draw(), 'utf-8')
