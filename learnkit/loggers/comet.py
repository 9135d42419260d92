"""Log to Comet with its client."""

from __future__ import annotations

import json
import os
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from learnkit.core.optional import check_libraries, import_library
from learnkit.core.time import Time
from learnkit.loggers.base import RunLogger
from learnkit.loggers.values import encode_png

__all__ = ['CometLogger']

# options that are off: the client would record the logged values again, the terminal, the code and the machine
_QUIET = (
    'auto_metric_logging',
    'auto_output_logging',
    'auto_param_logging',
    'log_code',
    'log_env_details',
    'log_git_metadata',
    'log_git_patch',
    'log_graph',
    'parse_args',
)
_MESSAGES = 'messages.json'  # file in an offline archive, with one message per line


class CometLogger(RunLogger):
    """Log to an experiment of Comet, by default offline: to files in `folder`, for `comet upload`.

    All fits of a Learner, and a process that resumes it, log to one experiment (with the same key).
    Offline, `close` writes `<key>.zip`, and a resumed process writes a further file. If the process
    is killed, values since the last `close` are lost. After a resume from an earlier checkpoint,
    steps in these files are not logged again. With `online=True`, Comet keeps both values of such a
    step. The client records nothing about the code and the machine, unless `options` enable it.
    Raises `MissingExtraError` without comet_ml.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=CometLogger(name='first'))
    ...     with learn.no_bar(), learn: learn.fit(1)
    ...     len(list(Path(folder).glob('comet/*.zip')))
    1
    """

    def __init__(
        self,
        project: str = 'learnkit',  # name of the project
        online: bool = False,  # whether to log to the server
        folder: str | Path = 'comet',  # for offline files, relative to `learn.path` or absolute
        every: str | Time = '10ba',  # interval of losses and hyperparameters, as in `Logger`
        **options: Any,  # options of `comet_ml.ExperimentConfig`: `name`, `tags`, `log_code`, ...
    ) -> None:
        check_libraries('CometLogger', 'comet_ml')
        super().__init__(every)
        self.project = project
        self.online = online
        self.folder = folder
        self.options = options
        self._last_step = -1  # last step in the offline files

    def where(self) -> Path:
        "Return the folder of offline files."
        return Path(os.path.realpath(self.learn.path / self.folder))

    def open(self, keep: int | None) -> tuple[Any, int]:
        comet = import_library('comet_ml', 'CometLogger')
        folder = self.where()
        folder.mkdir(parents=True, exist_ok=True)
        quiet = {'offline_directory': str(folder), **dict.fromkeys(_QUIET, False)}
        if self._id:
            self._last_step = _find_last_step(folder, self._id)
        config = comet.ExperimentConfig(**{'display_summary_level': 0, **quiet, **self.options})
        experiment = comet.start(
            project_name=self.project,
            online=self.online,
            experiment_key=self._id,
            mode='get_or_create' if self._id else 'create',
            experiment_config=config,
        )
        self._id = str(experiment.get_key())
        return experiment, self._last_step

    def log_metrics(self, step: int, values: dict[str, float]) -> None:
        if step > self._last_step:
            self._handle.log_metrics(values, step=step)

    def log_params(self, params: dict[str, Any]) -> None:
        self._handle.log_parameters(params)

    def log_images(self, step: int, name: str, images: Any) -> None:
        if step <= self._last_step:
            return
        for i, image in enumerate(images):
            tag = f'{name}/{i}' if len(images) > 1 else name
            self._handle.log_image(BytesIO(encode_png(image)), tag, step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        if step > self._last_step:
            self._handle.log_text(text, step=step, metadata={'name': name})

    def flush(self) -> None:
        self._handle.flush()

    def shut(self, handle: Any) -> None:
        handle.end()


def _find_last_step(folder: Path, key: str) -> int:
    "Return the last step of a metric in the offline files of an experiment, or -1 if there is no metric."
    steps = [-1]
    for path in folder.glob(f'{key}*.zip'):
        with ZipFile(path) as parts:
            # a process that is killed leaves an empty archive
            content = parts.read(_MESSAGES) if _MESSAGES in parts.namelist() else b''
        payloads = [json.loads(line)['payload'] for line in content.splitlines()]
        steps += [p['metric']['step'] or -1 for p in payloads if 'metric' in p]
    return max(steps)
