# SPDX-License-Identifier: Apache-2.0
"""Model summary: a table of a model's layers, and the sizes of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from fastcore.foundation import L
from torch import Tensor, nn

from learnkit.callbacks.hooks import (
    Hooks,
    flatten_model,
    has_own_params,
    named_layers,
    run_uncompiled,
    unwrap_compiled,
)
from learnkit.core.batch import apply_model, detuplify, map_tensors
from learnkit.core.errors import ModelError
from learnkit.core.html import text_table
from learnkit.core.model import name_of
from learnkit.data.show import first_batch
from learnkit.engine.snapshot import pass_forward, preserved_forward

if TYPE_CHECKING:
    from learnkit.learner import Learner

WIDEST = 60  # largest number of characters of a column


@dataclass(frozen=True)
class Layer:
    "One row of a summary."

    name: str  # name in `model.named_modules()`
    kind: str  # name of the class
    output: str  # shape of the first output, '' if the layer was not called
    n_calls: int
    n_params: int  # own parameters, without children and without parameters of rows above
    n_trained: int  # own parameters that require gradients

    def cells(self) -> tuple[str, str, str, str, str]:
        "Return the printed cells of the row."
        kind = self.kind if self.n_calls < 2 else f'{self.kind} x {self.n_calls}'
        output = self.output if self.n_calls else 'not called'
        if not self.n_params:
            return self.name or '(model)', kind, output, '', ''
        trained = {0: 'no', self.n_params: 'yes'}.get(self.n_trained, 'partly')
        return self.name or '(model)', kind, output, f'{self.n_params:,}', trained


@dataclass(frozen=True, repr=False)
class Summary:
    "Table of a model's layers, printed as text."

    model: str  # name of the class
    input: str  # shapes of the input
    output: str  # shapes of the output
    layers: tuple[Layer, ...]
    n_params: int  # parameters of the whole model, each counted once
    n_trained: int  # parameters that require gradients
    notes: str = ''  # text below the table: how the model is trained

    def __str__(self) -> str:
        rows = [tuple(map(_cut, layer.cells())) for layer in self.layers]
        head = ('Layer', 'Type', 'Output shape', 'Parameters', 'Trained')
        table = text_table([head, *rows], right=[3]).split('\n')
        line = '-' * len(table[0])
        totals = (
            ('Total params', self.n_params),
            ('Total trainable params', self.n_trained),
            ('Total non-trainable params', self.n_params - self.n_trained),
        )
        title = f'{self.model}: {_cut(self.input, 200)} -> {_cut(self.output, 200)}'
        lines = [title, line, table[0], line, *table[1:], line]
        lines += [f'{name}: {n:,}' for name, n in totals]
        return '\n'.join([*lines, self.notes]).rstrip()

    __repr__ = __str__


def _cut(text: str, width: int = WIDEST) -> str:
    return text if len(text) <= width else text[: width - 3] + '...'


def _format_shapes(o: Any) -> str:
    """Return nested shapes as text: `64 x 10`, `(5 x 4, 1 x 4)`, `{ids: 8 x 12}`.

    >>> _format_shapes((torch.zeros(5, 4), {'n': torch.tensor(1)}))
    '(5 x 4, {n: scalar})'
    """
    if isinstance(o, Tensor):
        return ' x '.join(map(str, o.shape)) or 'scalar'
    if isinstance(o, Mapping):
        items = [f'{k}: {_format_shapes(v)}' for k, v in o.items() if v is not None]
        return '{' + ', '.join(items) + '}'
    if isinstance(o, (tuple, list)):
        return '(' + ', '.join(map(_format_shapes, o)) + ')'
    return 'None' if o is None else type(o).__name__


# ---------------------------------------------------------------------------------------- the table


def summary(
    model: nn.Module,
    *inputs: Any,  # example inputs; a dict is passed by name if the model has those arguments
) -> Summary:
    """Describe a model by one run on example inputs: its layers, their outputs and parameters.

    A layer is a module without children, or with own parameters. Layers are listed in the order of
    their calls; layers with parameters that were not called are listed at the end. Modes, random
    generators, buffers and extra state are restored; lazy modules are initialized.

    >>> summary(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.zeros(5, 3))
    Sequential: 5 x 3 -> 5 x 2
    ------------------------------------------------
    Layer  Type    Output shape  Parameters  Trained
    ------------------------------------------------
    0      Linear  5 x 2                  8  yes
    1      ReLU    5 x 2
    ------------------------------------------------
    Total params: 8
    Total trainable params: 8
    Total non-trainable params: 0
    """
    return _summarize(model, lambda: apply_model(unwrap_compiled(model).eval(), inputs))


def _summarize(
    model: nn.Module,
    run: Callable[[], Any],  # function that calls the model
    notes: str = '',
) -> Summary:
    "Describe a model by the calls of its modules during `run`."
    inner = unwrap_compiled(model)
    names = named_layers(inner)
    whole: list[tuple[str, str]] = []  # shapes of the model's input and output, by call
    outputs: dict[int, list[str]] = {}  # outputs by id of the module, in the order of first calls

    def record(m: nn.Module, inp: Any, out: Any) -> None:
        outputs.setdefault(id(m), []).append(_format_shapes(out))

    def record_whole(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = kwargs if kwargs and not args else detuplify((*args, *kwargs.values()))
        whole.append((_format_shapes(inputs), _format_shapes(out)))

    with restored_model(inner), run_uncompiled(model), Hooks(names.values(), record, detach=False):
        handle = inner.register_forward_hook(record_whole, with_kwargs=True)
        try:
            run()
        finally:
            handle.remove()

    by_id = {id(m): (name, m) for name, m in names.items()}
    rows = [by_id[i] for i in outputs]  # in the order of calls
    rows += [row for i, row in by_id.items() if i not in outputs and has_own_params(row[1])]
    counted: set[nn.Parameter] = set()
    layers = tuple(_make_layer(name, m, outputs.get(id(m), []), counted) for name, m in rows)
    n_params, n_trained = _count(inner.parameters())
    shapes = whole[0] if whole else ('', '')
    return Summary(type(inner).__name__, *shapes, layers, n_params, n_trained, notes)


def _make_layer(name: str, m: nn.Module, outputs: list[str], counted: set[nn.Parameter]) -> Layer:
    own = set(m.parameters(recurse=False))
    new = own - counted
    counted |= own
    output = outputs[0] if outputs else ''
    return Layer(name, type(m).__name__, output, len(outputs), *_count(new))


def _count(params: Iterable[nn.Parameter]) -> tuple[int, int]:
    "Return the number of elements, and the number of elements that are trained."
    sizes = [(p.numel(), p.requires_grad) for p in params]
    return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)


def summarize_learner(learn: Learner) -> Summary:
    "Describe the model, layer by layer, and how it is trained."
    batch = first_batch(learn.dls.train)
    notes = '\n'.join(_make_notes(learn))
    return _summarize(learn.model, lambda: pass_forward(learn, batch), notes)


def _make_notes(learn: Learner) -> Iterator[str]:
    "Yield lines about optimizer, loss function and callbacks."
    loss_func = (
        _describe(learn.loss_func) if learn.loss_func is not None else 'none, or of the model'
    )
    yield f'\nOptimizer used: {_describe(learn.opt_func)}'
    yield f'Loss function: {loss_func}'
    if learn.opt is not None:
        frozen = getattr(learn.opt, 'frozen_idx', 0)
        yield f'\nModel frozen up to parameter group #{frozen}' if frozen else '\nModel unfrozen'
    yield '\nCallbacks:'
    for cb in learn.parts.callbacks.list_ordered():
        yield f'  - {cb}'


def _describe(f: Any) -> str:
    "Return the name of a function, or the class of an object, with the options of a partial."
    if not isinstance(f, partial):
        return name_of(f)
    options = [f'{k}={_describe(v) if callable(v) else v!r}' for k, v in f.keywords.items()]
    return f'{name_of(f.func)}({", ".join(options)})'


# -------------------------------------------------------------------------------------------- sizes


def total_params(m: nn.Module) -> tuple[int, bool]:
    """Return the number of parameters of a module, and whether any of them is trainable.

    >>> total_params(nn.Linear(3, 2))
    (8, True)
    """
    return sum(p.numel() for p in m.parameters()), any(p.requires_grad for p in m.parameters())


def layer_info(
    learn: Learner,
    *xb: Any,  # inputs of a batch, of which the first sample passes through the model
) -> L:
    """Return what each layer does, in fastai's form; `learn.summary()` shows more.

    An item holds the layer's type, its number of parameters and whether they are trained (both '' without a weight),
    the shape of its output, and whether that is the shape of its input; or None if the layer was not called.

    >>> from learnkit.testing import synth_learner
    >>> layer_info(synth_learner(model=nn.Sequential(nn.Linear(1, 1), nn.ReLU())), torch.zeros(4, 1))
    [('Linear', 2, True, torch.Size([1, 1]), True), ('ReLU', '', '', torch.Size([1, 1]), True)]
    """

    def record(m: nn.Module, inputs: Any, output: Any) -> tuple[Any, ...]:
        is_same = any(
            isinstance(x, Tensor) and x.shape[1:] == y.shape
            for x, y in zip(inputs, output, strict=False)
        )
        count = total_params(m) if hasattr(m, 'weight') else ('', '')
        return type(m).__name__, *count, map_tensors(output, lambda t: t.shape), is_same

    batch = map_tensors(xb, lambda t: t[:1])
    model = unwrap_compiled(learn.model)
    with restored_model(model), Hooks(flatten_model(model), record) as hooks:
        pass_forward(learn, batch)
    return hooks.stored


@contextmanager
def restored_model(model: nn.Module) -> Iterator[None]:
    "Run a model without gradients in a context that restores what its forward passes change."
    with preserved_forward(model), torch.no_grad():
        yield


def dummy_eval(
    m: nn.Module,
    size: tuple[int, ...] = (64, 64),  # height and width of the random image
) -> Any:
    """Evaluate a model on one random image `(1, channels, *size)`; return the output.

    Modes, random generators and buffers are restored. Raises `ModelError` if the number of channels
    is unknown.

    >>> dummy_eval(nn.Conv2d(3, 8, 3), (10, 12)).shape
    torch.Size([1, 8, 8, 10])
    """
    with restored_model(m), run_uncompiled(m):
        p = next((p for p in m.parameters() if p.is_floating_point()), torch.empty(0))
        image = torch.empty(1, _count_channels(m), *size, device=p.device, dtype=p.dtype)
        return m.eval()(image.uniform_(-1, 1))


def _count_channels(m: nn.Module) -> int:
    "Return the input channels of the first 2-d convolution; raise `ModelError` without any."
    for layer in m.modules():
        if isinstance(layer, nn.Conv2d):
            return layer.in_channels
    raise ModelError(f'{type(m).__name__} has no 2-d convolution, so its images are unknown.')


def model_sizes(
    m: nn.Module,
    size: tuple[int, ...] = (64, 64),  # height and width of the random image
) -> list[Any]:
    """Return the shape of each child's output, nested like the output; None for a child not called.

    >>> model_sizes(nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2)), (8, 8))
    [torch.Size([1, 8, 6, 6]), torch.Size([1, 8, 3, 3])]
    """
    with Hooks(_list_parts(m), lambda m, i, o: map_tensors(o, lambda t: t.shape)) as hooks:
        dummy_eval(m, size)
    return list(hooks.stored)


def _list_parts(m: nn.Module) -> list[nn.Module]:
    "Return the modules of a container, the children of a module, or the module itself."
    return list(m) if isinstance(m, (nn.Sequential, nn.ModuleList)) else list(m.children()) or [m]


def num_features_model(m: nn.Module) -> int:
    """Return the number of channels or features (dimension 1) of the output of an image model.

    The model is tried on images of 32 to 2048 pixels, as some models need large ones.

    >>> num_features_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 40)))
    16
    """
    for side in (32, 64, 128, 256, 512, 1024):
        try:
            return int(dummy_eval(m, (side, side)).shape[1])
        except RuntimeError:
            pass  # the image may be too small for this model
    return int(dummy_eval(m, (2048, 2048)).shape[1])
