"""The Hugging Face Hub: folders, model cards, and uploads by the real client to a local server."""

from __future__ import annotations

import json
import pickle
from base64 import b64decode
from collections.abc import Iterator
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from fastcore.basics import noop
from torch import nn

from learnkit import DataLoaders, Learner, WeightsError, load_learner, mae
from learnkit.interop import from_hub, push_to_hub, save_for_hub

hub = pytest.importorskip('huggingface_hub')
from huggingface_hub import constants  # noqa: E402  # only where it is installed


def build(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def make(path: Path) -> Learner:
    x = torch.randn(16, 2)
    dls = DataLoaders.from_tensors((x, x[:, :1]), (x, x[:, :1]), bs=4)
    learn = Learner(dls, build(3), nn.MSELoss(), lr=0.01, metrics=mae, path=path)
    learn.logger = noop
    return learn


class Repositories(BaseHTTPRequestHandler):
    "The part of the Hub's HTTP interface that uploads and downloads use, with Git LFS for weights."

    files: dict[str, dict[str, bytes]]  # of each repository, by path
    lfs: dict[str, bytes]  # by SHA-256
    seen: list[str]

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, content: Any = None, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {'Content-Length': str(len(body)), **headers}.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body)

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers.get('Content-Length', 0)))

    def url(self) -> str:
        return f'http://127.0.0.1:{self.server.server_port}'  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        body, path = self.read(), self.path.partition('?')[0]
        self.seen.append(path)
        if path == '/api/repos/create':
            asked = json.loads(body)
            name = f'{asked.get("organization") or "me"}/{asked["name"]}'
            status = 409 if name in self.files else 200
            self.files.setdefault(name, {})
            self.answer({'url': f'{self.url()}/{name}'}, status)
        elif path == '/api/validate-yaml':
            assert 'library_name: learnkit' in json.loads(body)['content']
            self.answer({})
        elif '/preupload/' in path:
            modes = [
                {
                    'path': f['path'],
                    'uploadMode': 'lfs' if f['path'].endswith('.pth') else 'regular',
                    'shouldIgnore': False,
                }
                for f in json.loads(body)['files']
            ]
            self.answer({'files': modes})
        elif path.endswith('/info/lfs/objects/batch'):
            objects = [
                {**o, 'actions': {'upload': {'href': f'{self.url()}/lfs/{o["oid"]}'}}}
                for o in json.loads(body)['objects']
            ]
            answer = {'transfer': 'basic', 'objects': objects}
            self.answer(answer, Content_Type='application/vnd.git-lfs+json')
        elif '/commit/' in path:
            name = path.removeprefix('/api/models/').partition('/commit/')[0]
            for line in map(json.loads, body.splitlines()):
                value = line['value']
                if line['key'] == 'file':
                    self.files[name][value['path']] = b64decode(value['content'])
                elif line['key'] == 'lfsFile':
                    self.files[name][value['path']] = self.lfs[value['oid']]
            commit = sha1(body).hexdigest()
            url = f'{self.url()}/{name}/commit/{commit}'
            self.answer({'success': True, 'commitOid': commit, 'commitUrl': url})
        else:
            self.answer({}, 404)

    def do_PUT(self) -> None:
        body = self.read()
        assert self.path == f'/lfs/{sha256(body).hexdigest()}'
        self.lfs[sha256(body).hexdigest()] = body
        self.answer(b'')

    def do_GET(self) -> None:
        self.seen.append(self.path)
        name, _, rest = self.path.lstrip('/').partition('/resolve/')
        content = self.files.get(name, {}).get(rest.partition('/')[2])
        if content is None:
            return self.answer({}, 404, X_Error_Code='EntryNotFound')
        digest = sha256(content).hexdigest()
        commit = sha1(digest.encode()).hexdigest()
        self.answer(content, ETag=f'"{digest}"', X_Repo_Commit=commit)

    do_HEAD = do_GET


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Repositories]]:
    "Start an empty server, and set it as the address of huggingface_hub."
    state = {'files': {}, 'lfs': {}, 'seen': []}
    handler = type('Handler', (Repositories,), state)
    with ThreadingHTTPServer(('127.0.0.1', 0), handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={'poll_interval': 0.02})
        thread.start()
        url = f'http://127.0.0.1:{http.server_port}'
        monkeypatch.setattr(constants, 'ENDPOINT', url)
        template = f'{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}'
        monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', template)
        monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'cache'))
        monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
        hub.utils.disable_progress_bars()
        try:
            yield handler
        finally:
            hub.utils.enable_progress_bars()
            http.shutdown()
            thread.join()


def test_a_folder_has_the_learner_and_a_card_of_the_run(tmp_path: Path) -> None:
    learn = make(tmp_path)
    learn.fit(2)
    folder = save_for_hub(learn, 'files', {'hidden': 3}, repo_id='me/small|net')
    again = load_learner(folder / 'learner.pth', model=build, loss_func=nn.MSELoss())
    assert all(map(torch.equal, again.model.parameters(), learn.model.parameters()))
    card = hub.ModelCard.load(folder / 'README.md')
    assert card.data.library_name == 'learnkit' and card.data.metrics == ['mae']
    lines = card.text.splitlines()
    row = learn.history[-1]
    for name in ('train_loss', 'valid_loss', 'mae'):
        assert f'| {name} | {row[name]:.6g} |' in lines
    assert '| batch_size | 4 |' in lines and '| lr at the end | 0.01 |' in lines
    assert "learn = from_hub('me/small|net', model=Sequential)" in lines
    assert 'called with `hidden=3`' in card.text
    assert 'Epochs: 2, steps: 8, samples: 32.' in card.text


@pytest.mark.filterwarnings('ignore:Use .content:DeprecationWarning')  # of huggingface_hub's own
def test_a_learner_is_pushed_and_loaded(tmp_path: Path, server: type[Repositories]) -> None:
    learn = make(tmp_path)
    learn.fit(1)
    url = push_to_hub(learn, 'me/net', {'hidden': 3}, private=True, token='hf_test')
    assert '/me/net/commit/' in url
    assert set(server.files['me/net']) >= {'README.md', 'learner.pth'}
    assert b'library_name: learnkit' in server.files['me/net']['README.md']
    again = from_hub('me/net', model=build, loss_func=nn.MSELoss(), token='hf_test')
    assert all(map(torch.equal, again.model.parameters(), learn.model.parameters()))
    assert again.path == Path('.')
    x = torch.randn(4, 2)
    assert torch.equal(again.model(x), learn.model(x))
    learn.fit(1)
    push_to_hub(learn, 'me/net', {'hidden': 3}, token='hf_test')
    newer = from_hub('me/net', model=build, loss_func=nn.MSELoss(), token='hf_test')
    assert all(map(torch.equal, newer.model.parameters(), learn.model.parameters()))
    assert server.seen.count('/api/repos/create') == 2


class Harm:
    ran = False

    def __reduce__(self) -> Any:
        return harm, ()


def harm() -> None:
    Harm.ran = True


def test_code_in_a_repository_is_not_executed(tmp_path: Path, server: type[Repositories]) -> None:
    file = tmp_path / 'learner.pth'
    torch.save({'model': Harm()}, file)
    server.files['bad/zip'] = {'learner.pth': file.read_bytes()}
    server.files['bad/pickle'] = {'learner.pth': pickle.dumps(Harm())}
    for repo in server.files:
        with pytest.raises(WeightsError):
            from_hub(repo, model=build, token=False)
    assert not Harm.ran
    with pytest.raises(hub.errors.EntryNotFoundError):
        from_hub('bad/none', model=build, token=False)
