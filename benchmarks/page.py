"""Measure the tables of `docs/performance.md`, and write them between their marks in the page.

A table stands between `<!-- NAME: written by python -m benchmarks --write -->` and `<!-- end -->`. The machine and the
date stand once in the page. A table that is measured on another machine or day says so itself.

    python -m benchmarks --write                         # all tables, in half an hour
    python -m benchmarks --write --quick                 # all tables, in one round each
    python -m benchmarks --write --tables step,real      # these tables
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import (
    checkpoint,
    compiling,
    environments,
    fit,
    imports,
    loader,
    memory,
    step,
    tasks,
)
from benchmarks.harness import Result, Workload, machine, measure

__all__ = ['TABLES', 'make_table', 'replace_block', 'write_tables']

PAGE = environments.ROOT / 'docs' / 'performance.md'
END = '<!-- end -->'
ROUNDS = 5
LABELS = {
    'raw': 'by hand',
    'raw-train': 'by hand, training alone',
    'raw-compiled': 'by hand, `torch.compile`',
    'raw-freed': 'by hand, with `del pred, loss`',
    'raw-import': '`import torch` alone',
    'learnkit-bare': 'learnkit, without Recorder and bar',
    'learnkit-bare-compiled': 'learnkit, without Recorder and bar, `compile(step=True)`',
    'learnkit-compiled': 'learnkit, `compile(step=True)`',
    'learnkit-model-compiled': 'learnkit, `compile()`',
    'learnkit-plain-adamw': 'learnkit, `AdamW` without `fused=True`',
    'learnkit-import': '`from learnkit import Learner` alone',
    'learnkit-blocking': '`Checkpoint`, in the foreground',
    'learnkit-background': '`Checkpoint`, in the background',
    'torch-save': '`torch.save`',
    'safe': '`torch.save`, safe from kills',
    'copy': 'copy of the tensors',
    'fastai-bare': 'fastai, without Recorder and bar',
    'ignite': 'Ignite',
    'lightning': 'Lightning',
    'composer': 'Composer',
    'torch': 'torch, DataLoader of a TensorDataset',
    'torch-getitems': 'torch, DataLoader with `__getitems__`',
}


def label_of(subject: str) -> str:
    "Return the name of a subject in the page."
    counted = re.fullmatch(r'(\w+)-(idle|handlers)(\d+)', subject)
    if counted is None:
        return LABELS.get(subject, subject)
    library, kind, n = counted.groups()
    what = 'idle callbacks' if kind == 'idle' else 'callbacks with a handler'
    return f'{library}, {n} {what}'


def make_row(cells: Iterable[Any]) -> str:
    "Return a row of a Markdown table."
    return f'| {" | ".join(map(str, cells))} |'.replace('|  |', '| |')


def make_table(
    results: dict[str, Result],  # one for each pair of columns, by the heading of the first one
    unit: str = '',  # behind a heading
) -> str:
    "Return a Markdown table: a row for each subject, with its median and its ratio to the reference."
    heads = [[f'{title}{unit}', 'ratio'] for title in results]
    lines = [
        make_row(['', *(head for pair in heads for head in pair)]),
        make_row(['---', *['--:'] * 2 * len(results)]).replace(' ', ''),
    ]
    rows = [{row['subject']: row for row in result.rows()} for result in results.values()]
    subjects = dict.fromkeys(subject for result in rows for subject in result)
    for subject in subjects:
        pairs = [format_cells(result.get(subject)) for result in rows]
        lines.append(make_row([label_of(subject), *(cell for pair in pairs for cell in pair)]))
    for title, result in results.items():
        for name, error in result.errors.items():
            lines.append(f'\nNot measured, after an error: {label_of(name)}, {title}.')
            print(error)
    return '\n'.join(lines)


def format_cells(row: dict[str, Any] | None) -> list[str]:
    "Return the median and the ratio of a subject, or dashes where it was not measured."
    if row is None:
        return ['-', '-']
    value = row['median']
    return [f'{value:,.1f}' if value < 100 else f'{value:,.0f}', f'{row["ratio"]:.2f}']


# -- tables ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    "Table of workloads in pairs of columns."

    workloads: dict[str, Workload]  # by the heading of the column
    unit: str = ', us'

    def __call__(self, rounds: int) -> str:
        results = {
            title: measure(workload, workload.installed(), rounds)
            for title, workload in self.workloads.items()
        }
        return make_table(results, self.unit)


Measured = dict[str, Any]  # numbers of each seed, by package


def measure_tasks(names: Iterable[str]) -> dict[str, Measured]:
    "Measure the tasks whose data can be made here, each with the packages that are installed."
    packages = [
        name for name, (_, library) in tasks.PACKAGES.items() if tasks.is_installed(library)
    ]
    results = {}
    for task in names:
        if not tasks.is_installed(tasks.TASKS[task].library):
            continue
        tasks.TASKS[task].arrays()  # made before the processes read them
        measured = tasks.measure_task(task, packages)
        results[task] = {name: m for name, m in measured.items() if isinstance(m, list)}
    return results


def make_task_tables(rounds: int) -> str:
    "Return the tables of time to accuracy: seconds over the loop written for speed, and scores."
    results = measure_tasks(tasks.TASKS)
    names = list(results)
    seconds = [
        make_row(['seconds', *names]),
        make_row(['---', *['--:'] * len(names)]).replace(' ', ''),
    ]
    scores = [
        make_row(['score of the test part', *names, 'first epoch of digits, s', 'lines']),
        make_row(['---', *['--:'] * (len(names) + 2)]).replace(' ', ''),
    ]
    for package, (title, _) in tasks.PACKAGES.items():
        seconds.append(make_row([title, *(format_seconds(results[t], package) for t in names)]))
        source = tasks.program_of('digits', package).read_text('utf-8')
        others = [format_first_epoch(results['digits'], package), tasks.count_lines(source)]
        scores.append(
            make_row([title, *(format_score(results[t], package) for t in names), *others])
        )
    return '\n'.join([*seconds, '', *scores])


def format_seconds(measured: Measured, package: str) -> str:
    "Return the seconds of a package, and the median over seeds of its ratio to the reference."
    if package not in measured:
        return '-'
    seconds = [m['seconds'] for m in measured[package]]
    reference = [m['seconds'] for m in measured[tasks.REFERENCE]]
    ratio = median(a / b for a, b in zip(seconds, reference, strict=True))
    return f'{median(seconds):.2f} ({ratio:.2f})'


def format_first_epoch(measured: Measured, package: str) -> str:
    "Return the seconds from the start of a process to the end of its first epoch."
    if package not in measured:
        return '-'
    return f'{median(m["first_epoch"] for m in measured[package]):.1f}'


def format_score(measured: Measured, package: str) -> str:
    "Return the median score of a package over the seeds."
    if package not in measured:
        return '-'
    return f'{median(m["score"] for m in measured[package]):.3f}'


TABLES: dict[str, Callable[[int], str]] = {
    'step': Comparison(
        {
            'perceptron': step.WORKLOADS['a'],
            'with evaluation': step.WORKLOADS['b'],
            'convolutions': step.WORKLOADS['cnn'],
        }
    ),
    'real': Comparison({'perceptron': step.WORKLOADS['real'], 'GPT': step.WORKLOADS['real-gpt']}),
    'compiling': compiling.make_table,
    'callbacks': Comparison({'perceptron': step.WORKLOADS['callbacks']}),
    'tasks': make_task_tables,
    'fit': Comparison({'a fit': fit.WORKLOADS['fit']}),
    'memory': Comparison({'alive': memory.WORKLOADS['memory']}, ', MiB'),
    'imports': Comparison({'import': imports.WORKLOADS['imports']}, ', CPU ms'),
    'loaders': Comparison(
        {
            '16 floats, 64 a batch': loader.WORKLOADS['rows'],
            '784 floats, 64 a batch': loader.WORKLOADS['images'],
            '784 floats, 1,024 a batch': loader.WORKLOADS['images-1024'],
        },
        ', batches/s',
    ),
    'saves': Comparison(
        {
            'training stops': checkpoint.WORKLOADS['save-stall'],
            'lost in all': checkpoint.WORKLOADS['save-lost'],
        },
        ', ms',
    ),
}

# -- the page --------------------------------------------------------------------------------------


def begin_of(name: str) -> str:
    "Return the mark before a table."
    return f'<!-- {name}: written by python -m benchmarks --write -->'


def read_block(text: str, name: str) -> str:
    "Return what stands between the marks of a table."
    return text.partition(begin_of(name))[2].partition(END)[0].strip()


def replace_block(text: str, name: str, block: str) -> str:
    """Return the page with another block between the marks of a table.

    Raises `ValueError` for a page without these marks."""
    before, begin, rest = text.partition(begin_of(name))
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f'The page has no block {name!r}: add {begin_of(name)} and {END}.')
    return f'{before}{begin}\n{block}\n{end}{after}'


def describe_machine() -> str:
    "Return where and when the tables are measured, as a line of the page."
    found = machine()
    date = f'{time.localtime().tm_mday} {time.strftime("%B %Y")}'
    return (
        f'{date}: {found["processor"].strip()}, {found["cores"]} cores, {found["system"]}, '
        f'Python {found["python"]}, torch {found["torch"]}, {found["threads"]} thread.'
    )


def write_tables(
    names: Iterable[str],
    rounds: int = ROUNDS,  # of each comparison; tasks are measured with a fixed number of seeds
    page: Path = PAGE,
) -> None:
    "Measure tables, and write each into the page when it is complete."
    names = list(names)
    here = describe_machine()
    if set(names) == set(TABLES):
        text = replace_block(page.read_text('utf-8'), 'machine', here)
        page.write_text(text, 'utf-8')
    for name in names:
        block = TABLES[name](rounds)
        text = page.read_text('utf-8')
        if read_block(text, 'machine') != here:
            block = f'{block}\n\nMeasured on {here}'
        page.write_text(replace_block(text, name, block), 'utf-8')
        print(f'\n{name}\n{block}', flush=True)
