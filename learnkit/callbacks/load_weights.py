# SPDX-License-Identifier: Apache-2.0
"""Callback that loads weights at an event of a fit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from learnkit.checkpoint.save_load import (
    find_weights_path,
)
from learnkit.core.errors import (
    WeightsError,
)
from learnkit.engine.callback import Callback
from learnkit.engine.events import canonical_event


class LoadWeights(Callback):
    """Load weights at each occurrence of an event: `LoadWeights('pretrained')` before every fit.

    The other arguments are as in `learn.load`. A resumed fit has the weights of its checkpoint:
    events that occur again load nothing. Raises `WeightsError` before training if the file does not
    exist, `UnknownEventError` for an unknown event, and all errors of `learn.load`.

    >>> LoadWeights('pretrained', at='before_epoch')
    LoadWeights(file='pretrained', at='before_epoch')
    """

    order = -8
    remove_on_find = True
    remove_on_fetch = True
    run_in = 'fit'

    def __init__(
        self,
        file: str | Path,  # name below `path/model_dir`, or absolute path; also of a checkpoint
        at: str = 'before_fit',  # name of the event
        with_opt: bool | None = False,  # whether to load the optimizer's state; None: if present
        strict: bool = True,  # whether all names must match; False: load those that match
    ) -> None:
        self.file = file
        self.at = canonical_event(at, where='LoadWeights')
        self.with_opt = with_opt
        self.strict = strict
        if self.at != 'before_fit':
            self.__dict__[self.at] = partial(self._load)  # a function would appear in the repr

    def before_fit(self) -> None:
        "Check that the file exists, and load it if this is the event."
        if self.learn.resumed and self.at == 'before_fit':
            return
        path = find_weights_path(self.learn, self.file, to_read=True)
        if not path.is_file():
            raise WeightsError(f'LoadWeights: there is no file {path}.')
        if self.at == 'before_fit':
            self._load()

    def _load(self) -> None:
        if self.learn.resumed:
            return
        self.learn.load(self.file, with_opt=self.with_opt, strict=self.strict)
