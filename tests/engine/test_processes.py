"""Training in one process, of which a launcher may have started several."""

import warnings

import pytest

from learnkit.engine.processes import OneProcess, warn_of_other_processes
from learnkit.testing import synth_learner


def test_a_process_that_trains_alone_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warn_of_other_processes.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        for n in ('1', '3', '3', 'many'):
            monkeypatch.setenv('WORLD_SIZE', n)
            with OneProcess().run(synth_learner(), 'fit'):
                pass
    assert [str(w.message)[:23] for w in seen] == ['3 processes were starte']
    warn_of_other_processes.cache_clear()
