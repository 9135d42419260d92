"""Files of torch: either format is read, other files and code are refused."""

from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from learnkit.checkpoint.torch_file import read_torch_file
from learnkit.core.errors import WeightsError
from learnkit.learner import load_learner


@pytest.mark.parametrize('is_zip', [True, False])
def test_either_format_of_torch(is_zip: bool, tmp_path: Path) -> None:
    for value in ({'a': torch.arange(3)}, torch.nn.Linear(1, 1)):
        torch.save(value, tmp_path / 'a.pth', _use_new_zipfile_serialization=is_zip)
        if isinstance(value, dict):
            assert read_torch_file(tmp_path / 'a.pth')['a'].tolist() == [0, 1, 2]
    with pytest.raises(WeightsError, match='Nothing was loaded'):
        read_torch_file(tmp_path / 'a.pth')


def test_other_files(tmp_path: Path) -> None:
    text, archive = tmp_path / 'notes.pth', tmp_path / 'other.zip'
    text.write_text('Python 3')
    with ZipFile(archive, 'w') as z:
        z.writestr('readme.txt', 'hello')
    for path in (text, archive):
        with pytest.raises(WeightsError, match='cannot be read as weights'):
            load_learner(path)
