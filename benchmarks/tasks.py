"""Seconds and lines of user code to the same score: learnkit, other packages, and loops written by hand.

digits        scikit-learn's handwritten digits, a perceptron; accuracy
mnist1d-mlp   MNIST-1D (Greydanus, 2020), a perceptron; accuracy
mnist1d-cnn   the same, three convolutions
mnist1d-gru   the same, a bidirectional recurrent network
gpt           a character model of the documentation that Python ships (`pydoc_data.topics`); nats a character

Every package trains the same model on the same batch size with AdamW and one cycle of the learning rate, for as many
epochs and to the same rate. Both were chosen on the validation part (`--tune`): the fewest epochs of the task's grid
whose median score of three seeds reaches the target, with the loop written for speed and with learnkit. What is
measured trains with three other seeds, and is scored on the test part. `benchmarks/programs` has a file for each
package, as its users write it; its lines are counted without blank lines, comments and docstrings.

    python -m benchmarks.tasks --install       # the other packages, into .peers/tasks
    python -m benchmarks.tasks
    python -m benchmarks.tasks --workloads digits,gpt --frameworks learnkit,fastai
    python -m benchmarks.tasks --frameworks loop,tuned,learnkit --seeds 30      # mean scores
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import io
import itertools
import json
import math
import os
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import environments
from benchmarks.cli import names_of
from benchmarks.harness import Child, Workload, machine
from benchmarks.models import GPT, Recurrent, make_cnn, make_perceptron

__all__ = ['PACKAGES', 'TASKS', 'build', 'count_lines', 'main']

PROGRAMS = Path(__file__).parent / 'programs'
SETTINGS = PROGRAMS / 'settings.json'  # epochs and rate of each task, written by `--tune`
TUNED_WITH = ('tuned', 'learnkit')
SEEDS = [0, 1, 2]  # of what is measured
LEAST_S = 1.0  # a shorter training is repeated for as long, and its seconds are the median
REFERENCE = 'tuned_groups'  # program that the page compares with
TUNING_SEEDS = [10, 11, 12]
PARTS = ['x', 'y', 'x_valid', 'y_valid', 'x_test', 'y_test']

# what the names of the programs end in: name in the table, library
PACKAGES = {
    'learnkit': ('learnkit', 'learnkit'),
    'one_group': ('learnkit, one group', 'learnkit'),
    'tuned_groups': ('by hand, for speed, two groups', 'torch'),
    'tuned': ('by hand, for speed', 'torch'),
    'loop': ('by hand', 'torch'),
    'skorch': ('skorch', 'skorch'),
    'fastai': ('fastai', 'fastai'),
    'keras': ('Keras 3', 'keras'),
    'lightning': ('Lightning', 'lightning'),
}
REQUIREMENTS = (
    'beartype==0.23.*',
    'fastai==2.8.12',
    'fastdownload==0.0.8',
    'fastprogress==1.0.*',
    'fasttransform==0.0.5',
    'h5py==3.16.*',
    'keras==3.15.*',
    'lightning==2.6.*',
    'mnist1d==0.0.2.post1',
    'namex==0.1.*',
    'optree==0.20.*',
    'plum-dispatch==2.9.*',
    'pytorch-ignite==0.5.*',
    'skorch==1.4.*',
)

# -- data, in arrays, and models -------------------------------------------------------------------


def split_rows(x: np.ndarray, y: np.ndarray, n_valid: int, n_test: int) -> dict[str, np.ndarray]:
    "Split rows into a training part, a validation part, and a test part at the end."
    ends = [len(x) - n_valid - n_test, len(x) - n_test]
    x_parts = np.split(x.astype('float32' if x.dtype.kind == 'f' else 'int64'), ends)
    y_parts = np.split(y.astype('int64'), ends)
    pairs = zip(x_parts, y_parts, strict=True)
    return dict(zip(PARTS, [part for pair in pairs for part in pair], strict=True))


def load_digits() -> dict[str, np.ndarray]:
    "Return 1,797 handwritten digits of 64 values in [0, 1]: 1,137 to train, 300 to validate, 360 to test."
    from sklearn.datasets import load_digits as load

    images = load()
    order = np.random.default_rng(0).permutation(len(images.target))
    return split_rows(images.data[order] / 16, images.target[order], 300, 360)


def load_mnist1d() -> dict[str, np.ndarray]:
    "Return MNIST-1D: 5,000 signals of 40 values, of which 1,000 are its test part; 800 validate."
    from mnist1d.data import get_dataset_args, make_dataset

    with redirect_stdout(io.StringIO()):
        data = make_dataset(get_dataset_args())
    x, y = (np.concatenate([data[name], data[f'{name}_test']]) for name in 'xy')
    return split_rows(x, y, 800, 1000)


def load_text(length: int = 64) -> dict[str, np.ndarray]:
    "Return the text of `pydoc_data.topics` in windows of `length` characters; a tenth validates, a tenth tests."
    from pydoc_data.topics import topics

    text = ''.join(text for _, text in sorted(topics.items()))
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    codes = np.array([alphabet[c] for c in text])
    n = (len(codes) - 1) // length
    x = codes[: n * length].reshape(n, length)
    y = codes[1 : n * length + 1].reshape(n, length)
    return split_rows(x, y, n // 10, n // 10)


def measure_accuracy(pred: Tensor, target: Tensor) -> float:
    "Return the share of right classes."
    return (pred.argmax(1) == target).double().mean().item()


def measure_nats(pred: Tensor, target: Tensor) -> float:
    "Return the mean cross-entropy of a character."
    return F.cross_entropy(pred.flatten(0, 1), target.flatten()).item()


@dataclass(frozen=True)
class Task:
    "Data, a model, and the score that is to be reached."

    title: str
    family: str  # what the programs' names begin with
    data: str  # name of the arrays' file
    load: Callable[[], dict[str, np.ndarray]]
    make_model: Callable[[], nn.Module]
    score: Callable[[Tensor, Tensor], float]
    target: float  # on the validation part
    epochs: tuple[int, ...]  # to choose from, like the rates
    rates: tuple[float, ...]
    higher: bool = True  # whether a higher score is better
    library: str = 'torch'  # where the data comes from

    def arrays(self) -> dict[str, np.ndarray]:
        "Return the data, which is made once and kept in a file."
        path = environments.FOLDER / 'data' / f'{self.data}.npz'
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **self.load())  # type: ignore[arg-type]  # its stub has a keyword of type bool
        with np.load(path) as file:
            return dict(file)

    def reaches(self, score: float) -> bool:
        return score >= self.target if self.higher else score <= self.target


TASKS = {
    'digits': Task(
        'scikit-learn digits, perceptron',
        'classify',
        'digits',
        load_digits,
        lambda: make_perceptron(64),
        measure_accuracy,
        0.97,
        (4, 6, 8, 12, 16),
        (1e-2, 3e-2),
        library='sklearn',
    ),
    'mnist1d-mlp': Task(
        'MNIST-1D, perceptron',
        'classify',
        'mnist1d',
        load_mnist1d,
        lambda: make_perceptron(40),
        measure_accuracy,
        0.64,
        (8, 16, 32),
        (1e-2, 3e-2),
        library='mnist1d',
    ),
    'mnist1d-cnn': Task(
        'MNIST-1D, three convolutions',
        'classify',
        'mnist1d',
        load_mnist1d,
        make_cnn,
        measure_accuracy,
        0.92,
        (16, 24, 32, 48),
        (3e-2,),
        library='mnist1d',
    ),
    'mnist1d-gru': Task(
        'MNIST-1D, recurrent network',
        'classify',
        'mnist1d',
        load_mnist1d,
        Recurrent,
        measure_accuracy,
        0.85,
        (16, 24, 32),
        (3e-2,),
        library='mnist1d',
    ),
    'gpt': Task(
        'character GPT on the text of `pydoc_data.topics`',
        'language',
        'text',
        load_text,
        lambda: GPT(vocabulary=103, length=64),
        measure_nats,
        2.3,
        (1, 2, 3, 4),
        (1e-2,),
        higher=False,
    ),
}

# -- training --------------------------------------------------------------------------------------


def program_of(task: str, package: str) -> Path:
    "Return the file of a package's program."
    return PROGRAMS / f'{TASKS[task].family}_{package}.py'


def count_lines(source: str) -> int:
    "Count the lines of code: no blank lines, comments and docstrings."
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    skipped = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in skipped
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


def train_once(
    task: Task,
    program: Any,  # module with `train`
    data: SimpleNamespace,
    seed: int,
    epochs: int,
    rate: float,
) -> tuple[float, nn.Module]:
    "Train a new model; return the CPU seconds that it took, and the model."
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = task.make_model()
    began = time.process_time()
    program.train(data, model, epochs, rate)
    return time.process_time() - began, model


def score_model(task: Task, model: nn.Module, data: SimpleNamespace, part: str) -> float:
    "Return the score of a model on the part 'valid' or 'test'."
    x, y = (torch.from_numpy(getattr(data, f'{name}_{part}')) for name in 'xy')
    model.eval()
    with torch.no_grad():
        return task.score(torch.cat([model(rows) for rows in x.split(500)]), y)


def prepare_process(task: str, package: str) -> tuple[Any, SimpleNamespace]:
    "Return a package's program and a task's data; what the package writes lands in a temporary folder."
    os.environ['KERAS_BACKEND'] = 'torch'
    data = SimpleNamespace(**TASKS[task].arrays())
    name = program_of(task, package).stem
    folder = tempfile.TemporaryDirectory()
    os.chdir(folder.name)
    return SimpleNamespace(
        train=importlib.import_module(f'benchmarks.programs.{name}').train, folder=folder
    ), data


def build(task: str, package: str) -> Callable[[], Any]:
    "Return a function that trains one epoch at its first call, and then with a seed of `SEEDS` at each."
    program, data = prepare_process(task, package)
    settings = json.loads(SETTINGS.read_text('utf-8'))[task]
    seeds = iter([None, *SEEDS])
    first_epoch = 0.0

    def once() -> Any:
        nonlocal first_epoch
        seed = next(seeds)
        if seed is None:
            train_once(TASKS[task], program, data, 0, 1, settings['rate'])
            first_epoch = time.process_time()
            return None
        seconds: list[float] = []
        while sum(seconds) < LEAST_S:
            spent, model = train_once(TASKS[task], program, data, seed, **settings)
            seconds.append(spent)
        score = score_model(TASKS[task], model, data, 'test')
        return {'seconds': median(seconds), 'score': score, 'first_epoch': first_epoch}

    return once


def tune(task: str) -> dict[str, Any]:
    """Return the fewest epochs, with a rate, whose median validation scores reach the target, and these scores.

    Raises `LookupError` if nothing in the task's grid reaches it."""
    chosen = TASKS[task]
    for epochs, rate in itertools.product(chosen.epochs, chosen.rates):
        scores = {
            name: median(score_seeds(task, name, epochs, rate, TUNING_SEEDS, 'valid'))
            for name in TUNED_WITH
        }
        if all(map(chosen.reaches, scores.values())):
            return {'epochs': epochs, 'rate': rate, **scores}
    raise LookupError(f'{task}: nothing in its grid reaches {chosen.target}; at last {scores}')


def score_seeds(
    task: str,
    package: str,
    epochs: int,
    rate: float,
    seeds: Iterable[int],
    part: str,  # 'valid' or 'test'
) -> list[float]:
    "Return the score of each seed on a part of the data; the training prints nothing."
    program, data = prepare_process(task, package)
    scores = []
    for seed in seeds:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            _, model = train_once(TASKS[task], program, data, seed, epochs, rate)
        scores.append(score_model(TASKS[task], model, data, part))
    return scores


def report_scores(task: str, packages: Iterable[str], n: int) -> str:
    "Return a line for each package with the mean of its test scores over `n` seeds, and the standard error."
    settings = json.loads(SETTINGS.read_text('utf-8'))[task]
    lines = [f'{task}: mean score of {n} seeds on the test part, and its standard error']
    for package in packages:
        scores = score_seeds(task, package, **settings, seeds=range(100, 100 + n), part='test')
        error = stdev(scores) / math.sqrt(n)
        lines.append(f'{PACKAGES[package][0]:20} {mean(scores):.4f} +- {error:.4f}')
    return '\n'.join(lines)


# -- processes and tables --------------------------------------------------------------------------


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def measure_task(task: str, packages: Iterable[str]) -> dict[str, list[dict[str, float]] | str]:
    "Return what was measured with each seed, by package, or the error of a package that failed."
    workload = Workload(task, TASKS[task].title, 'benchmarks.tasks', {})
    results: dict[str, list[dict[str, float]] | str] = {}
    children: dict[str, Child] = {}
    try:
        for package in packages:
            child = Child(workload, package)
            said, error = child.answer()
            if said == 'error':
                results[package] = error
                child.close()
            else:
                children[package] = child
                results[package] = []
        for i, _ in enumerate(SEEDS):
            order = list(children)
            for package in order[i:] + order[:i]:
                said, value = children[package].measure()
                measured = results[package]
                if said == 'ok' and isinstance(measured, list):
                    measured.append(value)
                else:
                    results[package] = value
                    children.pop(package).close()
    finally:
        for child in children.values():
            child.close()
    return results


def report(task: str, results: dict[str, list[dict[str, float]] | str]) -> str:
    "Return a Markdown table, the fastest package first; then those without a number."
    chosen = TASKS[task]
    settings = json.loads(SETTINGS.read_text('utf-8'))[task]
    sign = '>=' if chosen.higher else '<='
    score = 'accuracy' if chosen.higher else 'nats'
    rows = []
    absent = []
    errors = []
    for package, (name, library) in PACKAGES.items():
        lines = count_lines(program_of(task, package).read_text('utf-8'))
        measured = results.get(package)
        if not isinstance(measured, list):
            if measured is not None:
                errors.append(f'{name}: failed\n{measured}')
                absent.append(f'| {name} | failed | | | {lines} |')
            elif not is_installed(library):
                absent.append(f'| {name} | not installed | | | {lines} |')
            continue
        first, seconds, reached = (
            median(m[key] for m in measured) for key in ('first_epoch', 'seconds', 'score')
        )
        row = f'| {name} | {seconds:.2f} | {reached:.3f} | {first:.1f} | {lines} |'
        rows.append((seconds, row))
    title = (
        f'{task}: {chosen.title}; {score} {sign} {chosen.target} on the validation part, '
        f'{settings["epochs"]} epochs to a rate of {settings["rate"]}'
    )
    head = f'| | seconds | {score} | first epoch, s | lines |\n|---|--:|--:|--:|--:|'
    return '\n'.join([title, '', head, *[row for _, row in sorted(rows)], *absent, *errors])


def main(argv: list[str] | None = None) -> int:
    "Measure what the command line asks for, print the tables, and return the exit status."
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        'python -m benchmarks.tasks',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        '--workloads',
        type=names_of(list(TASKS)),
        default=list(TASKS),
        metavar=','.join(TASKS),
    )
    parser.add_argument(
        '--frameworks',
        type=names_of(list(PACKAGES)),
        default=list(PACKAGES),
        metavar='NAME,...',
        help=f'of {", ".join(PACKAGES)}',
    )
    parser.add_argument('--install', action='store_true', help='install the other packages first')
    parser.add_argument(
        '--tune', action='store_true', help='choose epochs and rates again, and write them'
    )
    parser.add_argument(
        '--seeds',
        type=int,
        metavar='N',
        help='print the mean score of N seeds, 2 or more, in place of the seconds',
    )
    args = parser.parse_args(argv)
    if args.install:
        for line in environments.make_environment('tasks', REQUIREMENTS):
            print(f'not installed: {line}')
        argv = [arg for arg in argv if arg != '--install']
    environments.continue_in('tasks', 'benchmarks.tasks', argv)
    torch.set_num_threads(1)
    print(', '.join(f'{key} {value}' for key, value in machine().items()), flush=True)
    failed = False
    for task in args.workloads:
        if not is_installed(TASKS[task].library):
            print(f'\n{task}: {TASKS[task].library} is not installed')
            continue
        TASKS[task].arrays()
        if args.tune:
            write_setting(task)
            continue
        packages = [name for name in args.frameworks if is_installed(PACKAGES[name][1])]
        if args.seeds:
            print(f'\n{report_scores(task, packages, args.seeds)}', flush=True)
            continue
        results = measure_task(task, packages)
        print(f'\n{report(task, results)}', flush=True)
        failed |= any(isinstance(result, str) for result in results.values())
    return int(failed)


def write_setting(task: str) -> None:
    "Choose the setting of a task, and write it into `SETTINGS`."
    found = tune(task)
    print(task, found, flush=True)
    settings = json.loads(SETTINGS.read_text('utf-8')) if SETTINGS.exists() else {}
    settings[task] = {key: found[key] for key in ('epochs', 'rate')}
    SETTINGS.write_text(json.dumps(settings, indent=1) + '\n', 'utf-8')


if __name__ == '__main__':
    sys.exit(main())
