"""Table of optimizers: every class of the installed libraries, with what its constructor needs.

`build(params, lr)` makes an optimizer, for the Learner as for the loop by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from tests.sweeps.verdicts import Subject


@dataclass(frozen=True)
class Training:
    "How both loops train with an optimizer."

    model: str = 'biases'  # kind of `make_model`
    closure: bool = False  # whether a step evaluates the loss again
    second_order: bool = False  # whether the backward pass keeps its graph
    eager: bool = False  # run what the optimizer compiles by itself without the compiler
    lr: float = 0.01
    needs_group: bool = False  # whether a step communicates, also of one process


# by the lowercase name of a class, in all libraries
MODELS = {'muon': 'matrices', 'spectralsphere': 'matrices', 'sparseadam': 'sparse'}
CLOSURES = {'lbfgs', 'alig', 'bsam', 'sam', 'looksam', 'friendlysam'}
SECOND_ORDER = {'adahessian', 'sophiah'}
COMMUNICATING = {'demo', 'distributedmuon'}
COMPILED = ('kron', 'kronc', 'kronw')
BY_MODEL = ('AdaLOMO', 'AdamMini', 'LOMO')
BY_USE = ('AdaGO', 'AdaMuon', 'DistributedMuon', 'Muon', 'MuonClip', 'NorMuon')
SAMS = ('SAM', 'LookSAM', 'FriendlySAM')
WRAPPERS = ('Lookahead', 'OrthoGrad', 'TRAC', 'ScheduleFreeWrapper')
# further arguments of constructors
ARGUMENTS: dict[tuple[str, str], dict[str, Any]] = {
    ('pytorch_optimizer', 'bsam'): {'num_data': 32},
    ('pytorch_optimizer', 'ranger21'): {'num_iterations': 8},
}


def make_subject(library: str, title: str, build: Callable[..., Any]) -> Subject:
    "Return a row of the table; what it needs follows from its name."
    name = title.lower()
    training = Training(
        model=MODELS.get(name, 'biases') if library != 'timm' else 'biases',
        closure=name in CLOSURES or name.endswith('closure'),
        second_order=name in SECOND_ORDER,
        needs_group=library == 'pytorch_optimizer' and name in COMMUNICATING,
        eager=library == 'torchao' or (library == 'timm' and name in COMPILED),
    )
    if arguments := ARGUMENTS.get((library, name)):
        build = partial(build, **arguments)
    return Subject(library, title, build, training)


def load_optimizers(library: str) -> list[Subject]:
    "Return the optimizers of an installed library."
    return [make_subject(library, name, build) for name, build in LIBRARIES[library]()]


Builders = Iterator[tuple[str, Callable[..., Any]]]


def list_classes(module: str) -> Builders:
    "Yield the optimizer classes of a module."
    for name, value in sorted(vars(import_module(module)).items()):
        is_optimizer = inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
        if is_optimizer and value is not torch.optim.Optimizer and not name.startswith('_'):
            yield name, value


def list_pytorch_optimizer() -> Builders:
    "Yield the optimizers of pytorch_optimizer by class, and its wrappers around AdamW."
    library = import_module('pytorch_optimizer')
    for name in library.get_supported_optimizers():
        cls = library.load_optimizer(name)
        if cls.__name__ in BY_USE:
            yield cls.__name__, partial(build_by_use, cls)
        elif cls.__name__ in BY_MODEL:
            yield cls.__name__, partial(build_of_model, cls)
        elif not cls.__module__.startswith('torch.'):
            yield cls.__name__, cls
    for name in SAMS:
        yield name, partial(getattr(library, name), base_optimizer=torch.optim.AdamW)
    for name in WRAPPERS:
        yield name, partial(build_around_adam, getattr(library, name))


def build_by_use(cls: Any, params: Any, lr: float) -> Any:
    "Make an optimizer whose groups say which parameters are matrices."
    groups = []
    for given in as_groups(list(params)):
        for is_matrix in (True, False):
            chosen = [p for p in given['params'] if (p.ndim == 2) == is_matrix]
            groups.append({**given, 'params': chosen, 'use_muon': is_matrix})
    return cls([group for group in groups if group['params']], lr=lr)


def prepare_process(subject: Subject) -> None:
    "Run without the compiler what an optimizer compiles by itself; open a group of one process."
    if subject.options.needs_group and not torch.distributed.is_initialized():
        torch.distributed.init_process_group('gloo', 'tcp://127.0.0.1:0', rank=0, world_size=1)
    if subject.options.eager:
        torch.compiler.set_stance('force_eager')


def as_groups(params: list[Any]) -> list[dict[str, Any]]:
    "Return param groups, given as they are or as one list of parameters."
    is_grouped = bool(params) and isinstance(params[0], dict)
    return params if is_grouped else [{'params': params}]


def build_of_model(cls: Any, params: Any, lr: float, model: Any) -> Any:
    "Make an optimizer that takes the model."
    return cls(model, lr=lr)


def build_for(subject: Subject, params: Any, model: torch.nn.Module, lr: float) -> Any:
    "Make the optimizer for the loop by hand."
    parameters = getattr(subject.build, 'func', None)
    takes_model = getattr(parameters, '__name__', '') == 'build_of_model'
    options = {'model': model} if takes_model else {}
    return subject.build(params, lr=lr, **options)


def build_around_adam(cls: Any, params: Any, lr: float) -> Any:
    "Make a wrapper around AdamW."
    return cls(torch.optim.AdamW(params, lr=lr))


def list_timm() -> Builders:
    "Yield timm's optimizers by the names of its factory, without other libraries' for CUDA."
    factory = import_module('timm.optim')
    for name in factory.list_optimizers(exclude_filters=['bnb*', 'fused*']):
        cls = factory.get_optimizer_class(name, bind_defaults=True)
        needs_momentum = getattr(cls, 'keywords', {}).get('nesterov')
        if needs_momentum and 'momentum' in inspect.signature(cls).parameters:
            cls = partial(cls, momentum=0.9)
        yield name, cls


def list_bitsandbytes() -> Builders:
    "Yield the optimizers of bitsandbytes that do not page to a GPU."
    for name, cls in list_classes('bitsandbytes.optim'):
        if name.startswith('Paged'):
            continue
        needs_momentum = name.startswith(('LARS', 'SGD', 'PytorchLARS'))
        yield name, partial(cls, momentum=0.9) if needs_momentum else cls


def list_torchao() -> Builders:
    "Yield torchao's optimizers, without the one that needs a GPU."
    for name, cls in list_classes('torchao.optim'):
        if name != 'CPUOffloadOptimizer':
            yield name, cls


def list_transformers() -> Builders:
    "Yield Adafactor with a given rate."
    cls = import_module('transformers.optimization').Adafactor
    yield 'Adafactor', partial(cls, relative_step=False, scale_parameter=False)


# by name of the distribution
LIBRARIES: dict[str, Callable[[], Builders]] = {
    'torch': partial(list_classes, 'torch.optim'),
    'pytorch_optimizer': list_pytorch_optimizer,
    'schedulefree': partial(list_classes, 'schedulefree'),
    'transformers': list_transformers,
    'timm': list_timm,
    'torchao': list_torchao,
    'prodigyopt': partial(list_classes, 'prodigyopt'),
    'lion-pytorch': partial(list_classes, 'lion_pytorch'),
    'madgrad': partial(list_classes, 'madgrad'),
    'bitsandbytes': list_bitsandbytes,
}
