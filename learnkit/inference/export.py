# SPDX-License-Identifier: Apache-2.0
"""Export models for serving."""

from __future__ import annotations

from collections.abc import Callable
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
    form_of,
    map_tensors,
    passed_names,
    tensors_in,
)
from learnkit.core.errors import (
    ModelError,
    OptionError,
)
from learnkit.core.files import atomic_write
from learnkit.core.model import bare_model, check_has_values, preserved_modes
from learnkit.data.dataloaders import evaluation_loaders
from learnkit.data.show import first_batch
from learnkit.engine.checks import check_function
from learnkit.optim.wrapper import evaluation_weights

if TYPE_CHECKING:
    from learnkit.learner import Learner


def export(
    learn: Learner,
    *,
    fname: str | Path,
    act: Callable[[Any], Any] | None,
    sample: Any,
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
            program = export_program(model.eval(), *make_zero_rows(xb), act)
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
) -> Any:
    "Export a model with a dynamic batch dimension in its inputs; raise `ModelError` if it cannot be exported."
    from torch.export import Dim, ShapesCollection, export

    args, kwargs = call_by_name(lambda *a, **k: (a, k), xb, passed_names(model, xb))
    batch_dim = Dim('batch', min=1)
    batched_ids = {id(t) for t in batched}
    shapes: Any = ShapesCollection()  # Any, because the annotations of `export` do not include it
    for t in tensors_in((args, kwargs)):
        if id(t) in batched_ids:
            shapes[t] = {0: batch_dim}
    hook = model.register_forward_hook(lambda module, xb, out: out if act is None else act(out))
    try:
        return export(model, args, kwargs, dynamic_shapes=shapes)
    except Exception as e:
        reason = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise ModelError(f'{type(model).__name__} cannot be exported: {reason}') from e
    finally:
        hook.remove()
