"""Progress output of a run in a notebook, a terminal and a pipe."""

import io
import json
import os
import pty
import re
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from itertools import groupby
from time import perf_counter, sleep
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import learnkit.callbacks.progress
from learnkit.callbacks.progress import (
    Bar,
    Display,
    Table,
    TerminalDisplay,
    make_display,
)
from learnkit.core.errors import CancelFitException
from learnkit.data import DataLoaders
from learnkit.engine.callback import Callback
from learnkit.learner import Learner
from tests.helpers.clock import use_clock
from tests.helpers.forks import start
from tests.helpers.kernel import kernel_env

CLOCK = r'\d\d:\d\d'


class Recording(Display):
    "A display that records the text and the time of each drawn bar."

    interval_s = 0.0

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.bars: list[str] = []
        self.times: list[float] = []
        self.closed: list[str | None] = []

    def draw(self, bar: Bar | None) -> None:
        self.times.append(perf_counter())
        if bar:
            self.bars.append(re.sub(CLOCK, '--:--', bar.text()))

    def close(self, stopped_at: Bar | None = None) -> None:
        self.closed.append(stopped_at and re.sub(CLOCK, '--:--', stopped_at.text()))


def batches(n: int) -> list[Any]:
    return [(torch.ones(2, 1), torch.ones(2, 1))] * n


def make_learner(n_train: Any = 3, n_valid: Any = 2, **kwargs: Any) -> Learner:
    data = [batches(n) if isinstance(n, int) else n for n in (n_train, n_valid)]
    return Learner(DataLoaders(*data), nn.Linear(1, 1), loss_func=F.mse_loss, **kwargs)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    "Return the displays of the test's runs."
    made: list[Recording] = []

    def make(stream: Any = None) -> Recording:
        made.append(Recording())
        return made[-1]

    monkeypatch.setattr(learnkit.callbacks.progress, 'make_display', make)
    monkeypatch.setattr(learnkit.callbacks.progress, 'PATIENCE_S', 0)
    return made


def raising(
    event: str, error: BaseException, when: Callable[[Any], bool] = lambda cb: True
) -> Callback:
    def handler(cb: Any) -> None:
        if when(cb):
            raise error

    return Callback(**{event: handler})


# -- tables and bars -------------------------------------------------------------------------------


def test_numbers_stand_under_their_header() -> None:
    table = Table()
    lines = table.add(['epoch', 'train_loss', 'accuracy', 'time'], [0, 0.5, None, '00:02'])
    lines += table.add(['epoch', 'train_loss', 'accuracy', 'time'], [1, 0.25, 0.75, '00:02'])
    assert lines == [
        'epoch  train_loss  accuracy   time',
        '    0    0.500000            00:02',
        '    1    0.250000  0.750000  00:02',
    ]


def test_a_row_with_other_columns_gets_its_own_header() -> None:
    table = Table()
    table.add(['epoch', 'loss'], [0, 0.5])
    more = table.add(['epoch', 'loss', 'extra'], [1, 0.5, 2.0])
    assert more == ['epoch      loss     extra', '    1  0.500000  2.000000']
    assert table.html(200).count('<tr>') == 4 and table.html(200).count('<th>') == 5
    assert table.text(200).splitlines() == ['epoch      loss', '    0  0.500000', *more]


def test_many_rows_are_folded_behind_the_first() -> None:
    table = Table()
    for i in range(5000):
        table.add(['epoch'], [i])
    rows = re.findall(r'<td[^>]*>(.*?)</td>', table.html(200))
    # the first line is the header
    assert rows[:10] == [*map(str, range(9)), '... 4801 more, in learn.history ...']
    assert rows[10:] == [*map(str, range(4810, 5000))]
    assert len(table.text(200).splitlines()) == 201  # 200 lines and the note


@pytest.mark.parametrize(
    ('total', 'text'), [(8, 'day 2/8 25% 00:10<00:30'), (None, 'day 2 batches 00:10 0.2/s')]
)
def test_the_bar_shows_count_share_and_time(
    total: int | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = use_clock(monkeypatch, 'learnkit.callbacks.progress')
    bar = Bar('day', total, done=2, started=clock.now - 10.1)
    assert bar.text() == text
    assert bar.html().count('<progress') == (total is not None)


# -- which display ---------------------------------------------------------------------------------


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ('stream', 'term', 'kind'),
    [
        (io.StringIO(), 'xterm', Display),
        (object(), 'xterm', Display),
        (Tty(), 'xterm', TerminalDisplay),
        (Tty(), 'dumb', Display),
    ],
)
def test_display_suits_the_stream(
    stream: Any, term: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('TERM', term)
    assert type(make_display(stream)) is kind


# -- plain text ------------------------------------------------------------------------------------


def test_plain_output_is_one_aligned_line_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    make_learner().fit(3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ['epoch', 'train_loss', 'valid_loss', 'time']
    assert [line.split()[0] for line in lines[1:]] == ['0', '1', '2']
    for line in lines[1:]:
        assert re.fullmatch(rf' +\d  +\d\.\d{{6}}  +\d\.\d{{6}}  {CLOCK}', line)
    assert {len(line) for line in lines} == {len(lines[0])}


def test_no_logging_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    learn = make_learner()
    with learn.no_logging():
        learn.fit(1)
    learn.validate()
    learn.get_preds()
    assert capsys.readouterr() == ('', '')
    assert learn.logger is print


def test_a_logger_of_the_users_own_keeps_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    learn, rows = make_learner(), []
    learn.logger = rows.append
    learn.fit(2)
    assert [row[0] for row in rows] == [0, 1]
    assert capsys.readouterr().out == ''
    learn.logger([2])
    assert len(rows) == 3


# -- the logger is restored ------------------------------------------------------------------------


@pytest.mark.parametrize('error', [RuntimeError, KeyboardInterrupt, CancelFitException])
def test_logger_is_print_after_any_end(error: type[BaseException], shown: list[Recording]) -> None:
    learn = make_learner()
    try:
        learn.fit(1, cbs=raising('after_batch', error()))
    except error:
        pass
    assert learn.logger is print
    assert len(shown[0].closed) == 1


# -- the bars of a run -----------------------------------------------------------------------------


def test_each_loader_is_counted_to_its_end(shown: list[Recording]) -> None:
    learn = make_learner()
    learn.fit(2)
    assert len(shown) == 1 and shown[0].closed == [None]
    seen = [re.match(r'(epoch \d/2 \w+ \d/\d)', bar).group(1) for bar in shown[0].bars]  # type: ignore[union-attr]
    loaders = ('train', 3), ('valid', 2)
    wanted = [
        f'epoch {e}/2 {name} {i}/{n}' for e in (1, 2) for name, n in loaders for i in range(n + 1)
    ]
    assert list(dict.fromkeys(seen)) == wanted


def test_training_shows_the_loss_and_what_is_left(shown: list[Recording]) -> None:
    make_learner().fit(2)
    train = [bar for bar in shown[0].bars if 'train 3/3' in bar]
    assert all(re.search(r', fit --:-- left$', bar) for bar in train)
    assert all(re.search(r' loss \d+\.\d{4}, ', bar) for bar in train)
    assert not any('loss' in bar for bar in shown[0].bars if 'valid' in bar)


@pytest.mark.parametrize('run', [Learner.validate, Learner.get_preds])
def test_evaluation_alone_shows_an_inner_bar(
    run: Callable[[Learner], Any], shown: list[Recording]
) -> None:
    learn = make_learner()
    run(learn)
    assert [bar.split()[:2] for bar in shown[0].bars][-1] == ['valid', '2/2']
    assert shown[0].closed == [None]
    assert not shown[0].table.lines


def test_validation_inside_a_fit_returns_to_the_training_bar(shown: list[Recording]) -> None:
    def validate(cb: Any) -> None:
        if cb.training and cb.iter == 0:
            cb.learn.validate()

    make_learner(cbs=Callback(after_batch=validate)).fit(1)
    names = [bar.removeprefix('epoch 1/1 ').split()[0] for bar in shown[0].bars]
    assert [name for name, _ in groupby(names)] == ['train', 'valid', 'train', 'valid']
    assert len(shown) == 1 and shown[0].closed == [None]


def test_an_interrupted_fit_names_its_place(shown: list[Recording]) -> None:
    learn = make_learner(10)
    stop = raising('before_batch', KeyboardInterrupt(), lambda cb: cb.iter == 7)
    with pytest.raises(KeyboardInterrupt):
        learn.fit(3, cbs=stop)
    assert re.fullmatch(
        r'stopped at epoch 1/3 train 7/10 70% --:--<--:-- loss \d\.\d+', shown[0].closed[0] or ''
    )
    learn.fit(1)
    assert shown[1].closed == [None]


def test_the_stop_button_counts_the_batch_that_ends(shown: list[Recording]) -> None:
    learn = make_learner(10)
    press = Callback(before_batch=lambda cb: cb.iter == 7 and signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match='after batch 8 of 10 of epoch 0, 8ba'):
        learn.fit(3, cbs=press)
    assert 'epoch 1/3 train 8/10 80%' in (shown[0].closed[0] or '')


def test_at_most_ten_drawings_a_second(
    shown: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recording, 'interval_s', 0.1)
    make_learner(60, cbs=Callback(after_batch=lambda cb: sleep(0.005))).fit(2)
    gaps = [b - a for a, b in zip(shown[0].times, shown[0].times[1:], strict=False)]
    assert len(gaps) >= 4
    assert min(gaps) >= 0.1


def on_screen(written: str) -> list[str]:
    "Return the visible lines of terminal output; a carriage return overwrites its line."
    lines = []
    for line in written.replace('\r\n', '\n').split('\n'):
        cells = ''
        for part in line.split('\r'):
            cells = part + cells[len(part) :]
        lines.append(cells.rstrip())
    return [line for line in lines if line]


def test_a_bar_is_cleared_and_no_thread_is_started_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('COLUMNS', '60')
    stream, threads = Tty(), threading.active_count()
    display = TerminalDisplay(stream)
    display.draw(Bar('train', 8, done=2))
    assert on_screen(stream.getvalue())[0].startswith('train:  25%|')
    assert threading.active_count() == threads

    display.write(['epoch', 'loss'], [0, 0.5])
    display.draw(Bar('valid', 4))
    display.close()
    assert on_screen(stream.getvalue()) == ['epoch      loss', '    0  0.500000']


# -- a resumed fit ---------------------------------------------------------------------------------


def state_after(n: int, **options: Any) -> Any:
    "Return the state of a fit after `n` batches."
    states: list[Any] = []

    def take(cb: Any) -> None:
        if cb.train_iter == n:
            states.append(cb.learn.checkpoint_state())
            raise CancelFitException

    with (learn := make_learner(5, **options)).no_bar():
        learn.fit(3, cbs=Callback(batch_checkpoint=take))
    return states[0]


def test_the_bar_starts_where_the_epoch_resumes(shown: list[Recording]) -> None:
    state = state_after(8)
    make_learner(5).fit(3, resume=state)
    seen = [re.match(r'epoch (\d/3 \w+ \d)', bar).group(1) for bar in shown[-1].bars]  # type: ignore[union-attr]
    second = [f'2/3 train {i}' for i in (3, 4, 5)] + [f'2/3 valid {i}' for i in range(3)]
    third = [f'3/3 train {i}' for i in range(6)] + [f'3/3 valid {i}' for i in range(3)]
    assert list(dict.fromkeys(seen)) == second + third
    [last] = {bar for bar in shown[-1].bars if '3/3 train 5/5' in bar}
    assert last.endswith('fit --:-- left')


def test_a_row_within_the_epoch_shows_how_much_of_it_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = state_after(8, eval_every='2ba')
    capsys.readouterr()
    make_learner(5, eval_every='2ba').fit(3, resume=state)
    head, *rows = capsys.readouterr().out.strip().splitlines()
    assert head.split() == ['epoch', 'train_loss', 'valid_loss', 'time']
    assert [row.split()[0] for row in rows] == ['2.00', '1', '2.40', '2.80', '2']


def test_the_remaining_time_is_estimated_from_the_resumed_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = use_clock(monkeypatch, 'learnkit.callbacks.progress').now - 10
    assert Bar('train', 100, 60, first=50, started=began).text() == 'train 60/100 60% 00:10<00:40'
    assert Bar('train', 100, 50, first=50, started=began).text() == 'train 50/100 50% 00:10<?'
    assert Bar('train', None, 60, first=50, started=began).text() == 'train 60 batches 00:10 1.0/s'


# -- for real: a pipe, a terminal, a notebook ------------------------------------------------------


SCRIPT = textwrap.dedent("""
    import time, torch
    from torch import nn
    from learnkit.engine.callback import Callback
    from learnkit.data.dataloaders import DataLoaders
    from learnkit.learner import Learner

    torch.set_num_threads(1)
    batch = torch.ones(2, 1), torch.ones(2, 1)

    def make_learner(n=500, n_valid=50, wait_s=0., stop=None):
        def after_batch(cb):
            time.sleep(wait_s)
            if stop == (cb.epoch, cb.iter): raise KeyboardInterrupt
        dls = DataLoaders([batch] * n, [batch] * n_valid)
        return Learner(dls, nn.Linear(1, 1), loss_func=nn.functional.mse_loss, cbs=Callback(after_batch=after_batch))
""")


def run_script(code: str, terminal: int = -1) -> str:
    "Run the script and the code in a forked process on a terminal; return what it prints elsewhere."

    def job() -> None:
        if terminal >= 0:
            os.environ.update(TERM='xterm', COLUMNS='100', LINES='24')
            for fd in range(3):
                os.dup2(terminal, fd)
            sys.stdout, sys.stderr = (os.fdopen(fd, 'w', 1, closefd=False) for fd in (1, 2))
        exec(SCRIPT + textwrap.dedent(code), {'__name__': '__main__'})

    with start(job) as child:
        assert child.wait() == 0, child.stderr
        return child.stdout


def test_a_pipe_gets_lines_without_control_characters() -> None:
    out = run_script("""
        import sys
        for name in [name for name in sys.modules if name.split('.')[0] == 'IPython']: del sys.modules[name]
        make_learner(60, 5, wait_s=0.002).fit(2)
        print("IPython" in sys.modules)""")
    assert len(out.splitlines()) == 4
    assert not re.search(r'[\x00-\x09\x0b-\x1f\x7f]', out)
    assert out.endswith('False\n')  # it is not imported to find out that this is no notebook


def read_terminal(code: str) -> str:
    "Run Python code on a new terminal and return its output."
    master, slave = pty.openpty()
    out = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(master, 65536):
                out.extend(chunk)
        except OSError:
            pass  # Linux's error when the other end is closed

    reader = threading.Thread(target=read)
    reader.start()
    try:
        run_script(code, slave)
    finally:
        os.close(slave)
        reader.join()
        os.close(master)
    return out.decode()


@pytest.fixture(scope='module')
def terminal() -> list[str]:
    "Return the terminal output of three runs."
    return read_terminal("""
        make_learner(40, 40, wait_s=0.004).fit(2)
        print('==')
        try: make_learner(100, wait_s=0.002, stop=(0, 70)).fit(2)
        except KeyboardInterrupt: print('==')
        """).split('==')


def test_a_terminal_shows_bars_and_keeps_the_rows(terminal: list[str]) -> None:
    assert re.search(r'epoch 1/2 train: +\d+%\|.*\| \d+/40 \[.*loss \d\.\d+', terminal[0])
    assert 'epoch 2/2 valid:' in terminal[0]
    assert terminal[0].count('valid_loss') == 1

    lines = on_screen(terminal[0])
    assert [line.split()[0] for line in lines] == ['epoch', '0', '1']
    assert len({len(line) for line in lines}) == 1


def test_a_terminal_keeps_the_bar_that_was_stopped(terminal: list[str]) -> None:
    [line] = on_screen(terminal[1])
    assert re.match(r'stopped at epoch 1/2 train: +71%\|.*\| 71/100 \[', line)


@pytest.fixture(scope='module')
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    "Return a notebook that was executed in a new kernel, saved and read."
    nbformat = pytest.importorskip('nbformat')
    pytest.importorskip('ipykernel')
    pytest.importorskip('nbclient')
    from tests.helpers.notebooks import make_client

    cells = [
        SCRIPT,
        'make_learner(100, 10, wait_s=0.001).fit(5)',
        'make_learner(100, 5, wait_s=0.002, stop=(1, 60)).fit(3)',
        'make_learner(1, 220, wait_s=0.0025).validate()',
    ]
    folder = tmp_path_factory.mktemp('notebook')
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = make_client(nb, allow_errors=True)
    with warnings.catch_warnings():
        # warnings of the client and its sockets: the kernel is another process
        warnings.simplefilter('ignore')
        client.execute(env=kernel_env(folder))
    nbformat.write(nb, folder / 'run.ipynb')
    return nbformat.read(folder / 'run.ipynb', 4)


@pytest.mark.notebook
def test_a_notebook_keeps_one_output_with_table_and_text(notebook: Any) -> None:
    [output] = notebook.cells[1].outputs
    html, text = output.data['text/html'], output.data['text/plain']
    assert len(json.dumps(output)) < 2_000
    assert len(re.findall('<tr>', html)) == 6
    assert [line.split()[0] for line in text.splitlines()] == ['epoch', '0', '1', '2', '3', '4']
    for number in re.findall(r'<td>(.*?)</td>', html):
        assert number in text
    # nothing of a run that is under way or was stopped; a theme's color is behind the heading
    assert '<progress' not in html and not re.search(r'(?<![\w-])color', html)


@pytest.mark.notebook
def test_a_notebook_keeps_the_bar_that_was_stopped(notebook: Any) -> None:
    output, error = notebook.cells[2].outputs
    assert error.ename == 'KeyboardInterrupt'
    assert '<progress value="61" max="100">' in output.data['text/html']
    last = output.data['text/plain'].splitlines()[-1]
    assert re.fullmatch(
        rf'stopped at epoch 2/3 train 61/100 61% {CLOCK}<{CLOCK} loss \d\.\d+', last
    )
    assert len(output.data['text/plain'].splitlines()) == 3


@pytest.mark.notebook
def test_a_notebook_is_blank_after_validate(notebook: Any) -> None:
    shown, result = notebook.cells[3].outputs
    assert shown.data == {'text/html': '', 'text/plain': ''}
    assert result.output_type == 'execute_result'
