"""Output and files of a run without times, to compare two runs."""

import json
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learnkit import Learner
from learnkit.core.time import Time, Timestamp
from learnkit.loggers import read_log

# columns begin so
CLOCKS = ('time', 'throughput/', 'memory/', 'cpu_', 'disk_', 'network_', 'epoch/time')


def to_comparable(value: Any, path: Path) -> Any:
    "Return a value in comparable form: paths relative to the run's folder, objects as their class name."
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Path):
        return f'path {value.relative_to(path) if value.is_relative_to(path) else value}'
    if isinstance(value, Timestamp):
        return str(value.replace(sec=0.0))
    if isinstance(value, Time):
        return str(value)
    if isinstance(value, dict):
        return {str(k): to_comparable(v, path) for k, v in value.items()}
    if isinstance(value, (list, tuple, deque)) or type(value).__name__ == 'L':
        return [to_comparable(v, path) for v in value]
    return type(value).__name__


class _Lines(StringIO):
    "A stream that collects printed lines without times."

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def write(self, text: str) -> int:
        self.lines += re.sub(r'(throughput/\S+|time/\w+|epoch/time)=\S+', '', text).splitlines()
        return len(text)


@contextmanager
def capture_printed(learn: Learner, lines: list[str]) -> Iterator[None]:
    "Collect what a fit prints: rows without their time, and messages."
    before, learn.logger = learn.logger, lambda row: lines.append(str(list(row)[:-1]))
    try:
        with redirect_stdout(_Lines(lines)):
            yield
    finally:
        learn.logger = before


def read_files(learn: Learner) -> dict[str, Any]:
    "Return the contents of the files below the Learner's path; logs without time columns."
    found: dict[str, Any] = {}
    events = {p.parent for p in learn.path.rglob('events.out.*')}
    found |= {f'events {i}': read_scalars(folder) for i, folder in enumerate(sorted(events))}
    for path in sorted(p for p in learn.path.rglob('*') if p.is_file() and p.parent not in events):
        name = str(path.relative_to(learn.path))
        if path.suffix in ('.csv', '.jsonl'):
            found[name] = [
                {k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in read_log(path)
            ]
            found[f'{name}, lines'] = len(path.read_text().splitlines())
            if path.suffix == '.csv':
                found[f'{name}, columns'] = path.read_text().split('\n')[0]
        elif (
            path.parent.name == 'metrics'
            and 'mlruns' in path.parts
            and not path.name.replace('.', '/').startswith(CLOCKS)
        ):
            found[name] = [line.split()[1:] for line in path.read_text().splitlines()]
        elif 'wandb' in path.parts:
            continue  # a binary format of wandb
        elif path.suffix == '.json':
            found[name] = json.loads(path.read_text())
        elif path.suffix == '.pth':
            found[name] = torch.load(path, weights_only=True)
        elif path.suffix in ('.png', '.txt'):
            found[name] = path.read_bytes()
        elif path.suffix == '.pt2':
            found[name] = 'a program'
    return found


def read_scalars(folder: Path) -> dict[str, Any]:
    "Return TensorBoard's view of a folder: scalars, and the number of text entries."
    reader: Any = import_module('tensorboard.backend.event_processing.event_accumulator')
    events = reader.EventAccumulator(str(folder), size_guidance={'scalars': 0}).Reload()
    numbers = {
        tag: [(e.step, e.value) for e in events.Scalars(tag)]
        for tag in events.Tags()['scalars']
        if not tag.startswith(CLOCKS)
    }
    return {**numbers, **{tag: len(events.Tensors(tag)) for tag in events.Tags()['tensors']}}
