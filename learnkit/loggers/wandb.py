# SPDX-License-Identifier: Apache-2.0
"""Log to Weights & Biases with its client."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from typing_extensions import override

from learnkit.core.files import as_local_path
from learnkit.core.optional import check_libraries
from learnkit.core.time import Time
from learnkit.loggers.base import Logger, Rows, open_loggers


class WandbLogger(Logger):
    """Log to a run of Weights & Biases, by default offline: to `<folder>/wandb`, for `wandb sync`.

    `mode='online'` logs to the server. The default of `mode` is the environment variable
    `WANDB_MODE`, otherwise 'offline'.

    All fits of a Learner, and a process that resumes it, log to one run (with the same id). W&B
    accepts each step once: after a resume from an earlier checkpoint, steps that the run already
    has are kept and not logged again. W&B writes an offline run every few seconds: a process that is
    killed loses the steps since then. `close` ends the run, with the status failed if the last fit
    failed. Raises `MissingExtraError` without wandb.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=WandbLogger(mode='disabled'))
    ...     with learn.no_bar(), learn: learn.fit(1)
    ...     len(learn.history)
    1
    """

    def __init__(
        self,
        project: str = 'learnkit',  # name of the project
        mode: str | None = None,  # 'offline', 'online', 'shared', 'disabled'; None: see above
        folder: str | Path = '.',  # parent of `wandb/`, relative to `learn.path` or absolute
        id: str | None = None,  # id of a run to continue; None: a new run
        every: str | Time = '10ba',  # interval of losses and hyperparameters, as in `Logger`
        **options: Any,  # additional options of `wandb.init`: `name`, `tags`, `group`, `entity`, ...
    ) -> None:
        check_libraries('WandbLogger', 'wandb')
        super().__init__(every)
        self.project = project
        self.mode = mode or os.environ.get('WANDB_MODE') or 'offline'
        self.logs_to_service = self.mode != 'offline'
        self.folder = as_local_path(folder)
        self.options = options
        self._id = id  # id of the run

    @override
    def where(self) -> Path:
        "Return the folder of all runs."
        return Path(os.path.realpath(self.learn.path / self.folder)) / 'wandb'

    @override
    def open(self, keep: int | None) -> tuple[Any, int]:
        import wandb

        folder = self.where().parent
        folder.mkdir(parents=True, exist_ok=True)
        # a run has one writer at a time; the logger of another Learner reopens it when needed
        for cb in list(open_loggers):
            if isinstance(cb, WandbLogger) and self._id and cb._id == self._id:
                cb.close()
        # off, because console capture would record the progress bars
        quiet = wandb.Settings(console='off', silent=self.mode != 'online')
        given = {'settings': quiet, 'reinit': 'create_new', **self.options}
        mode: Any = self.mode
        run = wandb.init(
            project=self.project,
            mode=mode,
            dir=str(folder),
            id=self._id,
            resume='allow' if self._id else None,
            **given,
        )
        self._id = run.id
        file = self._step_file
        return run, max(run.starting_step - 1, int(file.read_text()) if file.exists() else -1)

    @property
    def _step_file(self) -> Path:
        "File with the last step of the run, which W&B does not know offline."
        return self.where() / f'{self._id}.last_step'

    @override
    def write(self, rows: Rows) -> None:
        super().write(rows)
        self.where().mkdir(exist_ok=True)
        self._step_file.write_text(str(rows[-1][0]))

    @override
    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        self._handle.log(values, step=step)

    @override
    def log_params(self, params: dict[str, Any]) -> None:
        self._handle.config.update(params, allow_val_change=True)

    @override
    def log_images(self, step: int, name: str, images: Any) -> None:
        import wandb

        pixels = images[..., 0] if images.shape[-1] == 1 else images
        self._handle.log({name: [wandb.Image(image) for image in pixels]}, step=step)

    @override
    def log_text(self, step: int, name: str, text: str) -> None:
        import wandb

        self._handle.log({name: wandb.Html(f'<pre>{escape(text)}</pre>')}, step=step)

    @override
    def shut(self, handle: Any) -> None:
        handle.finish(exit_code=int(self._has_failed))
