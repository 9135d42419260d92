"""An S3 server (moto's) in a process of its own, which fails or is slow on demand."""

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from tests.helpers.forks import Child, start

BUCKET = 'bucket'
ENVIRONMENT = {
    'AWS_ACCESS_KEY_ID': 'test',
    'AWS_SECRET_ACCESS_KEY': 'test',
    'AWS_DEFAULT_REGION': 'us-east-1',
    'AWS_MAX_ATTEMPTS': '1',  # the libraries' own tries take seconds
    'AWS_CONFIG_FILE': '/dev/null',
    'AWS_SHARED_CREDENTIALS_FILE': '/dev/null',
    'AWS_EC2_METADATA_DISABLED': 'true',
}


class S3:
    "A running server, and a client that starts no thread."

    def __init__(self, folder: Path, child: Child, url: str) -> None:
        import boto3

        self.folder = folder
        self.child = child
        self.client = boto3.client('s3', endpoint_url=url)
        self.client.create_bucket(Bucket=BUCKET)

    def names(self, run: str) -> list[str]:
        "Return the names of a run's objects."
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f'{run}/').get('Contents', [])
        return sorted(entry['Key'].removeprefix(f'{run}/') for entry in listed)

    def set_mode(self, status: int = 200, wait_s: float = 0.0) -> None:
        "Let the server answer with a status, after a wait, until the next call."
        temporary = self.folder / 'mode.new'
        temporary.write_text(f'{status} {wait_s}')
        os.replace(temporary, self.folder / 'mode')

    def stop(self) -> None:
        self.child.send(signal.SIGKILL)
        self.child.wait()


@contextmanager
def started_s3() -> Iterator[S3]:
    "Start a server, and let the libraries of this process and its children use it."
    with TemporaryDirectory() as name, mock.patch.dict(os.environ, ENVIRONMENT):
        folder = Path(name)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            import s3fs  # noqa: F401  # here, and not in each child
            from moto.moto_server import werkzeug_app  # noqa: F401

        with start(partial(_serve, folder)) as child:
            port = folder / 'port'
            child.wait(60, port.exists)
            if not port.exists():
                raise child.error('has started no server')
            url = f'http://127.0.0.1:{port.read_text()}'
            with mock.patch.dict(os.environ, AWS_ENDPOINT_URL=url):
                yield S3(folder, child, url)


def _serve(folder: Path) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    warnings.simplefilter('ignore')
    sys.stderr = open(os.devnull, 'w')  # noqa: SIM115  # a line for each request
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server('127.0.0.1', 0, partial(_answer, folder / 'mode', app), threaded=True)
    (folder / 'port.new').write_text(str(server.server_address[1]))
    os.replace(folder / 'port.new', folder / 'port')
    server.serve_forever()


def _answer(mode: Path, app: Callable[..., Any], environ: Any, start_response: Any) -> Any:
    status, wait_s = mode.read_text().split() if mode.exists() else ('200', '0')
    time.sleep(float(wait_s))
    if status == '200':
        return app(environ, start_response)
    environ['wsgi.input'].read(int(environ.get('CONTENT_LENGTH') or 0))
    start_response(f'{status} Planned', [('Content-Type', 'text/plain')])
    return [b'planned']
