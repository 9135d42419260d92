"""Models in and out of a fit: weights that are loaded at an event, programs for serving that are written at its end."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from learnkit.checkpoint.saving import (
    copy_to_cpu,
    export_program,
    find_weights_path,
    make_zero_rows,
    read_sample_inputs,
    resolve_path,
)
from learnkit.core.batch import apply_model, count_stacked, describe, map_tensors, passed_names
from learnkit.core.dtensor import mesh_of
from learnkit.core.errors import (
    DistributedError,
    MissingExtraError,
    ModelError,
    OptionError,
    WeightsError,
    did_you_mean,
)
from learnkit.core.files import atomic_write, check_writable
from learnkit.core.model import bare_model
from learnkit.core.random import preserved_rng
from learnkit.engine.callback import Callback
from learnkit.engine.events import EVENTS, canonical_event

__all__ = ['ExportForInference', 'LoadWeights']

FORMATS = {'torch.export': '.pt2', 'onnx': '.onnx'}
ONNX = ('onnx', 'onnxscript', 'onnxruntime')
SIZES = (1, 3)  # samples in the batches that a program is tried on
OF_A_FIT = EVENTS[EVENTS.index('before_fit') : EVENTS.index('after_fit') + 1]

Case = tuple[tuple[Any, ...], dict[str, Any], Any]  # positional and named inputs, and the output
Runner = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class LoadWeights(Callback):
    """Load weights each time an event of a fit comes: `LoadWeights('pretrained')` before every fit.

    The other arguments are those of `learn.load`. A fit that goes on from a checkpoint has its weights from there: at
    the events that fire again nothing is loaded. Raises `WeightsError` before training when there is no such file, and
    `UnknownEventError` for what is no event, and `OptionError` for one outside a fit, such as `close`; what
    `learn.load` raises comes out as it is.

    >>> LoadWeights('pretrained', at='before_epoch')
    LoadWeights(file='pretrained', at='before_epoch')
    """

    order, remove_on_find, remove_on_fetch = -8, True, True

    def __init__(
        self,
        file: str | Path,  # a name below `path/model_dir`, or an absolute path; or a checkpoint's
        at: str = 'before_fit',  # the event
        with_opt: bool | None = False,  # load the optimizer's state too; None: when the file has it
        strict: bool = True,  # False: take what fits by name
    ) -> None:
        resolve_path(file, Path())
        self.file, self.at = file, canonical_event(at, where='LoadWeights')
        if self.at not in OF_A_FIT:
            raise OptionError(
                f'LoadWeights(at={at!r}): weights are loaded in a fit, and this event is not one of its '
                "own. Give one from 'before_fit' to 'after_fit', or call `learn.load`."
            )
        self.with_opt, self.strict = with_opt, strict
        if self.at != 'before_fit':
            self.__dict__[self.at] = partial(self._load)

    def before_fit(self) -> None:
        "See that the file is there, and load it if this is the event."
        if not self.learn.fitting or (self.learn.resumed and self.at == 'before_fit'):
            return
        path = find_weights_path(self.learn, self.file, to_read=True)
        if not path.is_file():
            raise WeightsError(f'LoadWeights: there is no file {path}.')
        if self.at == 'before_fit':
            self._load()

    def _load(self) -> None:
        if not self.learn.fitting or self.learn.resumed:
            return
        self.learn.load(self.file, with_opt=self.with_opt, strict=self.strict)


class ExportForInference(Callback):
    """Write the model for serving at the end of each fit: `fname.pt2` (torch.export), `fname.onnx`, or both.

    Each file takes batches of any size. Before it takes its place it is loaded again, and its outputs on batches of 1
    and 3 samples are compared with the model's; a file that differs is not kept. What is written is what the fit ends
    with: the best weights where `SaveModelCallback` loads them. `files` has the paths. Of several processes the first
    one exports. See `learn.export` for what such a program is, and load `.pt2` files of your own making only.

    Raises, all before training: `OptionError` for an unknown format or a path that cannot be written, or where there is
    no batch to take the shapes from; `MissingExtraError` where the packages for ONNX are missing; `ModelError` with
    torch's reason for a model that cannot be exported; `DistributedError` where every process has a part of it. After
    it: `ModelError` for a file that computes something else.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=ExportForInference('line'))
    ...     with learn.no_bar(), learn.no_logging(): learn.fit(1)
    ...     print([path.name for path in learn.export_for_inference.files])
    ['line.pt2']
    """

    # after loggers, and after what loads the best weights
    order, remove_on_find, remove_on_fetch = 110, True, True
    needs_whole_weights = True
    files: list[Path]

    def __init__(
        self,
        fname: str | Path = 'export',  # a name below `learn.path`, or an absolute path
        formats: str | tuple[str, ...] = ('torch.export',),  # of 'torch.export' and 'onnx'
        act: Callable[[Any], Any] | None = None,  # applied to the outputs, a softmax for example
        sample: Any = None,  # inputs; None: of the first batch of the data
    ) -> None:
        self.formats = (formats,) if isinstance(formats, str) else tuple(formats)
        for f in self.formats or (None,):
            if f not in FORMATS:
                raise OptionError(
                    f'formats={formats!r}: give one or more of {tuple(FORMATS)}.'
                    f'{did_you_mean(str(f), FORMATS)}'
                )
        resolve_path(fname, Path(), suffix='')
        self.fname, self.act, self.sample, self.files = fname, act, sample, []
        self._tried: Any = None  # the model that is known to let itself be exported
        self._has_begun = False  # whether a fit is under way that was not cancelled before it began

    def before_fit(self) -> None:
        "See that the export will work."
        learn = self.learn
        if not learn.fitting:
            return
        if mesh_of(learn.model) is not None:
            raise DistributedError(
                "ExportForInference: with strategy 'fsdp' every process has a part of the model. "
                'Leave it out, and call `learn.export(...)` once `learn.distributed(...)` has '
                "ended; or use strategy 'ddp'."
            )
        if learn.world.is_first:
            self._check()
        self._has_begun = True

    def _check(self) -> None:
        learn = self.learn
        for path in self._paths().values():
            try:
                check_writable(path)
            except OSError as e:
                raise OptionError(f'{path} cannot be written: {e}.') from None
        if 'onnx' in self.formats and (missing := [p for p in ONNX if find_spec(p) is None]):
            raise MissingExtraError(
                f'Exporting to ONNX needs {", ".join(missing)}: pip install "learnkit[onnx]"'
            )
        if self._tried is learn.model:
            return
        with preserved_rng(), _evaluated(learn.model) as m:
            export_program(m, *make_zero_rows(self._inputs()), self.act)
        self._tried = learn.model

    def before_train(self) -> None:
        "Export also where it came in the middle of the fit."
        self._has_begun = True

    def after_fit(self) -> None:
        "Export, compare what was written with the model, and put it in its place."
        learn = self.learn
        if not (learn.fitting and learn.world.is_first and self._has_begun):
            return
        with preserved_rng(), tempfile.TemporaryDirectory() as folder:
            written = {
                'torch.export': learn.export(Path(folder) / 'model.pt2', self.act, self._inputs())
            }
            program, cases = _loaded(written['torch.export']), self._cases()
            _compare('torch.export', lambda args, kwargs: program.module()(*args, **kwargs), cases)
            if 'onnx' in self.formats:
                written['onnx'] = _write_onnx(program, Path(folder) / 'model.onnx')
                _compare('onnx', _onnx_runner(written['onnx']), cases)
            self.files = [_put(written[f], path) for f, path in self._paths().items()]

    def cleanup(self) -> None:
        "A fit is over."
        self._has_begun = False

    def _paths(self) -> dict[str, Path]:
        "Return the files by their formats."
        stem = str(self.fname)
        for suffix in FORMATS.values():
            stem = stem.removesuffix(suffix)
        return {f: resolve_path(stem, self.learn.path, FORMATS[f]) for f in self.formats}

    def _inputs(self) -> tuple[Any, ...]:
        if self.sample is None:
            return read_sample_inputs(self.learn.dls)
        return self.sample if isinstance(self.sample, tuple) else (self.sample,)

    def _cases(self) -> list[Case]:
        "Return inputs of different batch sizes, and what the model makes of them."
        xb, cases = self._inputs(), []
        with _evaluated(self.learn.model) as model, torch.no_grad():
            for size in SIZES:
                x = _rows(xb, size)
                names = passed_names(model, x)
                kwargs = {
                    k: x[0][k] if isinstance(x[0], Mapping) else getattr(x[0], k)
                    for k in names or ()
                }
                out = apply_model(model, x)
                cases.append(
                    (() if names else x, kwargs, out if self.act is None else self.act(out))
                )
        return cases


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[nn.Module]:
    "Yield the model, or a copy of it on the CPU, in evaluation mode; modes are put back."
    model = copy_to_cpu(bare_model(model))
    modes = [(m, m.training) for m in model.modules()]
    try:
        yield model.eval()
    finally:
        for m, mode in modes:
            m.training = mode


def _rows(xb: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    "Return so many samples of a batch, over again from the first one where it has less."
    n = count_stacked(xb)
    idx = torch.arange(size) % n
    return tuple(
        map_tensors(
            xb, lambda t: t.detach().cpu()[idx] if t.ndim and len(t) == n else t.detach().cpu()
        )
    )


def _loaded(path: Path) -> Any:
    with path.open('rb') as f:
        return torch.export.load(f)


def _write_onnx(program: Any, path: Path) -> Path:
    log = logging.getLogger('torch.onnx')  # of libraries that are not there
    level, log.level = log.level, logging.ERROR
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # torch's own, about torch
            onnx: Any = torch.onnx.export(program, dynamo=True, verbose=False)
    finally:
        log.level = level
    onnx.save(path)
    return path


def _onnx_runner(path: Path) -> Runner:
    "Return a function that runs an ONNX file on the CPU."
    from onnxruntime import InferenceSession

    session = InferenceSession(str(path), providers=['CPUExecutionProvider'])
    names = [i.name for i in session.get_inputs()]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [t.numpy() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        return [torch.as_tensor(o) for o in session.run(None, dict(zip(names, given, strict=True)))]

    return run


def _compare(what: str, run: Runner, cases: list[Case]) -> None:
    "Raise `ModelError` unless a program gives what the model gave."
    for args, kwargs, expected in cases:
        try:
            got = [t for t in tree_leaves(run(args, kwargs)) if isinstance(t, Tensor)]
            want = [t for t in tree_leaves(expected) if isinstance(t, Tensor)]
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4, equal_nan=True)
        except Exception as e:
            raise ModelError(
                f'What {what} wrote does not compute what the model does, on {describe(args or kwargs)}: '
                f'{e} Nothing was kept.'
            ) from e


def _put(source: Path, path: Path) -> Path:
    with atomic_write(path) as tmp:
        shutil.copyfile(source, tmp)
    return path
