# SPDX-License-Identifier: Apache-2.0
"""Export models for serving."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from learnkit.checkpoint.save_load import resolve_path
from learnkit.comm.dtensor import mesh_of
from learnkit.core.batch import (
    call_by_name,
    count_stacked,
    describe,
    form_of,
    map_tensors,
    passed_names,
    tensors_in,
)
from learnkit.core.errors import (
    ModelError,
    OptionError,
    did_you_mean,
)
from learnkit.core.files import atomic_write
from learnkit.core.model import bare_model, check_has_values, preserved_modes
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.show import first_batch
from learnkit.engine.checks import check_function
from learnkit.optim.wrapper import evaluation_weights

if TYPE_CHECKING:
    from learnkit.learner import Learner

SIZES = (1, 3)  # batch sizes that an exported program is tested with

# argument of `forward`: {axis: name or torch.export.Dim}
DynamicShapes = Mapping[str, Mapping[int, Any]]

Case = tuple[tuple[Any, ...], dict[str, Any], Any]  # positional and named inputs, and the output
Runner = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def export(
    learn: Learner,
    *,
    fname: str | Path,
    act: Callable[[Any], Any] | None,
    sample: Any,
    dynamic_shapes: DynamicShapes | None,
) -> Path:
    "Export the model for serving by `torch.export`, for any batch size, and return the path of the file."
    if str(fname).endswith(('.pkl', '.pickle', '.pth', '.pt', '.onnx')):
        raise OptionError(
            f'{fname}: a program for serving goes into a file `.pt2`. What `load_learner` reads is written by '
            "`learn.save_learner('learner.pth')`, and ONNX by the callback `ExportForInference(formats=['onnx'])`."
        )
    if mesh_of(learn.model) is not None:
        raise ModelError(
            f'{type(learn.model).__name__} is sharded: export it after the context of `learn.distributed()`.'
        )
    check_has_values(learn.model)
    check_function('act', act)
    path = resolve_path(fname, learn.path, suffix='.pt2')
    if not learn.world.is_first:
        return path
    if sample is None:
        sample = read_sample_inputs(learn.dls)
    xb = sample if isinstance(sample, tuple) else (sample,)
    with evaluation_weights(learn):
        model = copy_to_cpu(bare_model(learn.model))
        with preserved_modes(model):
            program = export_program(model.eval(), *make_zero_rows(xb), act, dynamic_shapes)
            if dynamic_shapes:
                check_program(program, make_cases(model, xb, act, dynamic_shapes))
        with atomic_write(path) as tmp, tmp.open('wb') as f:
            torch.export.save(program, f)
    return path


def read_sample_inputs(dls: Any) -> tuple[Any, ...]:
    "Return the inputs of a batch of the first validation loader, or else of the training loader."
    name, dl = next(iter(evaluation_loaders(dls)), ('train', dls.train))
    try:
        return form_of(dls, name).split(first_batch(dl), predicting=True)[0]
    except OptionError as e:
        raise OptionError(f'{e} Pass `sample=`, the inputs of a batch.') from None


def make_zero_rows(xb: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor]]:
    "Return inputs of two all-zero samples, and the list of their batched tensors; other tensors are unchanged."
    n = count_stacked(xb)
    batched = []

    def make_zeros(t: Tensor) -> Tensor:
        t = t.detach().cpu().as_subclass(Tensor)
        if not t.ndim or len(t) != n:
            return t
        batched.append(t.new_zeros((2, *t.shape[1:])))  # torch.export would fix a size of 1
        return batched[-1]

    return tuple(map_tensors(xb, make_zeros)), batched


def copy_to_cpu(model: nn.Module) -> nn.Module:
    "Return the model if it is on the CPU, otherwise a copy on the CPU."
    if all(t.device.type == 'cpu' for t in (*model.parameters(), *model.buffers())):
        return model
    return deepcopy(model).cpu()


def export_program(
    model: nn.Module,
    xb: tuple[Any, ...],  # inputs
    batched: list[Tensor],  # tensors of the inputs with a batch dimension
    act: Callable[[Any], Any] | None,  # applied to the outputs
    dynamic_shapes: DynamicShapes | None = None,
) -> Any:
    """Export a model with a dynamic batch dimension in its inputs.

    Raises `OptionError` for axes that the inputs lack, and `ModelError` if the model cannot be exported."""
    from torch.export import Dim, ShapesCollection, export

    args, kwargs = list_arguments(model, xb)
    free_axes = find_free_axes(model, args, kwargs, dynamic_shapes)
    batch_dim = Dim('batch', min=1)
    batched_ids = {id(t) for t in batched}
    shapes: Any = ShapesCollection()  # Any, because the annotations of `export` do not include it
    for t in tensors_in((args, kwargs)):
        axes = {0: batch_dim} if id(t) in batched_ids else {}
        axes.update(free_axes.get(id(t), {}))
        if axes:
            shapes[t] = axes
    hook = model.register_forward_hook(lambda module, xb, out: out if act is None else act(out))
    try:
        return export(model, args, kwargs, dynamic_shapes=shapes)
    except Exception as e:
        lines = [line.strip() for line in str(e).splitlines() if line.strip()]
        # torch lists the violated bounds of free axes below its first line
        bounds = [line for line in lines[1:] if line.startswith(('- ', '* '))]
        reason = ' '.join([*lines[:1], *bounds]) or type(e).__name__
        raise ModelError(f'{type(model).__name__} cannot be exported: {reason}') from e
    finally:
        hook.remove()


def list_arguments(
    model: nn.Module,
    xb: tuple[Any, ...],  # inputs of a batch
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    "Return the positional and the named arguments with which the model is called on a batch."
    return call_by_name(lambda *args, **kwargs: (args, kwargs), xb, passed_names(model, xb))


# -- free axes -----------------------------------------------------------------------------------------


def find_free_axes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: DynamicShapes | None,
) -> dict[int, dict[int, Any]]:
    "Return the dims of the free axes of each input tensor, by its `id`. Raises `OptionError` for axes that it lacks."
    from torch.export import Dim

    inputs = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    found = {}
    for name, axes in (dynamic_shapes or {}).items():
        tensor = inputs.get(name)
        if not isinstance(tensor, Tensor):
            tensors = [n for n, value in inputs.items() if isinstance(value, Tensor)]
            raise OptionError(
                f'dynamic_shapes: {type(model).__name__}.forward has no tensor {name!r}, but '
                f'{", ".join(tensors)}.{did_you_mean(name, tensors)}'
            )
        if not isinstance(axes, Mapping) or not all(axis in range(tensor.ndim) for axis in axes):
            raise OptionError(
                f'dynamic_shapes[{name!r}] is {axes!r}: pass a dict from an axis below {tensor.ndim} to a name or a '
                f'torch.export.Dim, such as {{1: "length"}}.'
            )
        found[id(tensor)] = {
            # torch infers the bounds of a name, and checks those of a `Dim`
            axis: Dim.DYNAMIC if isinstance(dim, str) else dim
            for axis, dim in axes.items()
        }
    return found


def resize_free_axes(
    model: nn.Module,
    xb: tuple[Any, ...],
    dynamic_shapes: DynamicShapes | None,
) -> tuple[Any, ...]:
    "Return inputs whose free axes have twice their size, or half of it where a `Dim` is bounded."
    args, kwargs = list_arguments(model, xb)
    free_axes = find_free_axes(model, args, kwargs, dynamic_shapes)

    def resize(t: Tensor) -> Tensor:
        for axis, dim in free_axes.get(id(t), {}).items():
            n = t.shape[axis]
            bound = getattr(dim, 'max', None) or math.inf  # None: inferred by torch
            size = 2 * n if 2 * n <= bound else max(n // 2, 1)
            t = t.index_select(axis, torch.arange(size) % n)
        return t

    return tuple(map_tensors(xb, resize))


# -- the check of a program -------------------------------------------------------------------------


def make_cases(
    model: nn.Module,  # on the CPU, in evaluation mode
    xb: tuple[Any, ...],  # inputs of a batch
    act: Callable[[Any], Any] | None,
    dynamic_shapes: DynamicShapes | None = None,
) -> list[Case]:
    "Return inputs of different sizes of the batch and of free axes, each with the model's output."
    inputs = [select_rows(xb, size) for size in SIZES]
    cases = [_make_case(model, x, act) for x in inputs]
    if dynamic_shapes:
        x = resize_free_axes(model, inputs[-1], dynamic_shapes)
        try:
            cases.append(_make_case(model, x, act))
        except Exception as e:
            raise ModelError(
                f'{type(model).__name__} fails on {describe(x)}: {e} Set bounds for the free axes, such as '
                f"`torch.export.Dim('length', max=512)`."
            ) from e
    return cases


@torch.no_grad()
def _make_case(model: nn.Module, xb: tuple[Any, ...], act: Callable[[Any], Any] | None) -> Case:
    args, kwargs = list_arguments(model, xb)
    out = model(*args, **kwargs)
    return args, kwargs, out if act is None else act(out)


def select_rows(xb: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    "Return `size` samples of a batch on the CPU; repeat the samples of a smaller batch."
    n = count_stacked(xb)
    idx = torch.arange(size) % n

    def select(t: Tensor) -> Tensor:
        t = t.detach().cpu()
        return t[idx] if t.ndim and len(t) == n else t

    return tuple(map_tensors(xb, select))


def check_program(program: Any, cases: list[Case]) -> None:
    "Raise `ModelError` unless a program of `torch.export` returns the outputs of the model."
    compare_outputs('torch.export', lambda args, kwargs: program.module()(*args, **kwargs), cases)


def compare_outputs(format_name: str, run: Runner, cases: list[Case]) -> None:
    "Raise `ModelError` unless an exported program returns the outputs of the model."
    for args, kwargs, expected in cases:
        try:
            got = tensors_in(run(args, kwargs))
            torch.testing.assert_close(
                got, tensors_in(expected), rtol=1e-3, atol=1e-4, equal_nan=True
            )
        except Exception as e:
            raise ModelError(
                f'What {format_name} wrote does not compute what the model does, on {describe(args or kwargs)}: '
                f'{e} Nothing was kept.'
            ) from e
