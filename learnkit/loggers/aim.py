"""Log to Aim with its client."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from learnkit.core.optional import check_libraries, import_library
from learnkit.core.time import Time
from learnkit.loggers.base import RunLogger

__all__ = ['AimLogger']


class AimLogger(RunLogger):
    """Log to a run of Aim, in the repository `.aim` of a folder: `aim up` in the folder shows it.

    All fits of a Learner, and a process that resumes it, log to one run. After a resume from an
    earlier checkpoint, a value replaces the earlier value of its step. The configuration is the dict
    `params`. The client records nothing about the machine, unless `options` enable it. Raises
    `MissingExtraError` without aim.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=AimLogger(experiment='first'))
    ...     with learn.no_bar(), learn: learn.fit(1)
    ...     os.listdir(folder)
    ['.aim']
    """

    def __init__(
        self,
        folder: str | Path = '.',  # parent of `.aim/`, relative to `learn.path` or absolute
        experiment: str = 'learnkit',  # name of the experiment
        every: str | Time = '10ba',  # interval of losses and hyperparameters, as in `Logger`
        **options: Any,  # additional options of `aim.Run`: `log_system_params`, ...
    ) -> None:
        check_libraries('AimLogger', 'aim')
        super().__init__(every)
        self.folder = folder
        self.experiment = experiment
        self.options = options

    def where(self) -> Path:
        "Return the folder of the repository."
        return Path(os.path.realpath(self.learn.path / self.folder)) / '.aim'

    def open(self, keep: int | None) -> tuple[Any, int]:
        aim = import_library('aim', 'AimLogger')
        folder = self.where().parent
        folder.mkdir(parents=True, exist_ok=True)
        # by default, the client records measurements of the machine and the output of the terminal
        quiet = {'system_tracking_interval': None, 'capture_terminal_logs': False}
        repo = aim.Repo.from_path(str(folder), init=True)
        run = aim.Run(self._id, repo=repo, experiment=self.experiment, **{**quiet, **self.options})
        self._id = run.hash
        return run, -1

    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        self._handle.track(values, step=step)

    def log_params(self, params: dict[str, Any]) -> None:
        self._handle['params'] = params

    def log_images(self, step: int, name: str, images: Any) -> None:
        image_class = import_library('aim', 'AimLogger').Image
        pixels = images[..., 0] if images.shape[-1] == 1 else images
        self._handle.track([image_class(image) for image in pixels], name=name, step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        text_class = import_library('aim', 'AimLogger').Text
        self._handle.track(text_class(text), name=name, step=step)

    def shut(self, handle: Any) -> None:
        handle.close()
