"""Models on the meta device: initialized layer by layer, read from files, or broadcast; trained as with weights."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from learnkit import Callback, Learner
from learnkit.comm.dtensor import is_dtensor
from learnkit.core.errors import ModelError, OptionError, WeightsError
from learnkit.core.model import is_on_meta
from learnkit.distributed.initialize import copy_on_meta
from tests.helpers.fsdp import Net, WithStatistics, learner, max_difference, state_values
from tests.helpers.ranks import run_ranks


class Bare(Net):
    "A model with weights that nothing initializes."

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def make(model: type[nn.Module] = Net, **kwargs: Any) -> Learner:
    with torch.device('meta'):
        empty = model()
    learn: Learner = learner(lambda: empty, **kwargs)
    learn.logger = lambda *_: None
    return learn


def initialized(model: type[nn.Module]) -> nn.Module:
    "Return the model that one process initializes in the order of its layers."
    with torch.device('meta'):
        whole = model()
    whole.to_empty(device='cpu')
    torch.manual_seed(5)
    for m in whole.modules():
        if hasattr(m, 'reset_parameters'):
            m.reset_parameters()
    return whole


def fit(learn: Learner, folder: Path | None = None, **options: Any) -> list[torch.Tensor]:
    "Return the whole weights before and after a fit."
    torch.manual_seed(5)
    with learn.no_bar(), learn.distributed('fsdp', **options):
        assert all(map(is_dtensor, learn.model.parameters()))
        start = [t.full_tensor() if is_dtensor(t) else t for t in state_values(learn)]
        learn.fit(1)
        if folder is not None:
            learn.path = folder
            learn.save('whole')
        return [start, [t.full_tensor() if is_dtensor(t) else t for t in state_values(learn)]]


def trains(rank: int, folder: str) -> list[str]:
    "Return what is wrong with models on the meta device."
    torch.distributed.init_process_group('gloo')
    wrong = []

    def check(name: str, holds: bool) -> None:
        if not holds:
            wrong.append(name)

    for model in (Net, WithStatistics):
        learn = make(model, n=40)
        start, end = fit(learn, Path(folder))
        expected = initialized(model)
        check(
            f'{model.__name__}: initialized',
            max_difference(start, expected.state_dict().values()) == 0,
        )
        whole = learner(partial(initialized, model), n=40)
        with whole.no_bar(), whole.no_logging(), whole.distributed('ddp'):
            whole.fit(1)
        check(f'{model.__name__}: trained', max_difference(end, state_values(whole)) < 1e-5)
        check('meta afterwards', is_on_meta(learn.model) and learn.opt is None)
        saved = torch.load(Path(folder) / 'models' / 'whole.pth', weights_only=True)['model']
        check('saved whole', max_difference(saved.values(), end) == 0)
        learn.world.barrier()

    file = Path(folder) / 'own.safetensors'
    if rank == 0:
        save_file(initialized(Net).state_dict(), file)
        save_file({'stem.weight': torch.zeros(7, 5)}, Path(folder) / 'less.safetensors')
    torch.distributed.barrier()
    start, _ = fit(make(), weights=file)
    check('read', max_difference(start, initialized(Net).state_dict().values()) == 0)

    learn = learner() if rank == 0 else make()
    values = state_values(learner())
    start, _ = fit(learn)
    check('broadcast', max_difference(start, values) == 0)

    errors = {
        'Bare': (ModelError, 'The model .Bare. .*reset_parameters', make(Bare), {}),
        'less': (
            WeightsError,
            'less.*lacks 15 tensors',
            make(),
            {'weights': f'{folder}/less.safetensors'},
        ),
        'whole': (OptionError, 'weights= is for', learner(), {'weights': file}),
    }
    for name, (kind, text, odd, options) in errors.items():
        with pytest.raises(kind, match=text):
            fit(odd, **options)
        check(f'{name}: alone again', odd.world.size == 1)
    return wrong


@pytest.mark.dist
def test_models_on_meta_train_as_models_with_weights() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(trains, 2, folder) == [[], []]


@pytest.mark.parametrize(
    'use',
    [
        lambda learn: learn.fit(1),
        lambda learn: learn.validate(),
        lambda learn: learn.get_preds(),
        lambda learn: learn.save('weights'),
        lambda learn: learn.save('weights.safetensors'),
        lambda learn: learn.load('there'),
        lambda learn: learn.export('model.pt2'),
        lambda learn: learn.checkpoint_state(),
    ],
)
def test_a_model_on_meta_is_refused_before_anything_changes(
    use: Callable[[Learner], Any], tmp_path: Path
) -> None:
    learner(path=tmp_path).save('there')
    called = []
    learn = make(path=tmp_path, cbs=Callback(before_fit=called.append, after_error=called.append))
    with pytest.raises(ModelError, match=r"Net is on the meta device.*learn.distributed\('fsdp'\)"):
        use(learn)
    assert learn.opt is None and not called
    assert [path.name for path in tmp_path.rglob('*.*')] == ['there.pth']


def test_a_copy_on_meta_has_the_structure_and_no_memory() -> None:
    model = Net()
    model.head.weight = model.stem.bias  # tied
    copy = copy_on_meta(model)
    assert all(t.is_meta for t in copy.parameters()) and not is_on_meta(model)
    assert copy.head.weight is copy.stem.bias and type(copy) is Net
    assert [n for n, _ in copy.named_parameters()] == [n for n, _ in model.named_parameters()]
