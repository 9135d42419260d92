"""Programs whose resume is exact: the first checkpoint names nothing."""

from functools import partial
from typing import Any

from tests.checkpoint.hidden_state import EXACT
from tests.silent.cases import case
from tests.silent.cases_rehearsal import judged

alarm = partial(case, 'alarms')


@alarm('an entry of the state dict that the class of a module saves', old='false alarm')
def own_entry() -> Any:
    return judged(EXACT['own entry of the state dict']), 'exact'


@alarm('a loss function and an attribute that before_epoch sets', old='false alarm')
def set_each_epoch() -> Any:
    return judged(EXACT['set in each epoch']), 'exact'
