"""The code of each how-to page runs from top to bottom."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(set((ROOT / 'docs/howto').glob('*.md')) - {ROOT / 'docs/howto/index.md'})
SHELL = {'command_line'}  # pages of commands, whose lines their own tests run
NEEDED = {
    'optuna': 'optuna',
    'hugging_face': 'transformers',
    'logging': 'wandb',
    'lora': 'peft',
    'export': 'onnxruntime',
    'private_training': 'opacus',
}


def python_blocks(path: Path) -> list[str]:
    return re.findall(r'^```python\n(.*?)^```', path.read_text('utf-8'), flags=re.M | re.S)


def test_there_are_pages() -> None:
    assert len(PAGES) >= 24
    assert all(python_blocks(path) for path in PAGES if path.stem not in SHELL)


@pytest.mark.notebook
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.filterwarnings('ignore:.is_gradient_checkpointing:FutureWarning')  # peft calls it
@pytest.mark.filterwarnings('ignore:Secure RNG')  # of opacus
@pytest.mark.filterwarnings('ignore:Full backward hook')  # of the hooks of opacus
@pytest.mark.filterwarnings('ignore:The train loader .DataLoader. returned')  # of its wrong length
@pytest.mark.parametrize('path', PAGES, ids=lambda path: path.stem)
def test_the_code_of_a_page_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip('sklearn')
    if path.stem in NEEDED:
        pytest.importorskip(NEEDED[path.stem])
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {'__name__': '__main__'}
    for code in python_blocks(path):
        exec(compile(code, str(path), 'exec'), names)
