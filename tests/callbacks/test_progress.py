"""Progress output of a run in a notebook, a terminal and a pipe."""

import io
import json
import os
import pty
import re
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
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
    NotebookDisplay,
    ProgressCallback,
    Table,
    TerminalDisplay,
    make_display,
)
from learnkit.core.errors import CancelFitException
from learnkit.data import DataLoaders
from learnkit.engine.callback import Callback
from learnkit.engine.train_eval import TrainEvalCallback
from learnkit.learner import Learner
from tests.helpers.clock import use_clock
from tests.helpers.forks import start
from tests.helpers.kernel import kernel_env, kernel_name

CLOCK = r'\d\d:\d\d'


class Forgetful:
    "A loader of unknown length."

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return iter(batches(self.n))


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


def test_rows_without_names_have_no_header() -> None:
    table = Table()
    assert table.add([], [0, 1.5]) == ['0  1.500000']
    assert '<th' not in table.html(200)


def test_many_rows_are_folded_behind_the_first() -> None:
    table = Table()
    for i in range(5000):
        table.add(['epoch'], [i])
    rows = re.findall(r'<td[^>]*>(.*?)</td>', table.html(200))
    # the first line is the header
    assert rows[:10] == [*map(str, range(9)), '... 4801 more, in learn.history ...']
    assert rows[10:] == [*map(str, range(4810, 5000))]
    assert len(table.text(200).splitlines()) == 201  # 200 lines and the note


def test_names_and_values_are_escaped() -> None:
    table = Table()
    table.add(['<b>a</b>', 'pair'], ['<script>', torch.tensor([[1], [2]])])
    assert '<script>' not in table.html(9) and '&lt;b&gt;' in table.html(9)
    assert table.text(9).count('\n') == 1  # a tensor's lines are joined


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


def test_bar_before_its_first_batch_does_not_guess() -> None:
    assert Bar('train', 8).text() == 'train 0/8 0% 00:00<?'


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


def test_plain_lines_are_flushed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed = self.getvalue().count('\n')

    stream, seen = Stream(), []
    monkeypatch.setattr(sys, 'stdout', stream)
    make_learner(cbs=Callback(before_epoch=lambda cb: seen.append(stream.flushed))).fit(3)
    assert seen == [0, 2, 3]  # the header comes with the first row


def test_a_column_that_is_logged_later_starts_a_new_header(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def log(cb: Any) -> None:
        if cb.epoch == 1:
            cb.learn.log('extra', 2.0)

    make_learner(cbs=Callback(after_batch=log)).fit(2)
    heads = [line for line in capsys.readouterr().out.splitlines() if 'epoch' in line]
    assert ['extra' in head for head in heads] == [False, True]


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
@pytest.mark.parametrize('event', ['before_epoch', 'after_batch', 'before_validate'])
def test_logger_is_print_after_any_end(
    event: str, error: type[BaseException], shown: list[Recording]
) -> None:
    learn = make_learner()
    try:
        learn.fit(1, cbs=raising(event, error()))
    except error:
        pass
    assert learn.logger is print
    assert len(shown[0].closed) == 1


def test_logger_is_print_after_a_callback_left_its_own_behind() -> None:
    def wrap(cb: Any) -> None:
        cb.learn.logger = lambda row: None

    cbs = [Callback(before_epoch=wrap), raising('before_train', KeyboardInterrupt())]
    learn = make_learner(cbs=cbs)
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1)
    assert learn.logger is print


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


def test_a_loader_without_length_has_no_total(shown: list[Recording]) -> None:
    make_learner(Forgetful(4)).fit(1)
    train = [bar for bar in shown[0].bars if 'train' in bar]
    assert re.fullmatch(r'epoch 1/1 train 4 batches --:-- \d+\.\d/s loss \d\.\d+', train[-1])


@pytest.mark.parametrize('run', [Learner.validate, Learner.get_preds])
def test_evaluation_alone_shows_an_inner_bar(
    run: Callable[[Learner], Any], shown: list[Recording]
) -> None:
    learn = make_learner()
    run(learn)
    assert [bar.split()[:2] for bar in shown[0].bars][-1] == ['valid', '2/2']
    assert shown[0].closed == [None]
    assert not shown[0].table.lines


def test_a_short_evaluation_alone_shows_nothing(
    shown: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learnkit.callbacks.progress, 'PATIENCE_S', 0.5)
    make_learner().validate()
    assert shown[0].bars == []


def test_no_mbar_leaves_out_the_epochs(shown: list[Recording]) -> None:
    learn = make_learner()
    with learn.no_mbar():
        learn.fit(2)
    assert shown[0].bars[0].startswith('train 0/3')
    assert 'left' not in ''.join(shown[0].bars)


def test_no_bar_is_silent_but_for_the_rows_of_print(shown: list[Recording]) -> None:
    learn = make_learner()
    with learn.no_bar():
        learn.fit(1)
    assert shown == []
    learn.fit(1)
    assert len(shown) == 1


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


def test_works_without_a_recorder(shown: list[Recording]) -> None:
    make_learner(default_cbs=False, cbs=[TrainEvalCallback(), ProgressCallback()]).fit(1)
    assert re.match(r'epoch 1/1 valid 2/2', shown[0].bars[-1])
    assert not shown[0].table.lines


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


# -- for real: a pipe, a terminal, a notebook ------------------------------------------------------


SCRIPT = textwrap.dedent("""
    import time, torch
    from torch import nn
    from learnkit.engine.callback import Callback
    from learnkit.data.dataloaders import DataLoaders
    from learnkit.learner import Learner

    torch.set_num_threads(1)
    batch = torch.ones(2, 1), torch.ones(2, 1)

    def make_learner(n=500, n_valid=50, wait_s=0., stop=None, loader=list):
        def after_batch(cb):
            time.sleep(wait_s)
            if stop == (cb.epoch, cb.iter): raise KeyboardInterrupt
        dls = DataLoaders(loader([batch] * n), [batch] * n_valid)
        return Learner(dls, nn.Linear(1, 1), loss_func=nn.functional.mse_loss, cbs=Callback(after_batch=after_batch))

    class Forgetful:
        def __init__(self, items): self.items = items
        def __iter__(self): return iter(self.items)
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
        make_learner(40, 1, wait_s=0.004, loader=Forgetful).fit(1)
        make_learner(1, 160, wait_s=0.004).validate()
        print('==')
        def say(cb):
            if cb.training and cb.iter in (20, 30):
                print('batch', cb.iter, end=' ')
                time.sleep(0.12)
                print('is over')
                print('careful', file=sys.stderr)
        import sys
        before = sys.stdout, sys.stderr
        make_learner(40, 1, wait_s=0.006).fit(1, cbs=Callback(after_batch=say))
        assert before == (sys.stdout, sys.stderr)
        print('==')
        def press(cb):
            if cb.training and cb.iter == 30:
                os.write(1, b'^C')  # as the terminal shows it
                raise KeyboardInterrupt
        import os
        try: make_learner(40, 1, wait_s=0.006).fit(1, cbs=Callback(after_batch=press))
        except KeyboardInterrupt: pass""").split('==')


def test_a_terminal_shows_bars_and_keeps_the_rows(terminal: list[str]) -> None:
    assert re.search(r'epoch 1/2 train: +\d+%\|.*\| \d+/40 \[.*loss \d\.\d+', terminal[0])
    assert 'epoch 2/2 valid:' in terminal[0]
    assert terminal[0].count('valid_loss') == 1

    lines = on_screen(terminal[0])
    assert [line.split()[0] for line in lines] == ['epoch', '0', '1']
    assert len({len(line) for line in lines}) == 1


def test_a_terminal_keeps_the_bar_that_was_stopped(terminal: list[str]) -> None:
    [line] = on_screen(terminal[1])
    assert re.match(r'stopped at epoch 1/2 train: +70%\|.*\| 70/100 \[', line)


def test_a_terminal_counts_without_total_and_clears_up_after_validate(terminal: list[str]) -> None:
    assert re.search(r'epoch 1/1 train: \d+it \[', terminal[2])
    assert re.search(r'\rvalid: +\d+%', terminal[2])
    assert [line.split()[0] for line in on_screen(terminal[2])] == ['epoch', '0']


def test_what_is_printed_on_a_terminal_stands_above_the_bar(terminal: list[str]) -> None:
    expected_lines = ['batch 20 is over', 'careful', 'batch 30 is over', 'careful']
    *printed, head, row = on_screen(terminal[3])
    assert printed == expected_lines and head.split()[0] == 'epoch' and row.split()[0] == '0'
    # the bar is back at once
    assert re.search(r'careful\r\n\r[^\n]*epoch 1/1 train: ', terminal[3])


def test_ctrl_c_leaves_one_bar(terminal: list[str]) -> None:
    [line] = on_screen(terminal[4])
    assert re.match(r'stopped at epoch 1/1 train: +75%\|', line) and '^C' not in line


@pytest.fixture(scope='module')
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    "Return a notebook that was executed in a new kernel, saved and read."
    nbformat = pytest.importorskip('nbformat')
    nbclient = pytest.importorskip('nbclient')
    pytest.importorskip('ipykernel')
    cells = [
        SCRIPT,
        'make_learner(100, 10, wait_s=0.001).fit(5)',
        'make_learner(100, 5, wait_s=0.002, stop=(1, 60)).fit(3)',
        'make_learner(1, 220, wait_s=0.0025).validate()',
        'make_learner(60, wait_s=0.002, loader=Forgetful, stop=(0, 50)).fit(1)',
        'make_learner(2, 1).fit(300)',
        'learn = make_learner()\nwith learn.no_logging(): learn.fit(1)',
        'make_learner().fit(0)',
        'for _ in range(3): make_learner().validate()',
    ]
    folder = tmp_path_factory.mktemp('notebook')
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = nbclient.NotebookClient(nb, kernel_name=kernel_name(), allow_errors=True, timeout=600)
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
    assert '<progress value="60" max="100">' in output.data['text/html']
    last = output.data['text/plain'].splitlines()[-1]
    assert re.fullmatch(
        rf'stopped at epoch 2/3 train 60/100 60% {CLOCK}<{CLOCK} loss \d\.\d+', last
    )
    assert len(output.data['text/plain'].splitlines()) == 3


@pytest.mark.notebook
def test_a_notebook_is_blank_after_validate(notebook: Any) -> None:
    shown, result = notebook.cells[3].outputs
    assert shown.data == {'text/html': '', 'text/plain': ''}
    assert result.output_type == 'execute_result'


@pytest.mark.notebook
def test_a_notebook_folds_what_is_too_long(notebook: Any) -> None:
    [output] = notebook.cells[5].outputs
    assert '... 101 more, in learn.history ...' in output.data['text/plain']
    assert len(output.data['text/plain'].splitlines()) == NotebookDisplay.max_rows + 1


@pytest.mark.notebook
def test_a_notebook_shows_no_rows_where_there_are_none(notebook: Any) -> None:
    [output] = notebook.cells[6].outputs
    assert output.data['text/html'] == ''
    assert notebook.cells[7].outputs == []
    assert notebook.cells[8].outputs == []
