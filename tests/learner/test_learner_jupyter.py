"""A Learner in a real Jupyter kernel: HTML, outputs, the stop button, repeated cells, completion, tracebacks."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.kernel import Kernel, running_kernel

nbformat = pytest.importorskip('nbformat')
pytest.importorskip('jupyter_client')
pytest.importorskip('ipykernel')
pytestmark = pytest.mark.notebook

SETUP = """
import time, warnings
warnings.filterwarnings('error', module=r'__main__|learnkit\\b')
import torch
torch.set_num_threads(1)
from learnkit import *
from learnkit.testing import synth_learner

class Slow(Callback):
    def __init__(self, wait_s): self.wait_s = wait_s
    def after_batch(self): time.sleep(self.wait_s)

learn = synth_learner(n_train=40)
learn.fit(2)
"""


@pytest.fixture(scope='module')
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with running_kernel(tmp_path_factory.mktemp('kernel'), SETUP) as kernel:
        yield kernel


def plain(error: Any) -> str:
    "Return a traceback without its colors."
    return re.sub(r'\x1b\[[0-9;]*m', '', '\n'.join(error.traceback))


def frames(error: Any) -> list[str]:
    "Return the functions shown in a traceback."
    shown = re.findall(r'^(Cell|File) (.*?)(?:, in (.*?)\(.*)?$', plain(error), re.M)
    return [function or where for _, where, function in shown]


# -- looks

LOOKS = {
    'learn': '2 parameters',
    'learn.history': 'valid_loss',
}


@pytest.mark.parametrize(('expression', 'expected'), LOOKS.items(), ids=LOOKS)
def test_it_is_shown_as_a_table_in_the_pages_colours_and_as_text(
    kernel: Kernel, expression: str, expected: str
) -> None:
    [output] = kernel.run(expression)
    html, text = output.data['text/html'], output.data['text/plain']
    assert expected in html and '<table' in html and html.count('<tr>') == html.count('</tr>') > 0
    assert not re.search(r'(?<!border-)color|background|<script|<style|https?:', html)
    assert text and len(text) < 3000 and len(html) < 5000


# -- outputs of a fit


def fit(kernel: Kernel, n_batches: int, n_epoch: int, cbs: str = '') -> list[Any]:
    return kernel.run(f'synth_learner(n_train={n_batches}, cbs=[{cbs}]).fit({n_epoch})')


def test_a_fit_is_one_output_whatever_its_length(kernel: Kernel) -> None:
    [short], [long] = fit(kernel, 20, 5), fit(kernel, 500, 5)
    assert abs(len(json.dumps(long)) - len(json.dumps(short))) < 100
    assert len(json.dumps(long)) < 2000
    [once] = fit(kernel, 500, 1)
    row = (len(json.dumps(long)) - len(json.dumps(once))) / 4
    assert row < 250  # bytes an epoch


def test_the_output_is_updated_ten_times_a_second_at_most(kernel: Kernel) -> None:
    began = float(kernel.value('time.perf_counter()'))
    fit(kernel, 100, 3, 'Slow(0.003)')
    n = kernel.n_messages
    seconds = float(kernel.value('time.perf_counter()')) - began
    assert 3 < n <= 10 * seconds + 10  # and one for each epoch's row, and the cell's own


def test_the_graph_is_one_picture_that_is_kept(kernel: Kernel) -> None:
    table, graph = fit(kernel, 150, 4, 'ShowGraph(), Slow(0.002)')
    assert 'text/html' in table.data
    assert graph.data['text/plain'] == 'losses of 600 steps'
    assert 5_000 < len(graph.data['image/png']) < 80_000
    assert kernel.value('__import__("matplotlib.pyplot").pyplot.get_fignums()') == '[]'


# -- the stop button


@pytest.fixture(scope='module')
def stopped(kernel: Kernel) -> list[Any]:
    "Return the outputs after the kernel was interrupted in the middle of a fit."
    code = 'learn = synth_learner(n_train=300, cbs=[ShowGraph(), Slow(0.005)])\nlearn.fit(3)'
    return kernel.run(code, interrupt_at=r'train [2-9]\d')


def test_an_interrupted_fit_shows_how_far_it_was(stopped: list[Any]) -> None:
    table, graph, error = stopped
    assert re.match(r'stopped at epoch 1/3 train \d\d+/300', table.data['text/plain'])
    assert '<progress' in table.data['text/html'] and 'image/png' in graph.data
    assert error.ename == 'KeyboardInterrupt'
    assert re.search(r'\nin (train|Slow.after_batch|\w+\.\w+) \(epoch 0, batch \d+\)', plain(error))
    assert {'Loop._with_events', 'HasCallbacks.__call__', 'Loop._do_fit'}.isdisjoint(frames(error))


def test_the_next_cell_trains_on(kernel: Kernel, stopped: list[Any]) -> None:
    assert kernel.value('learn.run.depth, learn.time.ba >= 20') == '0 True'
    table, graph = kernel.run('learn.cbs[-1].wait_s = 0\nlearn.fit(2)')
    expected = ['epoch', '0', '1']
    assert [line.split()[0] for line in table.data['text/plain'].splitlines()] == expected
    assert graph.data['text/plain'].startswith('losses of 600 steps')
    assert kernel.value('len(learn.history)') == '2'


def test_a_saved_notebook_is_whole_as_html(kernel: Kernel, stopped: list[Any]) -> None:
    exporter = pytest.importorskip('nbconvert').HTMLExporter(embed_images=True)
    done = fit(kernel, 20, 2)
    cells = [
        nbformat.v4.new_code_cell(f'# {i}', outputs=outputs)
        for i, outputs in enumerate((stopped, done))
    ]
    cells.append(nbformat.v4.new_code_cell('learn', outputs=kernel.run('learn')))
    page, _ = exporter.from_notebook_node(nbformat.v4.new_notebook(cells=cells))
    body = page[page.index('<main') :]
    assert re.search(r'<progress [^>]*max="300"[^>]*></progress> stopped at epoch 1/3 train', body)
    assert 'data:image/png;base64,' in body
    assert body.count('<th>valid_loss</th>') == 1 and '>callbacks</th>' in body


# -- cells run again, Tab


def test_a_cell_that_runs_again_replaces_its_callback(kernel: Kernel) -> None:
    cell = """
class Mine(Callback):
    def after_fit(self): print('version {}')
learn.add_cb(Mine())
[type(cb).__name__ for cb in learn.cbs].count('Mine')"""
    kernel.run('learn = synth_learner(n_train=1)')
    for version in (1, 2, 3):
        [output] = kernel.run(cell.format(version))
        assert output.data['text/plain'] == '1'
    assert (
        kernel.run('with learn.no_bar(), learn.no_logging(): learn.fit(1)')[0].text == 'version 3\n'
    )


@pytest.mark.parametrize('jedi', [True, False])
def test_tab_on_a_callback_offers_what_the_learner_has(kernel: Kernel, jedi: bool) -> None:
    kernel.run(f'%config Completer.use_jedi = {jedi}\ncb = learn.recorder')
    offered = {name.rpartition('.')[2] for name in kernel.completions('cb.')}
    assert {'loss', 'epoch', 'xb', 'opt', 'dls', 'model', 'after_batch', 'plot_loss'} <= offered
    assert {name.rpartition('.')[2] for name in kernel.completions('cb.pct')} >= {'pct_train'}


# -- tracebacks


@pytest.mark.parametrize('event', ['before_fit', 'after_loss', 'after_validate', 'after_epoch'])
def test_a_traceback_shows_the_cell_and_the_callback(kernel: Kernel, event: str) -> None:
    *_, error = kernel.run(f"""
class Mine(Callback):
    def {event}(self):
        1 / 0
synth_learner(n_train=40, cbs=Mine()).fit(1)""")
    cell, own = frames(error)
    assert cell.startswith('In[') and own == f'Mine.{event}'
    assert '----> 3         1 / 0' in plain(error)
    assert plain(error).splitlines()[-1].startswith(f'in Mine.{event} (epoch 0')
    assert 'skipping hidden' in plain(error)


# -- stop, look, change, resume

FIT = """
def make(wait_s):
    torch.manual_seed(0)
    return synth_learner(n_train=60, lr=0.05, cbs=[Slow(wait_s)])

def weights(learn): return [p.detach().clone() for p in learn.model.parameters()]

straight = make(0)
torch.manual_seed(1)
with straight.no_bar(): straight.fit_one_cycle(3)
learn = make(0.02)
torch.manual_seed(1)
"""


def test_the_stop_button_then_another_cell_then_resume(kernel: Kernel) -> None:
    kernel.run(FIT)
    for code, at in (('learn.fit_one_cycle(3)', '[1-9]'), ('learn.resume()', r'[2-5]\d')):
        error = kernel.run(code, interrupt_at=f'train {at}/')[-1]
        assert error.ename == 'KeyboardInterrupt' and 'learn.resume()' in error.evalue
        n = kernel.value('learn.time.ba')
        assert f'{n}ba' in error.evalue and 0 < int(n) < 180
        [samples] = kernel.run('learn.paused.samples()')
        assert '>loss</th>' in samples.data['text/html']
        assert 'learn.resume()' in kernel.run('learn')[0].data['text/html']
        kernel.run('learn.validate(); torch.rand(3)')
    kernel.run('learn.slow.wait_s = 0')
    [table] = kernel.run('learn.resume()')
    assert [line.split()[0] for line in table.data['text/plain'].splitlines()][-1] == '2'
    assert kernel.value('learn.paused, len(learn.history), learn.time.ba') == 'None 3 180'
    assert kernel.value('all(map(torch.equal, weights(learn), weights(straight)))') == 'True'
    same = 'learn.recorder.smooth_loss.raw == straight.recorder.smooth_loss.raw'
    assert kernel.value(same) == 'True'


def test_the_stop_button_then_a_lower_rate(kernel: Kernel) -> None:
    kernel.run(FIT)
    kernel.run('learn.fit_one_cycle(3)', interrupt_at=r'train [1-9]\d*/')
    n = kernel.value('learn.time.ba')
    kernel.run('learn.slow.wait_s = 0')
    line, table = kernel.run('learn.resume(lr_scale=0.5)')
    assert table.output_type == 'display_data', plain(table)
    assert line.text == f'{n}ba: lr 0.05 -> 0.025\n'
    factors = '[a / b for a, b in zip(learn.recorder.lrs, straight.recorder.lrs)]'
    expected = [1.0] * int(n) + [0.5] * (180 - int(n))
    assert json.loads(kernel.value(factors)) == pytest.approx(expected)


def test_an_error_in_a_cell_that_is_corrected_and_run_again(kernel: Kernel) -> None:
    kernel.run(FIT)
    cell = """
class Note(Callback):
    def __init__(self): self.losses = []
    def before_batch(self):
        if self.training and self.time.ba == 70: self.losses.append({})
"""
    kernel.run(cell.format('self.lossess'))
    kernel.run('learn.slow.wait_s = 0; learn.add_cb(Note())')
    error = kernel.run('learn.fit_one_cycle(3)')[-1]
    assert error.ename == 'MissingAttribute'
    kernel.run(cell.format('self.loss'))
    kernel.run('learn.resume()')
    assert kernel.value('len(learn.note.losses), learn.time.ba') == '1 180'
    assert kernel.value('all(map(torch.equal, weights(learn), weights(straight)))') == 'True'
