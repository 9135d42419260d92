"""Notebooks in JupyterLab, in a browser: during training, after it, and when the file is opened again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest

from tests.helpers.lab import ROOT, Lab, Notebook, fresh_page

pytestmark = pytest.mark.browser

QUICKSTART = ROOT / 'nbs/01_quickstart.ipynb'

# What somebody tries out, a cell at a time. The fit of the second one is slow on purpose.
SETUP, SLOW, QUICK, CALLBACK, TYPED = range(5)
CELLS = """
import time
import torch
from torch import nn
from torch.nn import functional as F
from learnkit import Callback, DataLoaders, Learner

torch.manual_seed(0)
x = torch.randn(1000, 10)
y = x @ torch.randn(10, 1)
dls = DataLoaders.from_tensors((x, y), (x[:200], y[:200]), bs=20, seed=0)
learn = Learner(dls, nn.Linear(10, 1), F.mse_loss, lr=1e-2)

#
learn.fit(200, cbs=Callback(after_step=lambda cb: time.sleep(0.01)))

#
learn.fit(2)

#
class Count(Callback):
    def before_fit(self): self.n_steps_seen = 0
    def after_step(self): self.n_steps_seen += 1

learn.add_cb(Count())
cb = learn.count
len([c for c in learn.cbs if type(c).__name__ == 'Count'])

#
cb.lo
"""


@pytest.fixture(scope='module')
def trials(lab: Lab, browser: Any) -> Iterator[Notebook]:
    "Open a notebook with the cells above, the first of which has run."
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS.split('#\n')]
    lab.add('trials.ipynb', nbformat.v4.new_notebook(cells=cells))
    with fresh_page(browser) as page:
        nb = Notebook(page, lab, 'trials.ipynb')
        nb.run(SETUP)
        yield nb


def rows(output: Any) -> list[list[str]]:
    "Return a table's cells as text, the header first."
    return [
        [cell.strip() for cell in row.split('\t')] for row in output.locator('tr').all_inner_texts()
    ]


def steady_heights(nb: Notebook, n: int) -> Any:
    "Measure the height of a cell's outputs at each drawn frame for a second."
    return (
        nb.cells()
        .nth(n)
        .locator('.jp-OutputArea')
        .first.evaluate("""area => new Promise(done => {
        const heights = [], end = performance.now() + 1000
        const look = now => { heights.push(area.offsetHeight); now < end ? requestAnimationFrame(look) : done(heights) }
        requestAnimationFrame(look)})""")
    )


def test_the_quick_start(lab: Lab, page: Any) -> None:
    lab.add(QUICKSTART.name, nbformat.read(QUICKSTART, as_version=4))
    nb = Notebook(page, lab, QUICKSTART.name)
    n_cells = nb.cells().count()
    nb.run_all()
    nb.wait(lambda: nb.count(n_cells - 1) == n_cells or nb.faults())
    nb.stretch()
    nb.shoot('quickstart')
    assert not nb.faults()
    assert [nb.count(i) for i in range(n_cells)] == list(range(1, n_cells + 1))

    sources = [cell.source for cell in nb.save().cells if cell.cell_type == 'code']
    [fit, *_] = [
        i for i, source in enumerate(sources) if re.search(r'^learn\.fit\(5\)$', source, re.M)
    ]
    header, *body = rows(nb.outputs(fit))
    assert header == ['epoch', 'train_loss', 'valid_loss', 'accuracy', 'time']
    assert [row[0] for row in body] == ['0', '1', '2', '3', '4']
    assert all(float(value) >= 0 for row in body for value in row[1:4])
    assert float(body[-1][3]) > 0.9
    assert nb.outputs(fit).count() == 1
    assert nb.cells().locator('progress').count() == 0  # a bar is gone when its run has ended

    [plot] = [i for i, source in enumerate(sources) if 'plot_loss' in source]
    assert nb.outputs(plot).locator('img').count() == 1
    for image in nb.cells().locator('.jp-OutputArea-output img').all():
        box = image.bounding_box()
        assert image.evaluate('e => e.complete && e.naturalWidth > 0')
        assert min(box['width'], box['height']) > 50


def test_an_interrupted_fit_trains_on_and_stays_readable(trials: Notebook, browser: Any) -> None:
    nb = trials
    nb.start(SLOW)
    nb.wait(lambda: len(rows(nb.outputs(SLOW))) > 2)
    heights = steady_heights(nb, SLOW)
    # it grows with the table, and never shrinks between
    assert len(heights) > 10 and heights == sorted(heights)
    assert nb.outputs(SLOW).count() == nb.outputs(SLOW).locator('progress').count() == 1
    assert re.match(r'epoch \d+/200 (train|valid) \d+/\d+ ', nb.bar_text(SLOW))
    nb.stretch()
    nb.shoot('running')

    nb.page.locator('jp-button[data-command="notebook:interrupt-kernel"]').click()
    nb.wait(lambda: nb.count(SLOW) is not None)
    assert nb.outputs(SLOW).count() == 2
    [fault] = nb.faults()
    assert 'KeyboardInterrupt' in fault
    final, table = nb.bar_text(SLOW), rows(nb.outputs(SLOW).first)
    [(epoch, done, total)] = re.findall(
        r'^stopped at epoch (\d+)/200 (?:train|valid) (\d+)/(\d+) ', final
    )
    assert [row[0] for row in table] == ['epoch', *map(str, range(len(table) - 1))]
    assert int(epoch) - len(table) in (0, -1)  # -1: its row was just written

    nb.run(QUICK)
    assert [row[0] for row in rows(nb.outputs(QUICK))] == ['epoch', '0', '1']
    # from the weights where it was stopped
    assert float(rows(nb.outputs(QUICK))[1][1]) < float(table[1][1])
    nb.stretch()
    nb.shoot('interrupted')

    nb.save()
    foreign = nb.path.with_name('of-somebody-else.ipynb')  # not trusted: JupyterLab strips its HTML
    foreign.write_text(nb.path.read_text().replace('seed=0', 'seed=1'))
    for path in (nb.path, foreign):
        with fresh_page(browser) as page:
            again = Notebook(page, nb.lab, path.name)
            assert (again.bar_text(SLOW), rows(again.outputs(SLOW).first)) == (final, table)
            shown = again.outputs(SLOW).locator('progress').evaluate('e => e.position')
            assert shown == pytest.approx(int(done) / int(total))
            again.stretch()
            again.shoot(f'reopened-{path.stem}')


def test_a_cell_that_is_run_again_replaces_its_callback(trials: Notebook) -> None:
    for _ in range(2):
        trials.run(CALLBACK)
        assert trials.outputs(CALLBACK).inner_text().strip() == '1'


def test_tab_offers_what_the_learner_has(trials: Notebook) -> None:
    trials.run(QUICK)
    trials.run(CALLBACK)
    trials.write(TYPED, 'cb.lo')
    trials.page.keyboard.press('Tab')
    trials.page.locator('.jp-Completer-item').first.wait_for()
    trials.shoot('completion')
    offered = [
        item.split()[1] for item in trials.page.locator('.jp-Completer-item').all_inner_texts()
    ]
    assert {'loss', 'loss_func', 'log'} <= {*offered}
