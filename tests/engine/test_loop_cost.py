"""The cost of a step in counts that are equal on every machine: calls, live tensors, imports, host reads."""

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from benchmarks import __main__ as quick, checkpoint, imports, loader, memory, step
from benchmarks.subjects import SUBJECTS, ImageTask, Task
from learnkit import Callback, DataLoaders, Learner, Recorder, accuracy
from learnkit.callbacks import progress
from learnkit.metrics import AvgMetric
from tests.helpers.fresh import output_of

# ------------------------------------------------------------------------------------- calls a step


class Profiled:
    "A loader that repeats one batch, and counts Python and C calls from its tenth batch to its last."

    def __init__(self, batch: Any, n: int = 110, skip: int = 10) -> None:
        self.batch, self.n, self.skip, self.calls = batch, n, skip, 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.n):
            if i == self.skip:
                sys.setprofile(self.count)
            yield self.batch
        sys.setprofile(None)

    def count(self, frame: Any, event: str, arg: Any) -> None:
        if event in ('call', 'c_call'):
            self.calls += 1

    def calls_a_step(self) -> float:
        "Return the mean, without the call of this loader itself."
        return self.calls / (self.n - self.skip) - 1


def calls_a_step(subject: str) -> float:
    torch.manual_seed(0)
    task = Task(n_train=1, n_valid=0, skip=0)
    # counts, where the other one takes times
    task.train = Profiled(task.batch())  # type: ignore[assignment]
    gc.disable()  # a garbage collection calls too
    try:
        SUBJECTS['a'][subject](task)(1)
    finally:
        sys.setprofile(None)
        gc.enable()
    return task.train.calls_a_step()


def test_calls_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    raw, bare, default = (calls_a_step(subject) for subject in ('raw', 'learnkit-bare', 'learnkit'))
    assert 100 < raw < 300  # it does count
    assert bare - raw <= 40
    assert default - raw <= 62


@pytest.mark.parametrize(
    'subject', ['learnkit-idle200', pytest.param('learnkit-idle1000', marks=pytest.mark.full)]
)
def test_idle_callbacks_add_no_call(subject: str) -> None:
    assert calls_a_step(subject) == pytest.approx(calls_a_step('learnkit'))


def test_a_handler_adds_one_call() -> None:
    one_each = calls_a_step('learnkit') + 50
    assert calls_a_step('learnkit-handlers50') == pytest.approx(one_each, abs=0.5)


# ------------------------------------------------------------------------------------------ imports

FIT = """
from learnkit import DataLoaders, Learner, Recorder, accuracy
from learnkit.callbacks import progress
import torch
x, y = torch.randn(8, 2), torch.zeros(8).long()
dls = DataLoaders.from_tensors((x, y), (x, y), bs=4, device='cpu')
Learner(dls, torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy, metrics=accuracy).fit(1)
"""
BY_HAND = """
import torch
x, y = torch.randn(8, 2), torch.zeros(8).long()
model = torch.nn.Linear(2, 2)
opt = torch.optim.Adam(model.parameters())
torch.nn.functional.cross_entropy(model(x), y).backward()
opt.step()
"""


def loaded_by(program: str) -> set[str]:
    "Return the modules that a fresh process has imported at its end."
    tell = '\nimport sys\nprint("modules", *sys.modules)'
    return set(output_of(program + tell).splitlines()[-1].split()[1:])


def test_the_first_fit_imports_nothing_heavy() -> None:
    added = loaded_by(FIT) - loaded_by(BY_HAND)
    found = {name.split('.')[0] for name in added} - set(sys.stdlib_module_names)
    assert found <= {'learnkit', 'fastcore', 'numpy', 'lazy_loader', 'torch'}
    assert not {
        name
        for name in added
        if name.startswith(('torch._inductor', 'torch.distributed', 'torch.onnx'))
    }


# -------------------------------------------------------------------------------- reads by the host


class Remote(Tensor):
    """A tensor that claims to be on a device, and counts reads of its values by the host.

    Results of operations with a `Remote` are `Remote`, so that batches of them make everything `Remote`."""

    reads: list[str] = []
    is_cpu = property(lambda self: False)
    READING = frozenset(
        {
            'item',
            'tolist',
            'numpy',
            'cpu',
            '__bool__',
            '__float__',
            '__int__',
            '__index__',
            '__array__',
            '__complex__',
            '__contains__',
            'nonzero',
            'masked_select',
            'equal',
            'allclose',
        }
    )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in cls.READING:
            cls.reads.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class RemoteBatches:
    "A loader of `Remote` batches that records the reads between its first batch and its end."

    def __init__(self, n: int) -> None:
        self.batches = [
            (torch.randn(8, 4).as_subclass(Remote), torch.randint(3, (8,)).as_subclass(Remote))
            for _ in range(n)
        ]
        self.reads: list[str] = []
        self.n_passes = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        before = len(Remote.reads)
        yield from self.batches
        self.reads += Remote.reads[before:]
        self.n_passes += 1


@pytest.fixture
def reads() -> Iterable[list[str]]:
    Remote.reads.clear()
    yield Remote.reads
    Remote.reads.clear()


class Drawing(progress.Display):
    "A display that is updated after every batch."

    interval_s = 0.0
    n_drawn = 0

    def draw(self, bar: progress.Bar | None) -> None:
        if bar and bar.text():
            Drawing.n_drawn += 1


def remote_learner(n_train: int, **kwargs: Any) -> Learner:
    train = RemoteBatches(n_train)
    dls = DataLoaders(train, {'valid': RemoteBatches(4), 'night': RemoteBatches(3)}, device='cpu')
    return Learner(dls, nn.Linear(4, 3), F.cross_entropy, opt_func=torch.optim.SGD, **kwargs)


def test_remote_counts(reads: list[str]) -> None:
    t = torch.ones(()).as_subclass(Remote)
    assert not t.is_cpu and not reads
    t.item(), float(t), bool(t), int(t), t.tolist(), t.cpu(), t.numpy(), (t + 1).sqrt().item()
    assert reads == ['item', '__float__', '__bool__', '__int__', 'tolist', 'cpu', 'numpy', 'item']


def test_a_default_epoch_reads_nothing_between_its_batches(
    reads: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, 'make_display', Drawing)
    monkeypatch.setattr(Drawing, 'n_drawn', 0)
    metrics = [AvgMetric(accuracy, on='both'), AvgMetric(F.cross_entropy, 'ce', on='both')]
    learn = remote_learner(150, metrics=metrics)
    learn.fit(2)

    assert [dl.n_passes for dl in learn.dls] == [2, 2, 2]
    # the accuracy of the first batch is compared with its halves, once
    assert [len(dl.reads) for dl in learn.dls] == [3, 0, 0]
    # two epochs, the values at the ends of their three passes; no batch's
    assert 0 < len(reads) <= 2 * 2 * 10
    assert Drawing.n_drawn >= 2 * 157
    assert len(learn.recorder.losses) == 300
    last = learn.history[-1]
    assert last['valid_loss'] == pytest.approx(last['ce'], rel=1e-6)


def test_reads_do_not_grow_with_the_batches(
    reads: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def total(n: int) -> int:
        reads.clear()
        remote_learner(n, metrics=accuracy, cbs=Recorder(train_metrics=True), default_cbs=True).fit(
            1
        )
        return len(reads)

    assert total(10) == total(200)


def test_a_metric_that_reads_is_seen(reads: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def eager(pred: Tensor, targ: Tensor) -> float:
        return accuracy(pred, targ).item()

    learn = remote_learner(5, metrics=eager)
    learn.fit(1)
    # training: the check of the first batch and its halves
    assert [dl.reads.count('item') for dl in learn.dls] == [1 + 3, 4, 3]


class NoSync(Callback):
    "Make every wait for the device an error, from before the first batch of each pass until after its last."

    order = -20  # at the end of a pass before the Recorder, which then reads what the pass gave

    def before_train(self) -> None:
        torch.cuda.set_sync_debug_mode('error')

    def before_validate(self) -> None:
        torch.cuda.set_sync_debug_mode('error')

    def after_train(self) -> None:
        torch.cuda.set_sync_debug_mode('default')

    def after_validate(self) -> None:
        torch.cuda.set_sync_debug_mode('default')

    def cleanup(self) -> None:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.cuda
@pytest.mark.parametrize('where', ['cuda', 'cpu'])
def test_a_default_epoch_does_not_wait_for_the_device(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = torch.randn(1280, 4), torch.randint(3, (1280,))
    dls = DataLoaders.from_tensors((x, y), (x, y), bs=8, device=where)
    dls.device = torch.device('cuda')
    model = nn.Linear(4, 3)
    metrics = AvgMetric(accuracy, on='both')
    learn = Learner(
        dls, model, F.cross_entropy, opt_func=torch.optim.SGD, lr=0.1, metrics=metrics, cbs=NoSync
    )
    learn.fit(2)
    assert len(learn.recorder.losses) == 320
    assert learn.history[-1]['valid_loss'] < learn.history[0]['train_loss']
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.cuda
def test_a_wait_for_the_device_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    class Reads(Callback):
        def after_loss(self) -> None:
            self.loss.item()

    batches = [(torch.randn(8, 4), torch.randint(3, (8,)))]
    dls = DataLoaders(batches, device='cuda')
    learn = Learner(dls, nn.Linear(4, 3), F.cross_entropy, cbs=[NoSync, Reads])
    with pytest.raises(RuntimeError, match='synchronizing'):
        learn.fit(1)
    assert torch.cuda.get_sync_debug_mode() == 0


# ---------------------------------------------------------------------- a batch fetched in one call


class Counted(Dataset[Any]):
    "Samples equal to their indices; counts the calls."

    def __init__(self, n: int = 20) -> None:
        self.n, self.one_by_one, self.together = n, 0, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[int, int]:
        self.one_by_one += 1
        return i, 2 * i

    def __getitems__(self, indices: list[int]) -> Any:
        self.together += 1
        return [(i, 2 * i) for i in indices]


class CountedWhole(Counted):
    def __getitems__(self, indices: list[int]) -> Any:
        self.together += 1
        return torch.tensor(indices), 2 * torch.tensor(indices)


@pytest.mark.parametrize(
    ('kind', 'options'), [(Counted, {}), (CountedWhole, {'collate_fn': loader.as_it_is})]
)
def test_a_batch_is_fetched_in_one_call(kind: type[Counted], options: dict[str, Any]) -> None:
    train, valid = kind(), kind(10)
    dls = DataLoaders.from_datasets(train, valid, bs=8, seed=1, **options)
    seen = [x for x, y in dls.train if torch.equal(y, 2 * x)]
    assert sorted(torch.cat(seen).tolist()) == list(range(20))
    assert [x.tolist() for x, _ in dls.valid] == [list(range(8)), [8, 9]]
    assert (train.together, train.one_by_one, valid.together, valid.one_by_one) == (3, 0, 2, 0)


# --------------------------------------------------------------------------------------- benchmarks


def test_quick_set_is_known() -> None:
    modules = step, memory, imports, loader, checkpoint
    workloads = {
        name: workload for module in modules for name, workload in module.WORKLOADS.items()
    }
    for name, subjects in quick.QUICK.items():
        assert set(subjects) <= set(workloads[name].subjects)
    for name, (_, _, _, _, group) in step.TASKS.items():
        assert set(step.WORKLOADS[name].subjects) <= set(step.GROUPS[group])
        for comparison in step.WORKLOADS[name].comparisons:
            assert {comparison.subject, comparison.base} <= set(step.WORKLOADS[name].subjects)


@pytest.mark.parametrize('subject', ['raw', 'learnkit-bare', 'learnkit'])
def test_benchmark_trains_a_network_on_images(
    subject: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ImageTask(n_train=3, n_valid=0, skip=1)
    before = [p.detach().clone() for p in task.model.parameters()]
    SUBJECTS['a'][subject](task)(2)
    assert len(task.train.began_s) == len(task.train.ended_s) == 2
    assert all(not torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))


def test_alive_counts_storages() -> None:
    with memory.Alive() as alive:
        a = torch.zeros(1024)
        b = a[:10]
        assert alive.nbytes() == 4096
        del a
        assert alive.nbytes() == 4096  # the view keeps it
        del b
        assert alive.nbytes() == 0

        x = torch.ones(256, requires_grad=True)
        loss = x.exp().sum()  # the graph keeps what `exp` gave
        assert alive.nbytes() == 1024 + 1024 + 4
        loss.backward()
        del loss
        assert alive.nbytes() == 1024 + 1024  # x and its gradient


@pytest.mark.parametrize('subject', ['torch', 'torch-getitems', 'learnkit'])
def test_benchmark_loaders_give_every_sample_once(subject: str) -> None:
    x = torch.arange(100.0)[:, None]
    batches = list(loader.LOADERS[subject](x, x[:, 0].long(), 16))
    assert [len(x) for x, _ in batches] == [16] * 6 + [4]
    assert all(torch.equal(x[:, 0].long(), y) for x, y in batches)
    order = torch.cat([y for _, y in batches]).tolist()
    assert sorted(order) == list(range(100)) != order


def test_imports_benchmark_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(imports.PROGRAMS, 'raw', 'sum(range(10**6))\n')
    monkeypatch.setitem(imports.PROGRAMS, 'learnkit', 'raise ValueError("no")\n')
    assert 1 < imports.build('imports', 'raw')() < 10_000
    failing: Callable[[], float] = imports.build('imports', 'learnkit')
    with pytest.raises(RuntimeError, match='ValueError: no'):
        failing()
