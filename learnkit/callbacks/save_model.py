# SPDX-License-Identifier: Apache-2.0
"""Callback that saves the weights whenever a monitored value improves, and loads the best at the end."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from filecmp import cmp
from pathlib import Path
from typing import Any

from typing_extensions import override

from learnkit.callbacks.ema import EMA
from learnkit.callbacks.nan_guard import print_line
from learnkit.callbacks.recorder import epoch_row, records
from learnkit.callbacks.tracking import Comparison, Monitor, TrackerCallback
from learnkit.checkpoint.save_load import check_weights_path, find_weights_path
from learnkit.core.errors import OptionError
from learnkit.core.files import atomic_write, link_or_copy
from learnkit.core.validation import warn_user
from learnkit.engine.run import is_open


class SaveModelCallback(TrackerCallback):
    """Save the weights whenever the monitored value improves, and load the best at the end of the fit.

    The best weights are the evaluated ones: the average if `EMA` is used, whose average restarts
    when they are loaded. A column that is evaluated within an epoch is also compared there, before
    the weights change. They are loaded however the fit ends: by its last epoch, a stop, an
    exception, Ctrl-C. Only a file written by this callback is loaded: if no epoch improved the
    value (all were NaN), the weights stay as they are, with a warning. `every_epoch` writes a file
    for each epoch (or each n-th), `fname_0`, `fname_1`, ..., and nothing is compared or loaded.
    `at_end` overwrites the best file with the last weights after a fit without error.

    Raises `OptionError` for options that contradict each other and, before training, for a folder
    that cannot be written. Checkpointed: also the file with the best weights, so that a run can
    resume on another machine.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=SaveModelCallback(fname='line', every_epoch=True))
    ...     with learn.no_bar(): learn.fit(2)
    ...     sorted(p.name for p in Path(folder, 'models').iterdir())
    ['line_0.pth', 'line_1.pth']
    """

    order = TrackerCallback.order + 1
    writes_files = True

    def __init__(
        self,
        monitor: Monitor = 'valid_loss',
        comp: Comparison | None = None,
        min_delta: float = 0.0,  # least change that counts as an improvement
        fname: str | Path = 'model',  # name of the file, as in `learn.save`
        every_epoch: bool | int = False,  # True or n: save each or each n-th epoch, not the best
        at_end: bool = False,  # whether to keep the last weights instead of loading the best
        with_opt: bool = False,  # whether to save and load the optimizer's state too
        reset_on_fit: bool = True,  # whether each fit resets `best`
    ) -> None:
        super().__init__(monitor, comp, min_delta, reset_on_fit)
        if every_epoch and at_end:
            raise OptionError('every_epoch and at_end contradict each other: choose one.')
        self.fname = fname
        self.every_epoch = every_epoch
        self.at_end = at_end
        self.with_opt = with_opt
        self.last_saved_path: Path | None = None
        self._has_best = False  # whether the file has the best weights, written by this callback
        self._is_in_fit = False  # whether the best or the last weights are still to be kept
        self._has_compared = False  # whether the fit has had a value to compare
        self._is_row_compared = False  # whether the value of the row was compared within the epoch
        self._stored: Path | None = None  # file of the best weights in the last checkpoint

    @override
    def before_fit(self) -> None:
        "Check that the files can be written."
        if not self.every_epoch:
            super().before_fit()
        check_weights_path(self.learn, self.fname)
        self._check_own_file()
        if self.reset_on_fit:
            self._has_best = False
        self._is_in_fit = True
        self._has_compared = False
        self._is_row_compared = False

    def _check_own_file(self) -> None:
        "Raise `OptionError` if another callback writes the same file."
        own = self.fname, bool(self.every_epoch)
        for cb in self.learn.cbs:
            if cb is self or not isinstance(cb, SaveModelCallback):
                continue
            if (cb.fname, bool(cb.every_epoch)) == own:
                raise OptionError(
                    f'{self} and {cb} write the same file: pass another `fname` to one of them.'
                )

    def after_eval(self) -> None:
        "Compare a value that is evaluated within an epoch, before later batches change the weights."
        if self.every_epoch or callable(self.monitor):
            return
        value = self._as_number(records(self).measured.get(self.monitor))
        if value is None:
            return
        self._is_row_compared = is_open(self.learn, 'train')
        if self._is_row_compared:
            self._compare(value)
            self.after_comparison()

    @override
    def after_epoch(self) -> None:
        "Save this epoch's weights if they are due or the best."
        if not self.every_epoch and self._is_row_compared:
            self._is_row_compared = False  # the weights are not the evaluated ones
            return None
        if not self.every_epoch:
            return super().after_epoch()
        if epoch_row(self) is not None and self.learn.epoch % self.every_epoch == 0:
            self._save(f'{self.fname}_{self.learn.epoch}')

    @override
    def after_comparison(self) -> None:
        "Save the weights if they are the best."
        self._is_in_fit = self._has_compared = True  # also if it was added during the fit
        if not self.new_best:
            return
        found = f'Better model found at epoch {self.learn.epoch}'
        print_line(self, f'{found} with {self._get_label()} value: {self.best:.6g}.')
        with ExitStack() as stack:
            for cb in self.learn.cbs:
                if isinstance(cb, EMA) and cb.has_begun:
                    stack.enter_context(cb.applied())
            self._save(self.fname)
        self._has_best = True
        self._stored = None

    def after_fit(self) -> None:
        "Load the best weights, or save the last ones with `at_end`."
        if self.at_end:
            self._is_in_fit = False
            self._has_best = False
            self._save(self.fname)
        else:
            self._load_best()

    def cleanup(self) -> None:
        "Load the best weights also after a failed fit."
        if self._is_in_fit:
            self._load_best()

    def _save(self, name: str | Path) -> None:
        self.last_saved_path = self.learn.save(name, with_opt=self.with_opt)

    def _load_best(self) -> None:
        self._is_in_fit = False
        if self.every_epoch or self.at_end:
            return
        if self._has_best:
            self.learn.load(self.fname, with_opt=self.with_opt)
        elif self._has_compared:
            warn_user(
                f'No epoch had a {self._get_label()} that could be the best, so no weights were saved or loaded.'
            )

    def _get_label(self) -> str:
        return self.monitor if isinstance(self.monitor, str) else 'monitored'

    @override
    def state_dict(self) -> dict[str, Any]:
        "Return the best value, and whether the file has the best weights."
        sd = super().state_dict()
        return {
            **sd,
            'has_best': self._has_best,
            'compared': self._has_compared,
            'row_compared': self._is_row_compared,
        }

    @override
    def save_to_checkpoint(self, folder: Path) -> None:
        "Keep the best weights in the checkpoint; checkpoints with the same ones share one file."
        path = find_weights_path(self.learn, self.fname)
        if not (self._has_best and path.exists()):
            return
        target = folder / path.name
        if self._stored is not None and self._stored.exists():
            link_or_copy(self._stored, target)
        else:
            shutil.copyfile(path, target)  # no link: other programs may change the user's file
        self._stored = target

    @override
    def resume_from_checkpoint(self, folder: Path, model: Any) -> None:
        "Restore the file of the best weights, which may be missing, or of a later epoch."
        path = find_weights_path(self.learn, self.fname)
        stored = folder / path.name
        if not (self._has_best and stored.exists()):
            return
        self._stored = stored
        if self.learn.world.is_first and not (path.exists() and cmp(stored, path, shallow=False)):
            with atomic_write(path) as tmp:
                shutil.copyfile(stored, tmp)

    def state_without_files(self) -> dict[str, Any]:
        "Return the state for a branch of a run; the file of the best weights belongs to the run."
        flags = ('new_best', 'has_best', 'compared', 'row_compared')
        return {'best': self._worst, **dict.fromkeys(flags, False)}

    @override
    def load_state_dict(self, sd: dict[str, Any]) -> None:
        "Restore the best value and its file."
        super().load_state_dict(sd)
        self._has_best = sd['has_best']
        self._has_compared = sd['compared']
        self._is_row_compared = sd['row_compared']
