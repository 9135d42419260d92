# SPDX-License-Identifier: Apache-2.0
"""Callback that runs other data through the model at an interval and processes the joined results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from learnkit.core.batch import apply_model, concat, detuplify, to_device, unpack_output
from learnkit.core.errors import EmptyLoaderError, LoaderError
from learnkit.core.model import model_device, name_of
from learnkit.core.time import Time
from learnkit.data.dataloaders import check_loader, evaluation_loaders
from learnkit.data.preserve import undisturbed_loader
from learnkit.engine.callback import Periodic
from learnkit.engine.run import clear_pass, preserved_state
from learnkit.inference.loaders import resolve_loader


class PeriodicData(Periodic):
    """Run a loader through `on_batch` at an interval, and pass the joined results to `process_results`.

    `on_batch(batch)` gets each batch on the model's device, with the model in evaluation mode and
    without gradients, and returns tensors, or nested structures of tensors; `self.xb` and `self.yb`
    are its inputs and targets. By default it returns `{'preds': ..., 'targs': ...}`. The results
    are concatenated along their first dimension, on the CPU (see `learnkit.core.batch.concat`:
    numbers are stacked, a smaller last batch is allowed), and the result of `process_results` is
    kept in `results`. There `self.learn.log('error', value)` adds a column to the history, named as
    in an evaluation: `valid_error`, or `test/error` for the loader 'test'; a loader without a name
    has the callback's.

    The training is not changed: modes, random generators, the loaders' generators and workers and
    the loop's state are restored, also after an error. No events are called: other callbacks do not
    see these batches, but their `forward_context`, such as mixed precision, is entered.

    As functions: `PeriodicData('2ep', test_dl, on_batch=f, process_results=g)` with `f(learn, xb,
    yb)` and `g(learn, results)`. Handlers of other events can collect values between the intervals,
    and `at_eval = True` adds a pass to each `learn.validate()`, as for every `Periodic`.

    Raises `LoaderError` before training for an invalid loader. Checkpointed: the number of intervals
    passed; not `results`, which the next pass sets.

    >>> from learnkit.testing import synth_learner
    >>> class Errors(PeriodicData):
    ...     def __init__(self):
    ...         super().__init__(every='5ba')
    ...         self.seen = []
    ...     def after_backward(self): self.seen.append(self.loss)         # tracking, each microbatch
    ...     def on_batch(self, batch): return {'error': (self.model(self.x) - self.y).abs()}
    ...     def process_results(self, results):
    ...         n, self.seen = len(self.seen), []
    ...         return n, tuple(results['error'].shape)
    >>> learn = synth_learner(n_train=10, n_valid=2, cbs=Errors())
    >>> with learn.no_bar(), learn.no_logging(): learn.fit(1)
    >>> learn.errors.results
    (5, (32, 1))
    """

    remove_on_find = True

    def __init__(
        self,
        every: str | int | Time = '1ep',  # interval; an int counts epochs
        dl: Any = None,  # loader, or its name; None: the validation loader
        on_batch: Callable[[Any, Any, Any], Any] | None = None,  # f(learn, xb, yb); None: method
        process_results: Callable[[Any, Any], Any] | None = None,  # g(learn, results); None: method
        **handlers: Any,  # handlers of further events, by name; `order`, `run_in`
    ) -> None:
        super().__init__(every, **handlers)
        if dl is not None and not isinstance(dl, str):
            check_loader('dl', dl)
        self.results: Any = None
        self._given_dl = dl
        self._on_batch = on_batch
        self._process = process_results

    @override
    def before_fit(self) -> None:
        "Check that there is a loader."
        super().before_fit()
        if self.learn.fitting or self.at_eval:
            self._find_loader()  # raises before training

    def _find_loader(self) -> tuple[str, Any]:
        "Return the name of the loader, and the loader."
        learn = self.learn
        dl = self._given_dl
        if dl is None:
            loaders = evaluation_loaders(learn.dls)
            if loaders:
                return loaders[0]
            raise LoaderError(f'{type(self).__name__}: there is no validation loader; pass `dl=`.')
        return (dl, resolve_loader(learn, dl)) if isinstance(dl, str) else (self.name, dl)

    def on_batch(self, batch: Any) -> Any:
        "Return the result of a batch; by default its predictions and targets."
        learn = self.learn
        if self._on_batch is not None:
            return self._on_batch(learn, learn.xb, learn.yb)
        preds = unpack_output(apply_model(learn.model, learn.xb))[0]
        return {'preds': preds, 'targs': detuplify(learn.yb)} if learn.yb else {'preds': preds}

    def process_results(self, results: Any) -> Any:
        "Process the results of the whole loader; the return value is kept in `results`."
        return results if self._process is None else self._process(self.learn, results)

    @override
    def on_every(self) -> None:
        "Run the loader."
        learn = self.learn
        name, dl = self._find_loader()
        with (
            preserved_state(learn),
            undisturbed_loader(dl),
            torch.no_grad(),
            learn.parts.evaluations.opened(learn),
        ):
            learn.model.eval()
            learn.training = False
            learn.phase = 'valid'
            learn.dl = dl
            learn.dl_name = name
            self.results = self.process_results(self._collect(dl))

    def _collect(self, dl: Any) -> Any:
        "Run a loader through `on_batch`, and return the concatenated results."
        learn = self.learn
        results = []
        device = model_device(learn.model, learn.dls)
        for i, batch in enumerate(dl):
            clear_pass(learn)
            learn.iter = i
            learn.batch = to_device(batch, device)
            learn._split(learn.batch)
            with learn.contexts('forward'):
                result = self.on_batch(learn.batch)
            results.append(learn.to_detach(result))
        if not results:
            raise EmptyLoaderError(
                f'{type(self).__name__}: the loader {name_of(dl)} returned no batch.'
            )
        return None if all(r is None for r in results) else concat(results)
