# SPDX-License-Identifier: Apache-2.0
"""Log to MLflow with its client."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from time import time
from typing import Any

from typing_extensions import override

from learnkit.core.optional import check_libraries
from learnkit.core.time import Time
from learnkit.loggers.base import Logger, Rows
from learnkit.loggers.values import encode_png

_BATCH_SIZE = 1000  # maximum number of metrics that a server accepts in one call
_PARAM_LENGTH = 6000  # maximum number of characters of a parameter


class MlflowLogger(Logger):
    """Log to a run of MLflow, by default to a folder: `mlflow ui --backend-store-uri mlruns` shows it.

    All fits of a Learner, and a process that resumes it, log to one run. MLflow cannot delete
    logged values: after a resume from an earlier checkpoint, values that the run already has are
    kept and not logged again. Of a parameter that a later fit changes, the first value is kept. A
    `/` in a name is written as `.`, because folders of MLflow hold names as paths. `close` ends the
    run, with the status FAILED if the last fit failed. MLflow requires consent to log to folders;
    this logger gives it. A database (`tracking_uri='sqlite:///mlflow.db'`) or a server has more
    features. Raises `MissingExtraError` without mlflow.

    >>> import tempfile
    >>> from learnkit.testing import synth_learner
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     learn = synth_learner(path=folder, cbs=MlflowLogger('runs', run_name='first'))
    ...     with learn.no_bar(), learn: learn.fit(1)
    ...     len(list(Path(folder).glob('runs/*/*/metrics/valid_loss')))
    1
    """

    def __init__(
        self,
        tracking_uri: str | Path = 'mlruns',  # folder below `learn.path`, or a URI ('http://...')
        experiment: str = 'learnkit',  # name of the experiment
        run_name: str | None = None,  # name of the run; None: chosen by MLflow
        every: str | Time = '10ba',  # interval of losses and hyperparameters, as in `Logger`
    ) -> None:
        check_libraries('MlflowLogger', 'mlflow')
        super().__init__(every)
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self.run_name = run_name

    @override
    def where(self) -> Any:
        "Return the folder, or the address of a database or server."
        uri = str(self.tracking_uri)
        if re.match(r'[a-z][a-z0-9+.-]+:', uri):
            return uri
        return Path(os.path.realpath(self.learn.path / uri))

    @override
    def open(self, keep: int | None) -> tuple[Any, int]:
        from mlflow import MlflowClient

        uri = self.where()
        os.environ.setdefault('MLFLOW_ALLOW_FILE_STORE', 'true')
        client = MlflowClient(tracking_uri=uri.as_uri() if isinstance(uri, Path) else uri)
        if self._id:
            client.update_run(self._id, status='RUNNING')
        else:
            self._id = self._new_run(client)
        return client, -1 if keep is None else self._find_last_step(client)

    def _new_run(self, client: Any) -> str:
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        return str(client.create_run(experiment, run_name=self.run_name).info.run_id)

    def _find_last_step(self, client: Any) -> int:
        names = client.get_run(self._id).data.metrics
        points = [m for name in names for m in client.get_metric_history(self._id, name)]
        return max((m.step for m in points), default=-1)

    @override
    def write(self, rows: Rows) -> None:
        from mlflow.entities import Metric

        now = int(time() * 1000)
        metrics = [
            Metric(clean(name), float(value), now, step)
            for step, values in rows
            for name, value in values.items()
        ]
        for i in range(0, len(metrics), _BATCH_SIZE):
            self._handle.log_batch(self._id, metrics[i : i + _BATCH_SIZE])

    @override
    def log_params(self, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        logged = self._handle.get_run(self._id).data.params
        values = {clean(name): str(value)[:_PARAM_LENGTH] for name, value in params.items()}
        new = [Param(name, value) for name, value in values.items() if name not in logged]
        for i in range(0, len(new), 100):
            self._handle.log_batch(self._id, params=new[i : i + 100])

    @override
    def log_images(self, step: int, name: str, images: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for i, image in enumerate(images):
                path = Path(folder, f'{clean(name)}-{step}-{i}.png')
                path.write_bytes(encode_png(image))
                self._handle.log_artifact(self._id, str(path), 'images')

    @override
    def log_text(self, step: int, name: str, text: str) -> None:
        self._handle.log_text(self._id, text, f'texts/{clean(name)}-{step}.txt')

    @override
    def shut(self, handle: Any) -> None:
        handle.set_terminated(self._id, 'FAILED' if self._has_failed else 'FINISHED')


def clean(name: str) -> str:
    """Replace the characters of a name that MLflow does not accept, and slashes.

    >>> clean('loss (a=1)/x')
    'loss _a_1_.x'
    """
    return re.sub(r'[^\w. -]', '_', name.replace('/', '.'), flags=re.ASCII)
