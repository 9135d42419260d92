"""Run Lightning programs of public repositories as their authors wrote them, in `L.Trainer` and in learnkit's Trainer.

    python -m tests.peers.scripts_bench [PROGRAM ...]   # in the environment of Lightning; PROGRAM: part of a line

The name `Trainer` of Lightning is the only thing that is replaced. `scripts.txt` is the table of the programs; a copy
of each repository lies in `FOLDER/<owner>+<name>`, and `python -m tests.peers scripts --sources FOLDER` reads it.
What the machine cannot give is equal in both runs: data sets, and files that only the author has, are random images and
labels, fits have `EPOCHS` epochs, devices are the CPU, drawings are not made. Each program runs in a process and a
folder of its own, and its weights, metrics and results are compared."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch
from urllib.error import HTTPError

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.peers.rows import (
    TOO_FAR,
    Row,
    compare_numbers,
    import_torchvision,
    quiet_folder,
)
from tests.peers.wild_bench import SOURCES

TABLE = Path(__file__).with_name('scripts.txt')
PART = 'Programs of Lightning users'
EPOCHS = 2
N_SAMPLES = {True: 300, False: 100}  # of a data set for training, and of one for tests
# packages of drawings and notebooks, which are not installed
DRAWING = 'IPython matplotlib_inline seaborn tabulate watermark'.split()
SHAPES = {  # channels, height and width of images, and number of classes
    'MNIST': (1, 28, 10),
    'FashionMNIST': (1, 28, 10),
    'CIFAR10': (3, 32, 10),
    'CIFAR100': (3, 32, 100),
    'SVHN': (3, 32, 10),
    'STL10': (3, 96, 10),
}


@dataclass
class Program:
    "A script of a repository."

    repository: str
    commit: str
    file: str
    shows: str  # what it shows, such as 'VAE'
    why: str = ''  # what differs, and why

    @property
    def name(self) -> str:
        return f'{self.repository}: {self.file}'


@dataclass
class Outcome:
    "What a program trained, measured and returned."

    tensors: dict[str, Tensor] = field(default_factory=dict)
    n_fits: int = 0
    error: str = ''


def read_table() -> list[Program]:
    "Return the programs of the table: a line for a repository, indented lines for its files."
    found, repository, commit = [], '', ''
    for line in TABLE.read_text('utf-8').splitlines():
        if line.startswith('  '):
            file, shows, why = [*map(str.strip, line.split('|')), '', ''][:3]
            found.append(Program(repository, commit, file, shows, why))
        elif line and not line.startswith('#'):
            repository, commit = line.split()
    return found


class RandomImages(Dataset[Any]):
    "Random images with labels in place of a data set that would be downloaded."

    def __init__(self, name: str, *args: Any, train: Any = True, **options: Any) -> None:
        channels, size, self.n_classes = SHAPES[name]
        is_train = options.get('split', 'train' if train else 'test') != 'test'
        n = N_SAMPLES[is_train]
        g = torch.Generator().manual_seed(n)
        shape = (n, size, size) if channels == 1 else (n, size, size, channels)
        self.data: Any = torch.randint(256, shape, generator=g, dtype=torch.uint8)
        self.targets: Any = torch.randint(self.n_classes, (n,), generator=g).tolist()
        self.labels = self.targets
        self.transform = options.get('transform')
        self.classes = [str(i) for i in range(self.n_classes)]
        if channels == 3:
            self.data = self.data.numpy()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> Any:
        from PIL import Image

        image = Image.fromarray(as_array(self.data[i]))
        return (self.transform(image) if self.transform else image), self.targets[i]


def as_array(image: Any) -> Any:
    return image.numpy() if isinstance(image, Tensor) else image


def split_randomly(dataset: Any, lengths: Sequence[float], generator: Any = None) -> Any:
    "Split a data set in the shares of the lengths, which are those of the real one."
    shares = [int(len(dataset) * n / sum(lengths)) for n in lengths]
    shares[0] += len(dataset) - sum(shares)
    options = {} if generator is None else {'generator': generator}
    return _split(dataset, shares, **options)


_split = torch.utils.data.random_split


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    "Import objects without effect in place of packages of drawings."

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_absent = name.partition('.')[0] in DRAWING
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> Any:
        module: Any = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        module.version_info = (9, 0)  # matplotlib reads that of IPython
        module.get_ipython.return_value = None
        return module

    def exec_module(self, module: ModuleType) -> None:
        "Do nothing."


def provide_torchvision() -> None:
    "Put random data in the place of torchvision's data sets."
    torchvision = import_module('torchvision')
    for name in SHAPES:
        made = type(name, (RandomImages,), {'__init__': make_init(name), '__module__': __name__})
        globals()[name] = made
        setattr(torchvision.datasets, name, made)


def make_init(name: str) -> Callable[..., None]:
    def init(self: Any, *args: Any, **options: Any) -> None:
        if len(args) > 1:
            options['train'] = args[1]
        RandomImages.__init__(self, name, **options)

    return init


def make_recorder(base: type, trainers: list[Any], outcome: Outcome) -> type:
    "Return a class of Trainer that keeps its instances and results, and has short fits on the CPU."

    class Recorder(base):  # type: ignore[misc, valid-type]
        def __init__(self, **options: Any) -> None:
            n = options.get('max_epochs')
            options['max_epochs'] = EPOCHS if n is None else min(n, EPOCHS)
            steps = options.get('max_steps', -1)
            options['max_steps'] = min(steps, 30) if steps > 0 else -1
            options.pop('gpus', None)  # of earlier versions
            options |= {'accelerator': 'cpu', 'devices': 1, 'enable_progress_bar': False}
            super().__init__(**options)
            trainers.append(self)

        def fit(self, *args: Any, **options: Any) -> Any:
            outcome.n_fits += 1
            result = super().fit(*args, **options)
            note(self, f'fit {outcome.n_fits}')
            return result

        def test(self, *args: Any, **options: Any) -> Any:
            return self.keep('test', super().test(*args, **options))

        def validate(self, *args: Any, **options: Any) -> Any:
            return self.keep('validate', super().validate(*args, **options))

        def predict(self, *args: Any, **options: Any) -> Any:
            return self.keep('predict', super().predict(*args, **options))

        def keep(self, name: str, result: Any) -> Any:
            values = torch.utils._pytree.tree_leaves(result)
            for i, value in enumerate(v for v in values if isinstance(v, (float, int, Tensor))):
                outcome.tensors[f'{name} {len(outcome.tensors)} {i}'] = torch.as_tensor(value)
            return result

    def note(trainer: Any, what: str) -> None:
        weights = trainer.lightning_module.state_dict()
        outcome.tensors |= {f'{what} {k}': v.detach().clone() for k, v in weights.items()}
        metrics = trainer.callback_metrics
        # times of a machine are logged, too
        outcome.tensors |= {
            f'{what} metric {k}': torch.as_tensor(v).double()
            for k, v in metrics.items()
            if 'time' not in k
        }
        counts = (trainer.current_epoch, trainer.global_step)
        outcome.tensors[f'{what} counts'] = torch.tensor(counts)

    Recorder.__name__ = 'Trainer'
    return Recorder


@contextmanager
def replaced_trainer(kind: type) -> Iterator[None]:
    "Let all names of Lightning's Trainer mean another class within a context."
    modules = ('lightning', 'lightning.pytorch', 'lightning.pytorch.trainer')
    sys.modules.setdefault('pytorch_lightning', sys.modules['lightning.pytorch'])
    for name, module in [*sys.modules.items()]:
        if name.startswith('lightning.pytorch.'):
            sys.modules.setdefault(
                name.replace('lightning.pytorch', 'pytorch_lightning', 1), module
            )
    patches = [patch.object(sys.modules[name], 'Trainer', kind) for name in modules]
    for p in patches:
        p.start()
    try:
        yield
    finally:
        for p in patches:
            p.stop()


def load_or_draw(file: Any, *args: Any, **options: Any) -> Any:
    "Load a file, or return random images and labels in place of one that only the author has."
    is_absent = isinstance(file, str) and file.endswith('.pt') and not Path(file).exists()
    if not is_absent:
        return _load(file, *args, **options)
    images = RandomImages('MNIST', train='train' in Path(file).name)
    return images.data, torch.tensor(images.targets)


_load = torch.load


def refuse(url: str, *args: Any, **options: Any) -> Any:
    "Raise the error of a server that does not have a file."
    raise HTTPError(str(url), 404, 'not downloaded', None, None)  # type: ignore[arg-type]


def run_script(file: Path, base: type) -> Outcome:
    "Run a script in the current folder, as `python FILE` would."
    trainers: list[Any] = []
    outcome = Outcome()
    torch.manual_seed(0)
    sys.argv, sys.path[:0] = [file.name], [str(file.parent)]
    sys.meta_path.insert(0, Absent())
    provide_torchvision()
    plt = import_module('matplotlib.pyplot')
    with (
        replaced_trainer(make_recorder(base, trainers, outcome)),
        patch('torch.utils.data.random_split', split_randomly),
        patch('torch.utils.data.dataset.random_split', split_randomly),
        patch('torch.load', load_or_draw),
        patch('urllib.request.urlretrieve', refuse),
        patch.object(plt, 'show'),
        patch.object(plt, 'savefig'),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter('ignore')
        try:
            runpy.run_path(str(file), run_name='__main__')
        except (Exception, SystemExit) as error:  # after a fit, for example in a drawing
            outcome.error = f'{type(error).__name__}: {error}'
    return outcome


def run_apart(file: Path, base: type, result: Path) -> Outcome:
    "Run a script in a process of its own."
    child = os.fork()
    if not child:
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            if not os.environ.get('LEARNKIT_PEERS_VERBOSE'):
                os.dup2(silent, 1)
                os.dup2(silent, 2)
            with quiet_folder():
                torch.save(vars(run_script(file, base)), result)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    if not result.exists():
        return Outcome(error='the process ended')
    return Outcome(**torch.load(result, weights_only=False))


def compare(program: Program, folder: Path) -> Row:
    "Compare a program in both trainers."
    file = Path(os.environ[SOURCES]) / program.repository.replace('/', '+') / program.file
    lightning, own = import_module('lightning'), import_module('learnkit.interop.lightning')
    theirs = run_apart(file, lightning.Trainer, folder / 'theirs.pt')
    ours = run_apart(file, own.Trainer, folder / 'ours.pt')
    (folder / 'theirs.pt').unlink(missing_ok=True)
    (folder / 'ours.pt').unlink(missing_ok=True)
    why = program.why
    if ours.error != theirs.error:
        why = ours.error or f'{why} (in Lightning: {theirs.error})'
    elif theirs.error:
        why = f'in both, then: {theirs.error[:100]}'
    same = ours.n_fits == theirs.n_fits and sorted(ours.tensors) == sorted(theirs.tensors)
    is_measured = same and bool(theirs.tensors)
    numbers = compare_numbers(ours.tensors, theirs.tensors) if is_measured else TOO_FAR
    return Row(program.name, not ours.error or ours.error == theirs.error, same, numbers, why, PART)


def run_programs(names: Sequence[str]) -> Iterator[Row]:
    "Yield the rows of all programs, or of those with one of the names."
    import_torchvision()  # torchmetrics imports torchvision
    for name in ('lightning.pytorch', 'lightning.fabric'):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ['MPLBACKEND'] = 'Agg'
    chosen = [p for p in read_table() if not names or any(name in p.name for name in names)]
    with TemporaryDirectory() as folder:
        for program in chosen:
            yield compare(program, Path(folder))


def rows() -> list[Row]:
    "Return the rows of all programs."
    return list(run_programs(()))


if __name__ == '__main__':
    for row in run_programs(sys.argv[1:]):
        print(row, flush=True)
