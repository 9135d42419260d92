"""The Hugging Face Hub: folders, model cards, uploads and downloads."""

import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from learnkit import DataLoaders, Learner, WeightsError, load_learner, mae
from learnkit.interop import from_hub, push_to_hub, save_for_hub
from tests.helpers.learners import quiet_learner

hub = pytest.importorskip('huggingface_hub')


def build(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def make(path: Path) -> Learner:
    x = torch.randn(16, 2)
    dls = DataLoaders.from_tensors((x, x[:, :1]), (x, x[:, :1]), bs=4)
    return quiet_learner(dls, build(3), nn.MSELoss(), lr=0.01, metrics=mae, path=path)


@pytest.fixture
def repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    "Replace uploads and downloads of huggingface_hub; return the folders of the repositories by name."
    folders: dict[str, Path] = {}

    def upload(api: Any, repo_id: str, folder_path: str, commit_message: str) -> Any:
        assert api.token == 'hf_test' and commit_message
        shutil.copytree(folder_path, folders[repo_id], dirs_exist_ok=True)
        return SimpleNamespace(commit_url=f'https://hub/{repo_id}/commit/1')

    def create(api: Any, repo_id: str, private: bool | None, exist_ok: bool) -> Any:
        assert exist_ok
        folders.setdefault(repo_id, tmp_path / 'hub')
        return SimpleNamespace(repo_id=repo_id)

    def download(repo_id: str, filename: str, **options: Any) -> str:
        return str(folders[repo_id] / filename)

    monkeypatch.setattr(hub.HfApi, 'create_repo', create)
    monkeypatch.setattr(hub.HfApi, 'upload_folder', upload)
    monkeypatch.setattr(hub, 'hf_hub_download', download)
    return folders


def test_a_folder_has_the_learner_and_a_card_of_the_run(tmp_path: Path) -> None:
    learn = make(tmp_path)
    learn.fit(2)
    folder = save_for_hub(learn, 'files', {'hidden': 3}, repo_id='me/small')
    again = load_learner(folder / 'learner.pth', model=build, loss_func=nn.MSELoss())
    assert all(map(torch.equal, again.model.parameters(), learn.model.parameters()))
    card = hub.ModelCard.load(folder / 'README.md')
    assert card.data.library_name == 'learnkit' and card.data.metrics == ['mae']
    lines = card.text.splitlines()
    row = learn.history[-1]
    for name in ('train_loss', 'valid_loss', 'mae'):
        assert f'| {name} | `{row[name]:.6g}` |' in lines
    assert '| batch_size | `4` |' in lines and '| lr | `0.01` |' in lines
    assert "learn = from_hub('me/small', model=Sequential)" in lines
    assert 'called with `hidden=3`' in card.text
    assert 'Epochs: 2, steps: 8, samples: 32.' in card.text


def test_a_learner_is_pushed_and_loaded(tmp_path: Path, repositories: dict[str, Path]) -> None:
    learn = make(tmp_path)
    for _ in range(2):  # the second time the files are replaced
        learn.fit(1)
        url = push_to_hub(learn, 'me/net', {'hidden': 3}, private=True, token='hf_test')
        assert '/me/net/commit/' in url
    card = (repositories['me/net'] / 'README.md').read_text('utf-8')
    assert 'library_name: learnkit' in card
    again = from_hub('me/net', model=build, loss_func=nn.MSELoss(), token='hf_test')
    assert all(map(torch.equal, again.model.parameters(), learn.model.parameters()))
    assert again.path == Path('.')


class Harm:
    ran = False

    def __reduce__(self) -> Any:
        return harm, ()


def harm() -> None:
    Harm.ran = True


def test_code_in_a_repository_is_not_executed(
    tmp_path: Path, repositories: dict[str, Path]
) -> None:
    repositories['bad/zip'] = repositories['bad/pickle'] = tmp_path
    torch.save({'model': Harm()}, tmp_path / 'learner.pth')
    with pytest.raises(WeightsError):
        from_hub('bad/zip', model=build)
    (tmp_path / 'learner.pth').write_bytes(pickle.dumps(Harm()))
    with pytest.raises(WeightsError):
        from_hub('bad/pickle', model=build)
    assert not Harm.ran
