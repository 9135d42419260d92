# SPDX-License-Identifier: Apache-2.0
"""Callback that exports the model at the end of each fit, and checks the files."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from learnkit.checkpoint.save_load import resolve_path
from learnkit.comm.dtensor import mesh_of
from learnkit.core.batch import (
    tensors_in,
)
from learnkit.core.errors import (
    DistributedError,
    OptionError,
)
from learnkit.core.files import atomic_write, check_file
from learnkit.core.model import bare_model
from learnkit.core.optional import check_libraries
from learnkit.core.random import preserved_rng
from learnkit.engine.callback import Callback
from learnkit.engine.snapshot import preserved_forward
from learnkit.inference.export import (
    Case,
    DynamicShapes,
    Runner,
    check_program,
    compare_outputs,
    copy_to_cpu,
    export_program,
    make_cases,
    make_zero_rows,
    read_sample_inputs,
)

FORMATS = {'torch.export': '.pt2', 'onnx': '.onnx'}


ONNX = ('onnx', 'onnxscript', 'onnxruntime')


class ExportForInference(Callback):
    """Export the model at the end of each fit: `fname.pt2` (torch.export), `fname.onnx`, or both.

    Each program accepts batches of any size; `dynamic_shapes` frees further axes. A file is written
    after a check: it is loaded again, and its outputs on batches of 1 and 3 samples, and on free
    axes of another size, are compared with the model's. The exported
    weights are those at the end of the fit: the best weights if `SaveModelCallback` loads them.
    `files` has the paths. In a process group the first rank exports. See `learn.export` for the
    properties of such a program, and load `.pt2` files from trusted sources only.

    Raises before training: `OptionError` for an unknown format, a path that cannot be written, axes
    that the inputs lack, or data without a batch to take the shapes from; `MissingExtraError` if
    the packages for ONNX are missing; `ModelError` with torch's reason for a model that cannot be exported;
    `DistributedError` for a sharded model. Raises after training: `ModelError` for a file with
    other outputs than the model.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=ExportForInference('line'))
    ...     with learn.no_bar(), learn.no_logging(): learn.fit(1)
    ...     print([path.name for path in learn.export_for_inference.files])
    ['line.pt2']
    """

    # after loggers, and after callbacks that load the best weights
    order = 110
    remove_on_find = True
    remove_on_fetch = True
    run_in = 'fit'
    needs_whole = 'weights'
    files: list[Path]

    def __init__(
        self,
        fname: str | Path = 'export',  # name below `learn.path`, or absolute path
        # 'torch.export', 'onnx', or both; None: 'onnx' for a name that ends in .onnx, else 'torch.export'
        formats: str | tuple[str, ...] | None = None,
        act: Callable[[Any], Any] | None = None,  # function of the outputs, such as a softmax
        sample: Any = None,  # example inputs; None: inputs of the first batch of the data
        # free axes besides the batch axis: {'tokens': {1: 'length'}}, see `learn.export`
        dynamic_shapes: DynamicShapes | None = None,
    ) -> None:
        if formats is None:
            formats = 'onnx' if Path(fname).suffix == '.onnx' else 'torch.export'
        self.formats = (formats,) if isinstance(formats, str) else tuple(formats)
        if not FORMATS.keys() >= set(self.formats):
            raise OptionError(f'formats={formats!r}: pass one or more of {tuple(FORMATS)}.')
        self.fname = fname
        self.act = act
        self.sample = sample
        self.dynamic_shapes = dynamic_shapes
        self.files = []

    def before_fit(self) -> None:
        "Check that the export will succeed."
        learn = self.learn
        if mesh_of(learn.model) is not None:
            raise DistributedError(
                "ExportForInference: with strategy 'fsdp' every process has a part of the model. Call "
                '`learn.export(...)` once `learn.distributed(...)` has ended.'
            )
        if not learn.world.is_first:
            return
        for path in self._paths().values():
            check_file(path)
        if 'onnx' in self.formats:
            check_libraries('Exporting to ONNX', *ONNX)
        with preserved_rng(), _evaluation_mode(learn.model) as model:
            inputs = make_zero_rows(self._inputs())
            export_program(model, *inputs, self.act, self.dynamic_shapes)
            if self.dynamic_shapes:
                make_cases(model, self._inputs(), self.act, self.dynamic_shapes)

    def after_fit(self) -> None:
        "Export the model, check the files, and move them to their paths."
        learn = self.learn
        if not learn.world.is_first:
            return
        with preserved_rng(), tempfile.TemporaryDirectory() as folder:
            path = learn.export(
                Path(folder) / 'model.pt2', self.act, self._inputs(), self.dynamic_shapes
            )
            written = {'torch.export': path}
            with path.open('rb') as f:
                program = torch.export.load(f)
            cases = self._cases()
            check_program(program, cases)
            if 'onnx' in self.formats:
                written['onnx'] = _write_onnx(program, Path(folder) / 'model.onnx')
                compare_outputs('onnx', _onnx_runner(written['onnx']), cases)
            paths = self._paths()
            for name, path in paths.items():
                with atomic_write(path) as tmp:
                    shutil.copyfile(written[name], tmp)
            self.files = list(paths.values())

    def _paths(self) -> dict[str, Path]:
        "Return the paths by format."
        stem = str(self.fname)
        for suffix in FORMATS.values():
            stem = stem.removesuffix(suffix)
        return {f: resolve_path(stem, self.learn.path, FORMATS[f]) for f in self.formats}

    def _inputs(self) -> tuple[Any, ...]:
        if self.sample is None:
            return read_sample_inputs(self.learn.dls)
        return self.sample if isinstance(self.sample, tuple) else (self.sample,)

    def _cases(self) -> list[Case]:
        "Return inputs of different sizes, each with the model's output."
        with _evaluation_mode(self.learn.model) as model:
            return make_cases(model, self._inputs(), self.act, self.dynamic_shapes)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[nn.Module]:
    "Yield the model, or a copy on the CPU, in evaluation mode; restore what its passes change."
    model = copy_to_cpu(bare_model(model))
    with preserved_forward(model):
        yield model.eval()


def _write_onnx(program: Any, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # warnings of torch about itself
        onnx: Any = torch.onnx.export(program, dynamo=True, verbose=False)
    onnx.save(path)
    return path


def _onnx_runner(path: Path) -> Runner:
    "Return a function that runs an ONNX file on the CPU."
    from onnxruntime import InferenceSession

    session = InferenceSession(str(path), providers=['CPUExecutionProvider'])
    names = [i.name for i in session.get_inputs()]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arrays = [t.numpy() for t in tensors_in((args, kwargs))]
        outputs = session.run(None, dict(zip(names, arrays, strict=True)))
        return [torch.as_tensor(o) for o in outputs]

    return run
