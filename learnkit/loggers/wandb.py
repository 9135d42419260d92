"""Logs for Weights & Biases, by its own client."""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path
from typing import Any

from learnkit.core.errors import OptionError
from learnkit.core.files import check_writable
from learnkit.core.time import Time
from learnkit.loggers.base import Logger, Rows, need, open_loggers

__all__ = ['WandbLogger']

_STEP_FILE = 'last_step'  # beside a run's records: how far they go


class WandbLogger(Logger):
    """Log to a run of Weights & Biases, by default offline: into `<folder>/wandb`, from where `wandb sync` uploads it.

    All fits of a Learner, and a process that resumes it, log to one run (with the same id). W&B takes each step once:
    resumed from an earlier checkpoint, the steps that the run has already are kept, and not logged again. The run ends
    with `close`, as failed where the last fit has failed. Raises `MissingExtraError` without wandb.

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
        project: str = 'learnkit',
        mode: str = 'offline',  # 'online' logs to the server
        folder: str | Path = '.',  # below `learn.path`, or an absolute path: where `wandb/` is
        id: str | None = None,  # of a run to go on with; None: a new one
        every: str | Time = '10ba',  # as for `Logger`
        **options: Any,  # more for `wandb.init`: `name`, `tags`, `group`, `entity`, ...
    ) -> None:
        need('wandb', 'wandb', 'WandbLogger')
        super().__init__(every)
        if mode not in ('offline', 'online', 'disabled', 'shared'):
            raise OptionError(f"mode={mode!r}: choose 'offline', 'online', 'shared' or 'disabled'.")
        self.project, self.mode, self.folder, self.options = project, mode, folder, options
        self._id, self._there = id, -1  # the run, and the last step that it has already

    def where(self) -> Path:
        "Return the folder of all runs."
        return Path(os.path.realpath(self.learn.path / self.folder)) / 'wandb'

    def check(self) -> None:
        try:
            check_writable(self.where() / 'run')
        except OSError as e:
            raise OptionError(f'{self.where()} cannot be written: {e}.') from None

    def open(self, keep: int | None) -> tuple[Any, int]:
        import wandb

        folder = self.where().parent
        folder.mkdir(parents=True, exist_ok=True)
        # a run has one writer at a time; another Learner's opens it again if need be
        for cb in list(open_loggers):
            if isinstance(cb, WandbLogger) and self._id and cb._id == self._id:
                cb.close()
        # it would catch what the bars print
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
        self._there = max([run.starting_step - 1, *_steps_written(folder, run.id)])
        self._id = run.id
        return run, self._there

    def write(self, rows: Rows) -> None:
        super().write(rows)
        folder = Path(self._handle.dir).parent
        if folder.is_dir():
            (folder / _STEP_FILE).write_text(str(rows[-1][0]))

    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        if step > self._there:
            self._handle.log(values, step=step)

    def log_params(self, params: dict[str, Any]) -> None:
        self._handle.config.update(params, allow_val_change=True)

    def log_images(self, step: int, name: str, images: Any) -> None:
        import wandb

        pixels = images[..., 0] if images.shape[-1] == 1 else images
        if step > self._there:
            self._handle.log({name: [wandb.Image(image) for image in pixels]}, step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        import wandb

        if step > self._there:
            self._handle.log({name: wandb.Html(f'<pre>{escape(text)}</pre>')}, step=step)

    def shut(self, handle: Any) -> None:
        handle.finish(exit_code=int(self._failed))

    def saved(self) -> dict[str, Any]:
        return {'id': self._id}

    def restore(self, sd: dict[str, Any]) -> None:
        self._id = sd['id']


def _steps_written(folder: Path, run_id: str) -> list[int]:
    "Return how far each part of a run in this folder goes: every process writes one of its own."
    # numbered where two began in one second
    name = re.compile(rf'.*run-.*-{re.escape(run_id)}(-\d+)?')
    files = [p for p in folder.glob(f'wandb/*/{_STEP_FILE}') if name.fullmatch(p.parent.name)]
    return [int(text) for p in files if (text := p.read_text()).isdigit()]
