"""Measure subjects in interleaved rounds, each in a separate process, as ratios to the reference.

The speed of a shared machine changes from second to second. Every round therefore measures each subject once, in direct
succession, and the tables report medians over rounds of the ratios and differences *within* a round. Times are CPU
times of the process, which exclude other processes."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import platform
import re
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ['Comparison', 'Result', 'Workload', 'machine', 'measure', 'report', 'write_json']

TIMEOUT_S = 120  # a child may take as long to import, build and warm up, or to measure once


@dataclass(frozen=True)
class Comparison:
    "Difference of two subjects, reported separately."

    label: str  # description of the difference
    subject: str
    base: str  # subject to compare with
    unit: str  # unit of the reported number
    scale: float = 1  # factor from the workload's unit to this unit


@dataclass(frozen=True)
class Workload:
    "Task of several subjects: `measure` runs them, `report` prints the table."

    name: str
    title: str
    module: str  # its `build(workload, subject)` returns a function that measures once
    subjects: dict[str, str]  # name: the library it needs
    unit: str = 'us a step'  # of what is measured
    reference: str = 'raw'
    comparisons: tuple[Comparison, ...] = ()
    # subjects that were written without the library at hand
    never_run: frozenset[str] = frozenset()

    def installed(self) -> list[str]:
        "Return the subjects whose library can be imported."
        return [
            name for name, library in self.subjects.items() if importlib.util.find_spec(library)
        ]


@dataclass
class Result:
    "What was measured, one value a round for each subject; and what went wrong with those that have none."

    workload: Workload
    values: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def over(self, name: str, base: str) -> list[float]:
        "By how much `name` needs more than `base`, round by round."
        return [a - b for a, b in zip(self.values[name], self.values[base], strict=True)]

    def ratios(self, name: str, base: str) -> list[float]:
        "How many times as much as `base` `name` needs, round by round."
        return [a / b for a, b in zip(self.values[name], self.values[base], strict=True)]

    def row(self, name: str) -> dict[str, Any]:
        "The medians of one subject, and its ratios' range."
        over, ratios = (of(name, self.workload.reference) for of in (self.over, self.ratios))
        return {
            'subject': name,
            'median': median(self.values[name]),
            'over': median(over),
            'ratio': median(ratios),
            'ratio_min': min(ratios),
            'ratio_max': max(ratios),
        }

    def rows(self) -> list[dict[str, Any]]:
        "A row for each subject that was measured; none without the reference."
        return (
            [self.row(name) for name in self.values]
            if self.workload.reference in self.values
            else []
        )

    def differences(self) -> list[dict[str, Any]]:
        "The workload's comparisons, as far as both their subjects were measured."
        measured = [c for c in self.workload.comparisons if {c.subject, c.base} <= set(self.values)]
        over = [[value * c.scale for value in self.over(c.subject, c.base)] for c in measured]
        return [
            {
                'label': c.label,
                'unit': c.unit,
                'median': median(values),
                'min': min(values),
                'max': max(values),
            }
            for c, values in zip(measured, over, strict=True)
        ]


# --------------------------------------------------------------------------------- one process each


class Child:
    "A process that measures one subject whenever it is asked."

    def __init__(self, workload: Workload, name: str) -> None:
        context = multiprocessing.get_context('spawn')
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, workload.module, workload.name, name), daemon=True
        )
        self.process.start()
        theirs.close()

    def answer(self) -> tuple[str, Any]:
        "What the child says next: ('ok', value) or ('error', text)."
        try:
            if self.pipe.poll(TIMEOUT_S):
                return self.pipe.recv()
        except (EOFError, OSError):
            return 'error', 'the process ended'
        return 'error', f'no answer within {TIMEOUT_S} s'

    def measure(self) -> tuple[str, Any]:
        try:
            self.pipe.send('measure')
        except OSError:
            return 'error', 'the process ended'
        return self.answer()

    def close(self) -> None:
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()


def _serve(pipe: Connection, module: str, workload: str, name: str) -> None:
    "Build the subject, warm it up, then measure it at every request until the pipe closes."
    # no subject prints between the tables, and none has a terminal
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    try:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        once: Callable[[], float] = importlib.import_module(module).build(workload, name)
        once()
        pipe.send(('ok', None))
        while pipe.recv():
            pipe.send(('ok', once()))
    except EOFError:
        pass
    except Exception:
        pipe.send(('error', traceback.format_exc()))


def measure(
    workload: Workload,
    names: Iterable[str],  # subjects; the reference is always measured
    rounds: int,
) -> Result:
    "Measure the subjects in `rounds` interleaved rounds; a subject that fails is left out and its error kept."
    result = Result(workload)
    children: dict[str, Child] = {}
    try:
        for name in dict.fromkeys([workload.reference, *names]):
            children[name] = Child(workload, name)
            # one after the other: two cores, much to import
            _keep(result, children, name, children[name].answer())
        for i in range(rounds):
            order = list(children)
            first = i % max(len(order), 1)
            for name in order[first:] + order[:first]:
                _keep(result, children, name, children[name].measure())
    finally:
        for child in children.values():
            child.close()
    return result


def _keep(result: Result, children: dict[str, Child], name: str, answer: tuple[str, Any]) -> None:
    "Put a child's answer into the result, and give up on a child that failed."
    said, what = answer
    if said == 'error':
        result.errors[name] = what
        result.values.pop(name, None)
        children.pop(name).close()
    elif what is not None:
        result.values.setdefault(name, []).append(what)


# ---------------------------------------------------------------------------------------- reporting


def machine() -> dict[str, Any]:
    "Describe where and with what the numbers were measured."
    import torch

    return {
        'date': time.strftime('%Y-%m-%d'),
        'processor': _processor(),
        'cores': os.cpu_count(),
        'system': platform.system(),
        'python': platform.python_version(),
        'torch': torch.__version__,
        'threads': 1,
    }


def _processor() -> str:
    "The processor's model, where the system tells."
    cpuinfo = Path('/proc/cpuinfo')
    said = (
        re.search(r'^model name\s*: (.*)$', cpuinfo.read_text(), re.M) if cpuinfo.exists() else None
    )
    return said[1] if said else platform.processor() or platform.machine()


def report(result: Result) -> str:
    """Return the result as a table: what each needs, how much more than the reference, and their ratio, each the median
    of the rounds; behind the ratio its range over the rounds."""
    workload = result.workload
    over = 'over ' + workload.reference
    width = max(16, len(over) + 2)
    lines = [
        f'{workload.name}: {workload.title}',
        f'{"":24}{workload.unit:>12}{over:>{width}}{"ratio":>9}   (range)',
    ]
    for row in result.rows():
        name = row['subject'] + ' *' * (row['subject'] in workload.never_run)
        lines.append(
            f'{name:24}{row["median"]:12.1f}{row["over"]:{width}.1f}{row["ratio"]:9.2f}   '
            f'({row["ratio_min"]:.2f} to {row["ratio_max"]:.2f})'
        )
    for d in result.differences():
        lines.append(
            f'  {d["label"]}: {d["median"]:.1f} {d["unit"]} ({d["min"]:.1f} to {d["max"]:.1f})'
        )
    if workload.never_run & set(result.values):
        lines.append('  * written from its documentation alone: check it')
    lines += [f'{name}: failed\n{text}' for name, text in result.errors.items()]
    return '\n'.join(lines)


def write_json(path: Path, results: list[Result]) -> None:
    "Write the machine, the medians and every single value to `path`."
    tables = [
        {
            'workload': r.workload.name,
            'title': r.workload.title,
            'unit': r.workload.unit,
            'rows': r.rows(),
            'differences': r.differences(),
            'values': r.values,
            'errors': r.errors,
        }
        for r in results
    ]
    path.write_text(json.dumps({'machine': machine(), 'tables': tables}, indent=1) + '\n', 'utf-8')
