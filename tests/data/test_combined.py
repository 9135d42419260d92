"""Several loaders at once or in turn, against loops by hand; the batches of each mode in a Learner."""

from collections import Counter
from collections.abc import Iterator
from itertools import cycle, zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from learnkit import SGD, Callback, CombinedLoader, DataLoaders, Learner, TensorLoader
from learnkit.core.errors import BatchError, EmptyLoaderError, LoaderError
from learnkit.data.dataloaders import n_batches
from tests.helpers.resuming import check_every_place

SIZES = [(3, 2), (2, 3), (2, 2), (1, 4)]


def make_pair(a: int, b: int) -> list[list[str]]:
    "Return loaders of `a` and `b` batches."
    return [[f'a{i}' for i in range(a)], [f'b{i}' for i in range(b)]]


@pytest.mark.parametrize(('a', 'b'), SIZES)
def test_modes_are_loops_by_hand(a: int, b: int) -> None:
    loaders = make_pair(a, b)
    one, two = loaders
    longest = max(a, b)
    by_hand = {
        'min_size': [*map(list, zip(one, two, strict=False))],
        'max_size': [*map(list, zip_longest(one, two))],
        'max_size_cycle': [
            [x, y] for x, y, _ in zip(cycle(one), cycle(two), range(longest), strict=False)
        ],
        'sequential': one + two,
    }
    for mode, expected in by_hand.items():
        loader = CombinedLoader(loaders, mode)
        for _ in range(2):
            assert list(loader) == expected, mode
        assert len(loader) == len(expected)


class Reshuffled:
    "A loader that draws from torch's global generator when a pass starts and at each batch, as a loop can record."

    def __init__(self, name: str, n: int) -> None:
        self.name, self.n = name, n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[tuple[str, int, float]]:
        start = torch.randint(100, ()).item()
        return ((self.name, int(start), torch.rand(1).item()) for _ in range(self.n))


def cycle_by_hand(a: Reshuffled, b: Reshuffled) -> list[Any]:
    drawn_a, drawn_b = iter(a), iter(b)
    batches = []
    for i in range(max(a.n, b.n)):
        if i and i % a.n == 0:
            drawn_a = iter(a)
        first = next(drawn_a)
        if i and i % b.n == 0:
            drawn_b = iter(b)
        batches.append([first, next(drawn_b)])
    return batches


@pytest.mark.parametrize(('a', 'b'), SIZES)
def test_a_pass_draws_what_a_loop_by_hand_draws(a: int, b: int) -> None:
    "Nothing is drawn behind the last batch, also if that is the last one of a loader that starts again."
    pair = [Reshuffled('a', a), Reshuffled('b', b)]
    torch.manual_seed(0)
    by_hand = [cycle_by_hand(*pair) for _ in range(3)], torch.rand(1)
    torch.manual_seed(0)
    loader = CombinedLoader(pair, 'max_size_cycle')
    assert ([list(loader) for _ in range(3)], torch.rand(1)) == by_hand


def test_weighted_batches_come_as_a_generator_draws_them() -> None:
    loaders = {'old': ['o0', 'o1'], 'new': ['n0', 'n1', 'n2'], 'never': ['x']}
    loader = CombinedLoader(
        loaders, 'weighted', weights={'new': 3, 'old': 1, 'never': 0}, n_batches=40, seed=7
    )
    g = torch.Generator().manual_seed(7)
    names = list(loaders)
    weights = torch.tensor([1.0, 3, 0], dtype=torch.float64)
    for _ in range(2):
        again = {name: cycle(batches) for name, batches in loaders.items()}
        chosen = [names[int(torch.multinomial(weights, 1, generator=g))] for _ in range(40)]
        drawn = [(loader.batch_source, batch) for batch in loader]
        assert drawn == [(name, next(again[name])) for name in chosen]
        assert Counter(chosen)['new'] > 20 and len(loader) == 40


def test_weights_and_length_follow_the_loaders() -> None:
    loader = CombinedLoader(make_pair(3, 1), 'weighted', seed=0)
    assert (loader.weights, len(loader), len(list(loader))) == ([3.0, 1.0], 4, 4)
    torch.manual_seed(3)
    first = CombinedLoader(make_pair(3, 1), 'weighted')
    torch.manual_seed(3)
    assert list(first) == list(CombinedLoader(make_pair(3, 1), 'weighted'))


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def test_lengths_with_a_loader_that_has_none() -> None:
    stream = DataLoader(Numbers(), 2)
    known = {
        'min_size': 2,  # a stream lasts longer, as a rule
        'max_size': None,
        'max_size_cycle': None,
        'sequential': None,
    }
    for mode, n in known.items():
        assert n_batches(CombinedLoader([stream, ['x', 'y']], mode)) == n
    both = list(CombinedLoader([stream, ['x', 'y']], 'max_size_cycle'))
    assert [letter for _, letter in both] == ['x', 'y', 'x']
    endless = CombinedLoader([stream, ['x']], 'weighted', weights=[1, 1], seed=0)
    assert n_batches(endless) is None
    assert len([batch for batch, _ in zip(endless, range(30), strict=False)]) == 30


def test_wrong_arguments() -> None:
    pair = make_pair(2, 2)
    with pytest.raises(LoaderError, match=r"mode='max'.*'min_size', 'max_size', 'max_size_cycle'"):
        CombinedLoader(pair, 'max')
    with pytest.raises(LoaderError, match="options of the mode 'weighted'"):
        CombinedLoader(pair, 'min_size', weights=[1, 1])
    with pytest.raises(LoaderError, match='one weight for each'):
        CombinedLoader(pair, 'weighted', weights=[1])
    with pytest.raises(LoaderError, match=r'one weight for each of the loaders \[0, 1\]'):
        CombinedLoader(pair, 'weighted', weights={'a': 1, 'b': 1})
    with pytest.raises(LoaderError, match='weights are numbers from 0'):
        CombinedLoader(pair, 'weighted', weights=[0, 0])
    with pytest.raises(LoaderError, match='no length'):
        CombinedLoader([DataLoader(Numbers()), ['x']], 'weighted')
    with pytest.raises(LoaderError, match='n_batches'):
        CombinedLoader(pair, 'weighted', n_batches=0)
    with pytest.raises(LoaderError, match='a dict or a list of loaders'):
        CombinedLoader(DataLoader([1, 2]))
    with pytest.raises(EmptyLoaderError, match='no loaders'):
        CombinedLoader({})
    with pytest.raises(LoaderError, match="'b' is a Tensor"):
        CombinedLoader({'a': [1], 'b': torch.zeros(3)})
    used_up = CombinedLoader([iter([1, 2]), [1, 2, 3]], 'max_size_cycle')
    with pytest.raises(EmptyLoaderError, match=r'list_iterator.* started again'):
        list(used_up)
    with pytest.raises(LoaderError, match='CombinedLoader'):
        DataLoaders([TensorLoader(torch.zeros(3)), TensorLoader(torch.zeros(3))])  # type: ignore[arg-type]


# -- in a Learner ------------------------------------------------------------------------------------


def make_tasks() -> dict[str, Any]:
    x = torch.linspace(-1, 1, 12)[:, None]
    return {
        'twice': TensorLoader(x, 2 * x, bs=4, shuffle=True, seed=1),
        'thrice': TensorLoader(x[:6], 3 * x[:6], bs=3, shuffle=True, seed=2),
    }


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in make_tasks()})
        for head in self.heads.values():
            nn.init.zeros_(head.weight)

    def forward(self, twice: Tensor, thrice: Tensor) -> dict[str, Tensor]:
        return {'twice': self.heads['twice'](twice), 'thrice': self.heads['thrice'](thrice)}


def sum_losses(pred: dict[str, Tensor], targ: dict[str, Tensor]) -> Tensor:
    losses = [nn.functional.mse_loss(pred[name], targ[name]) for name in targ]
    return torch.stack(losses).sum()


def test_a_dict_of_loaders_trains_as_a_loop_by_hand() -> None:
    learn = Learner(
        CombinedLoader(make_tasks(), 'max_size_cycle'), TwoHeads(), sum_losses, SGD, 0.1
    )
    with learn.no_logging():
        learn.fit(2)

    tasks = make_tasks()
    weights = dict.fromkeys(tasks, torch.zeros(()))
    for _ in range(2):
        drawn = {name: list(dl) for name, dl in tasks.items()}
        drawn['thrice'] += list(tasks['thrice'])[:1]
        for i in range(3):
            for name in tasks:
                x, y = drawn[name][i]
                grad = (2 * x * (weights[name] * x - y)).mean()
                weights[name] = weights[name] - 0.1 * grad
    for name, head in learn.model.heads.items():
        assert head.weight.item() == pytest.approx(weights[name].item(), rel=1e-5)
    assert (learn.time.ba, learn.time.sp) == (6, 24)


def test_a_list_of_loaders_gives_several_inputs_and_targets() -> None:
    seen: dict[str, Any] = {}

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(1, 1)

        def forward(self, a: Tensor, b: Tensor | None) -> list[Tensor | None]:
            seen.setdefault('inputs', []).append([None if x is None else len(x) for x in (a, b)])
            return [self.lin(a), None if b is None else self.lin(b)]

    def loss(pred: Any, a: Tensor, b: Tensor | None) -> Tensor:
        seen['targets'] = [type(a), type(b)]
        return (
            (pred[0] - a).pow(2).mean()
            if b is None
            else (pred[0] - a + pred[1].mean()).pow(2).mean()
        )

    loader = CombinedLoader([*make_tasks().values()], 'max_size')
    learn = Learner(loader, Both(), loss, SGD, 0.1)
    with learn.no_logging():
        learn.fit(1)
    assert seen == {'inputs': [[4, 3], [4, 3], [4, None]], 'targets': [Tensor, type(None)]}


@pytest.mark.parametrize('mode', ['sequential', 'weighted'])
def test_a_batch_of_one_loader_knows_its_source(mode: str) -> None:
    loader = CombinedLoader(make_tasks(), mode, **({'seed': 5} if mode == 'weighted' else {}))
    sources: list[list[Any]] = [[], [], []]
    sizes = []

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return self.lin(x)

    def loss(pred: Tensor, targ: Tensor) -> Tensor:
        sources[0].append(loader.batch_source)
        return nn.functional.mse_loss(pred, targ)

    look = Callback(
        before_batch=lambda cb: sources[1].append(cb.batch_source),
        after_batch=lambda cb: sources[2].append(cb.learn.batch_source),
    )
    learn = Learner(loader, Shared(), loss, SGD, 0.1, cbs=look)
    with learn.no_logging():
        learn.fit(2)
    assert sources[0] == sources[1] == sources[2]
    assert [{'twice': 4, 'thrice': 3}[name] for name in sources[0]] == sizes
    assert len(sizes) == 10 and (
        mode == 'weighted' or sources[0][:5] == ['twice'] * 3 + ['thrice'] * 2
    )


@pytest.mark.parametrize('mode', ['max_size_cycle', 'weighted'])
def test_a_run_resumes_at_every_place(mode: str) -> None:
    def make() -> Learner:
        x = torch.linspace(-1, 1, 12)[:, None]
        loaders = {
            'twice': DataLoader([*zip(x, 2 * x, strict=True)], 4, shuffle=True),
            'thrice': TensorLoader(x[:6], 3 * x[:6], bs=3, shuffle=True),
        }
        model = TwoHeads() if mode != 'weighted' else nn.Linear(1, 1)
        loss = sum_losses if mode != 'weighted' else nn.MSELoss()
        return Learner(CombinedLoader(loaders, mode), model, loss, SGD, 0.1)

    check_every_place(make)


def test_an_endless_weighted_stream_is_cut_into_epochs_and_resumes() -> None:
    def make() -> Learner:
        stream = DataLoader(
            Numbers(), 2, collate_fn=lambda rows: torch.tensor([[float(r)] for r in rows])
        )
        loader = CombinedLoader([stream, [torch.ones(1, 1)]], 'weighted', weights=[2, 1])
        return Learner(
            DataLoaders(loader, n_iter=5),
            nn.Linear(1, 1),
            lambda pred: pred.pow(2).mean(),
            SGD,
            0.01,
        )

    assert make().dls.batch_form().has_parts is False
    check_every_place(make)


class TwoLines(nn.Module):
    "A line for each of two loaders."

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 1, bias=False)
        self.b = nn.Linear(2, 1, bias=False)
        nn.init.constant_(self.a.weight, 0.5)
        nn.init.constant_(self.b.weight, -0.5)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {'a': self.a(a), 'b': self.b(b)}


def make_two_lines(n_a: int, n_b: int, **options: Any) -> Learner:
    "Return a Learner of two loaders with batches of `n_a` and `n_b` samples."
    g = torch.Generator().manual_seed(0)
    sizes = {'a': n_a, 'b': n_b}
    loaders = {
        name: TensorLoader(
            torch.randn(2 * n, 2, generator=g), torch.randn(2 * n, 1, generator=g), bs=n
        )
        for name, n in sizes.items()
    }

    def loss_func(preds: Any, targets: Any) -> Tensor:
        return sum((preds[k] - targets[k]).pow(2).mean() for k in sizes)  # type: ignore[return-value]

    return Learner(CombinedLoader(loaders), TwoLines(), loss_func, SGD, 0.1, **options)


@pytest.mark.parametrize('microbatch', [2, 3, 'auto'])
def test_microbatches_of_loaders_with_equal_batches_train_as_whole_batches(microbatch: Any) -> None:
    whole = make_two_lines(6, 6)
    parts = make_two_lines(6, 6, microbatch=microbatch)
    for learn in (whole, parts):
        learn.fit(2)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(('n_a', 'n_b'), [(6, 4), (4, 6), (2, 6), (6, 2)])
def test_microbatches_of_loaders_with_different_batches_are_an_error(n_a: int, n_b: int) -> None:
    learn = make_two_lines(n_a, n_b, microbatch=3)
    for _ in range(2):
        with pytest.raises(BatchError, match=f'{n_a} and {n_b} samples'):
            learn.fit(1)
        assert learn.model.a.weight.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize('microbatch', [6, 'auto'])
def test_batches_of_different_sizes_that_fit_are_trained_whole(microbatch: Any) -> None:
    whole = make_two_lines(2, 6)
    fitting = make_two_lines(2, 6, microbatch=microbatch)
    for learn in (whole, fitting):
        learn.fit(1)
    assert torch.equal(whole.model.a.weight, fitting.model.a.weight)
    assert torch.equal(whole.model.b.weight, fitting.model.b.weight)


def test_validation_and_predictions_of_several_loaders() -> None:
    tasks = make_tasks()
    valid = CombinedLoader(tasks, 'sequential')
    learn = Learner(DataLoaders(tasks['twice'], valid), nn.Linear(1, 1), nn.MSELoss(), SGD, 0.1)
    with learn.no_logging():
        learn.fit(1)
    preds, targs = learn.get_preds()
    x = torch.linspace(-1, 1, 12)[:, None]
    assert torch.equal(targs, torch.cat([2 * x, 3 * x[:6]]))
    assert learn.validate()[0] == pytest.approx((preds - targs).pow(2).mean().item(), rel=1e-5)
