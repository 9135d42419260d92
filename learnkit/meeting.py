"""How processes that a launcher has started meet: over its store, also when it is not the first time."""
from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from secrets import token_hex
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from learnkit.errors import DistributedError

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ['meeting', 'has_met', 'agree']


_stores: dict[tuple[str, int], Store] = {}  # that this process has met others over


def meeting(
    said: Mapping[str, str],   # of this process, by torchrun's names
    wait: timedelta,           # the longest that others are waited for
) -> dict[str, Any]:
    """Return what `init_process_group` needs besides torchrun's variables: a store in which nothing was said before.

    torchrun's own store outlives the processes that it starts again, and what they have said in it is still there: a
    process would call others at addresses where they are no more. And the store of the first process, where torchrun
    has none, would end while others may still come to it, when the same processes meet a second time.
    """
    from torch.distributed import PrefixStore, TCPStore
    rank, size, place = int(said['RANK']), int(said['WORLD_SIZE']), (said['MASTER_ADDR'], int(said['MASTER_PORT']))
    if place not in _stores:
        is_host = rank == 0 and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'
        _stores[place] = TCPStore(*place, None, is_host, wait, wait_for_workers=False)
    prefix = agree(_stores[place], rank, size, wait.total_seconds())
    return {'store': PrefixStore(prefix, _stores[place]), 'rank': rank, 'world_size': size}


def has_met() -> bool:
    "Tell whether this process has ever met others, by what a launcher says."
    return bool(_stores)


def agree(
    store: Store,       # in which processes that are gone may have said the same
    rank: int,
    size: int,
    timeout_s: float,
) -> str:
    """Return a text that all processes that are there now know, and none that was there before.

    Each says a word of its own. The first repeats all that it hears, with the text, until each has answered that it
    has heard its own word: nobody who is gone could have known that. Raises `DistributedError` when one does not come.
    """
    me, end, nap_s = token_hex(8), monotonic() + timeout_s, max(0.01, size / 5000)
    words, answers = ([f'learnkit/{what}/{r}' for r in range(size)] for what in ('word', 'answer'))
    store.set(words[rank], me)
    while monotonic() < end:
        if rank == 0:
            if not store.check(words): sleep(nap_s); continue
            store.set('learnkit/heard', json.dumps([word.decode() for word in store.multi_get(words)]))
            if size == 1 or (store.check(answers[1:]) and set(store.multi_get(answers[1:])) == {me.encode()}): return me
        elif store.check(['learnkit/heard']):
            heard = json.loads(store.get('learnkit/heard'))
            if heard[rank:rank + 1] == [me]:
                store.set(answers[rank], heard[0])
                return str(heard[0])
        sleep(nap_s)
    raise DistributedError(f'Process {rank} of {size} has waited {timeout_s:g} s for the others to start.')
