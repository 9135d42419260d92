"""Save and load weights: restored values, refused files, and no changes after a refusal."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastcore.basics import noop
from fastcore.foundation import L

from learnkit import Learner
from learnkit.core.errors import OptimizerError, OptionError, WeightsError
from tests.helpers.comparing import same
from tests.helpers.saving import digest, learner, net

# -------------------------------------------------------------------------------------- round trips


def test_saved_and_loaded_training_continues_bit_for_bit(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    learn.fit(2)
    assert learn.save('a') == tmp_path / 'models' / 'a.pth'
    other = learner(tmp_path).load('a')
    for it in (learn, other):
        it.fit(2)
    assert same(digest(learn), digest(other))


def test_the_layout_matches_torch_and_fastai(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    assert set(torch.load(learn.save('bare'), weights_only=True)) == set(learn.model.state_dict())
    learn.fit(1)
    assert set(torch.load(learn.save('both'), weights_only=True)) == {'model', 'opt'}
    expected = set(learn.model.state_dict())
    assert set(torch.load(learn.save('less', with_opt=False), weights_only=True)) == expected
    assert learn.save('a').read_bytes() == learn.save('a').read_bytes()


def test_the_old_format_of_torch_loads(tmp_path: Path) -> None:
    model = net()
    torch.save(model.state_dict(), tmp_path / 'old.pth', _use_new_zipfile_serialization=False)
    assert same(learner(tmp_path).load(tmp_path / 'old').model.state_dict(), model.state_dict())


def test_a_compiled_model_and_a_bare_one_read_each_others_files(tmp_path: Path) -> None:
    model = net()
    compiled: Any = torch.compile(model, backend='eager')
    learn = learner(tmp_path, compiled)
    assert set(torch.load(learn.save('c'), weights_only=True)) == set(model.state_dict())
    torch.save(compiled.state_dict(), tmp_path / 'prefixed.pth')
    for file in ('c', tmp_path / 'prefixed'):
        assert same(learner(tmp_path).load(file).model.state_dict(), model.state_dict())
    assert learn.load('c') is learn


# -------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ('file', 'where'),
    [
        ('a', 'models/a.pth'),
        ('sub/a', 'models/sub/a.pth'),
        (Path('a'), 'models/a.pth'),
        ('v1.5', 'models/v1.5.pth'),
        ('a.pth', 'models/a.pth'),
        ('../a', 'a.pth'),
    ],
)
def test_where_a_name_leads(tmp_path: Path, file: str | Path, where: str) -> None:
    learn = learner(tmp_path)
    assert learn.save(file).resolve() == tmp_path / where
    assert (tmp_path / where).is_file()
    learn.load(file)


@pytest.mark.parametrize('file', ['', '  ', '.', '..', 'a/', 'a\0b', None, 3])
def test_a_name_that_cannot_be_a_file_writes_nothing(tmp_path: Path, file: Any) -> None:
    with pytest.raises(OptionError, match='cannot be a file'):
        learner(tmp_path).save(file)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_writes_nothing(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    with pytest.raises(OptimizerError, match='no optimizer yet'):
        learn.save('a', with_opt=True)
    learn.create_opt()
    learn.opt.param_groups[0]['lr'] = noop
    with pytest.raises(OptionError, match=r"state\['param_groups'\]\[0\]\['lr'\] is a function"):
        learn.save('a')
    (tmp_path / 'models' / 'a.pth').mkdir(parents=True)
    with pytest.raises(OptionError, match='is a folder'):
        learn.save('a')
    assert [p.name for p in tmp_path.rglob('*')] == ['models', 'a.pth']


# ------------------------------------------------------------------------------------- what differs


def test_every_difference_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    learn.fit(1)
    weights: dict[str, Any] = {k: v.clone() + 1 for k, v in learn.model.state_dict().items()}
    weights['extra'] = torch.zeros(2, 2)
    weights['0.weight'] = torch.zeros(7, 3)
    weights['0.bias'] = weights['0.bias'].half()
    del weights['3.weight'], weights['1.running_mean']
    torch.save(weights, tmp_path / 'bad.pth')
    before = digest(learn)
    with pytest.raises(WeightsError) as e:
        learn.load(tmp_path / 'bad')
    assert 'does not fit Sequential, in 5 places. Nothing was loaded.' in str(e.value)
    assert [line.strip() for line in str(e.value).splitlines()[1:]] == [
        'missing: 1.running_mean [5]',
        'missing: 3.weight [1, 5]',
        'unexpected: extra [2, 2]',
        'shape: 0.weight is [5, 3], in the file [7, 3]',
        'dtype: 0.bias is float32, in the file float16',
    ]
    assert same(digest(learn), before)
    with pytest.raises(WeightsError, match='in 1 place'):
        learn.load(tmp_path / 'bad', strict=False)
    assert same(digest(learn), before)


def test_not_strict_takes_what_fits_by_name(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    part = {'3.bias': torch.tensor([2.0], dtype=torch.float64)}
    torch.save(part, tmp_path / 'part.pth')
    with pytest.raises(WeightsError, match='Pass `strict=False`'):
        learn.load(tmp_path / 'part')
    torch.save({**part, 'more': torch.zeros(1)}, tmp_path / 'part.pth')
    learn.load(tmp_path / 'part', strict=False)
    assert learn.model[3].bias.item() == 2.0 and learn.model[3].bias.dtype == torch.float32


def test_a_file_of_fastai_gives_its_weights_and_a_warning(tmp_path: Path) -> None:
    model = net()
    opt = {
        'state': [{'grad_avg': torch.ones(2), 'step': 3}],
        'hypers': L([{'lr': np.float64(0.1), 'wd': 0.01}]),
    }
    torch.save({'model': model.state_dict(), 'opt': opt}, tmp_path / 'fast.pth')
    learn = learner(tmp_path)
    with pytest.warns(UserWarning, match="not torch's: only the weights"):
        learn.load(tmp_path / 'fast')
    assert not learn.opt.state_dict()['state']
    assert same(learn.model.state_dict(), model.state_dict())
    learn.load(tmp_path / 'fast', with_opt=False)
    with pytest.raises(WeightsError, match="not torch's"):
        learn.load(tmp_path / 'fast', with_opt=True)


# ---------------------------------------------------------------------------------------- bad files


def refused(learn: Learner, path: Path, match: str) -> None:
    before = digest(learn)
    with pytest.raises(WeightsError, match=match) as e:
        learn.load(path)
    assert str(path) in str(e.value) and 'weights_only' not in str(e.value)
    assert same(digest(learn), before)


def test_a_pickled_model_or_learner_is_reported_by_name(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    torch.save(net(), tmp_path / 'model.pth')
    refused(learn, tmp_path / 'model.pth', 'whole pickled model')
    with zipfile.ZipFile(tmp_path / 'export.pth', 'w') as z:
        z.writestr('export/data.pkl', b'\x80\x02cfastai.learner\nLearner\n)\x81.')
        z.writestr('export/version', '3\n')
        for info in z.infolist():  # as torch writes them
            info.create_system = info.external_attr = 0
    refused(learn, tmp_path / 'export.pth', "fastai's `learn.export`")


def test_files_that_are_not_weights(tmp_path: Path) -> None:
    learn = learner(tmp_path)
    for i, value in enumerate(
        ([1, 2], {'a': 1}, {'model': {'w': 3}, 'opt': {}}, {3: torch.zeros(1)}, torch.zeros(2))
    ):
        torch.save(value, tmp_path / f'{i}.pth')
        refused(learn, tmp_path / f'{i}.pth', 'holds no state dict')
    for content, match in (
        (b'', 'is empty'),
        (b'PK\3\4 no zip', 'damaged'),
        (b'some text', 'cannot be read as weights'),
    ):
        (tmp_path / 'b.pth').write_bytes(content)
        refused(learn, tmp_path / 'b.pth', match)
