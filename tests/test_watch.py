"""The watch over other processes: what is concluded from reports, where a run is, and how each process comes out."""
from __future__ import annotations

import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch

from learnkit import Callback, DataLoaders, Evaluator
from learnkit.distributed import connections
from learnkit.distributed.verdicts import Report, Verdict, judge
from learnkit.distributed.watch import Watch
from learnkit.distributed.whereabouts import Place, stack_of, whereabouts
from learnkit.forks import Child
from learnkit.testing import synth_dls, synth_learner
from learnkit.world import World, join_world
from tests.ranks import run_ranks, started_ranks

pytestmark = pytest.mark.dist

TIMEOUT_S = 1.5

# ------------------------------------------------------------------------------------------------------------- verdicts

WAITS = Report(9, True, False, (1, 0, 7), 'backward', 5.2)
HANGS = Report(9, True, False, (1, 0, 3), 'after_loss of Mine', 5.1, 'its stack')


def verdict(*reports: Report, silent_s: list[float] | None = None) -> Verdict | None:
    return judge(reports, silent_s or [0.] * len(reports), timeout_s=5, silence_s=1)


def text(found: Any) -> str: return '' if found is None else found.text


def test_who_is_behind_hangs_when_all_stand_still() -> None:
    kind, rank, said = verdict(WAITS, HANGS) or ('', -1, '')
    assert (kind, rank) == ('hang', 1) and said.endswith('let `self.world.any(...)` take such a decision.\nits stack')
    assert said.startswith('Process 1 of 2 has been in after_loss of Mine for 5.1 s, while process 0 waits for it in '
                           'backward. If nothing in there takes so long, they have decided differently before')
    assert 'while process 0 (and 2 more) waits for it in backward' in text(verdict(WAITS, WAITS, HANGS, WAITS))


@pytest.mark.parametrize('reports', [
    [WAITS, HANGS._replace(stuck_s=0.2)],                           # it does something new
    [WAITS._replace(stuck_s=0.2), HANGS],                           # somebody does
    [HANGS, HANGS],                                                 # both are at the same
    [WAITS._replace(inside=False), HANGS._replace(inside=False)],   # no run is open
    [WAITS._replace(lost='closed', lost_s=0.3), HANGS._replace(stuck_s=0.)],  # not known yet
    [WAITS, Report()],                                              # one has only just come
])
def test_nothing_is_said_of_who_is_alive(reports: list[Report]) -> None: assert verdict(*reports) is None


def test_a_timeout_at_one_place_names_who_has_not_given_up() -> None:
    lost = HANGS._replace(lost='Timed out', lost_s=0.6, timed_out=True)
    assert (verdict(lost, HANGS) or ())[:2] == ('hang', 1)


def test_a_silent_process_is_gone() -> None:
    lost = WAITS._replace(lost='Connection closed by peer', lost_s=0.6)
    alive = HANGS._replace(stuck_s=0.)
    assert verdict(lost, alive, silent_s=[0, 0.9]) is None and verdict(WAITS, alive, silent_s=[0, 4.9]) is None
    assert text(verdict(lost, alive, silent_s=[0, 1.1])).startswith('Process 1 of 2 is gone: its connection was closed')
    assert text(verdict(WAITS, alive, silent_s=[0, 5.1])).startswith('Process 1 of 2 does not answer')


def test_who_has_left_is_named() -> None:
    left = Report(9, left=True)
    assert verdict(WAITS._replace(stuck_s=1.), left) is None
    assert verdict(WAITS, left) == ('left', 1, 'Process 1 of 2 has left the training, while process 0 waits for it in '
                                               'backward.')


def test_a_lost_connection_without_a_cause_is_told_as_it_is() -> None:
    lost = WAITS._replace(lost='Connection reset by peer', lost_s=3.1)
    assert verdict(lost, HANGS._replace(stuck_s=0.)) == (
        'lost', 0, 'Process 0 of 2 has lost its connection in backward: Connection reset by peer')


def test_a_report_comes_back_as_it_was_sent() -> None:
    assert Report.of(HANGS.json().encode()) == HANGS and Report.of(b'') == Report()


# ---------------------------------------------------------------------------------------------------------- whereabouts

class Places(Callback):
    "Look from another thread at every event."
    order = 70

    def __init__(self) -> None: self.seen: list[Place] = []

    def run_event(self, event: str) -> None:
        if event in ('cleanup', 'close', 'post_close', 'after_create'): return
        main = threading.get_ident()
        looker = threading.Thread(target=lambda: self.seen.append(whereabouts(self.learn, main)))
        looker.start()
        looker.join()
        assert self.seen[-1].text.startswith(f'{event} of Places (epoch '), self.seen[-1]


def test_places_grow_from_event_to_event() -> None:
    dls = synth_dls(n_train=4, n_valid=2)
    dls = DataLoaders(dls.train, {'often': Evaluator(dls.valid, '2ba'), 'valid': dls.valid}, device='cpu')
    learn = synth_learner(dls=dls, cbs=Places())
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    orders = [place.order for place in learn.places.seen]
    assert len(orders) > 100 and orders == sorted(orders)
    assert 'after_loss of Places (epoch 1, batch 1, valid)' in [place.text for place in learn.places.seen]


def test_what_the_loop_does_by_itself_has_a_name() -> None:
    seen: dict[str, str] = {}

    def look() -> None:
        thread = threading.Thread(target=lambda: seen.update(text=whereabouts(learn, main).text, stack=stack_of(main)))
        thread.start()
        thread.join()

    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            if self.training: look()
            return x * self.w

    learn, main = synth_learner(n_train=1, model=Looks()), threading.get_ident()
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    assert seen['text'] == 'the forward pass (epoch 0, batch 0)'
    assert 'in forward\n    if self.training: look()' in seen['stack']


# ---------------------------------------------------------------------------------------------------------- connections

def test_connections_are_found_and_closed_by_their_ends() -> None:
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
        near, (far, _) = socket.create_connection(('127.0.0.1', port)), server.accept()
        with near, far:
            ends = f'127.0.0.1 {near.getsockname()[1]}', f'127.0.0.1 {port}'
            assert ends in connections.between() and ends[::-1] in connections.between()
            assert ends not in connections.between([port])
            line = connections.connected(port)
            assert line is not None and line.getpeername()[1] == port and not connections.has_ended(line)
            far.sendall(b'x')
            assert not connections.has_ended(line) and near.recv(1) == b'x'
            assert connections.close([ends]) == 1
            assert connections.has_ended(line) and far.recv(1) == b''
            line.close()


def test_the_host_is_one_of_this_machine() -> None:
    assert connections.reachable_host(['', '192.0.2.1', '127.0.0.1']) == '127.0.0.1'  # 192.0.2.1 is nobody's
    assert connections.reachable_host([]) == '127.0.0.1'


# ------------------------------------------------------------------------------------------------------------ processes

def said_by(f: Any) -> str:
    try: f()
    except BaseException as e: return f'{type(e).__name__}: {e}'
    return ''


def watched(rank: int, job: str) -> dict[str, Any]:
    "Run a job under a watch, and tell how that has ended, after how long, and what is left."
    world, before = join_world(TIMEOUT_S + 10), threading.active_count()
    n_files = len(connections.between())
    watch = Watch(world, TIMEOUT_S)
    began = time.monotonic()

    def run() -> None:
        with watch.run(): JOBS[job](world)
    said, took_s = said_by(run), time.monotonic() - began
    for _ in range(2): watch.close()
    threads, world_s = threading.active_count() - before, time.monotonic() - began
    left = len(connections.between()) - n_files
    world.leave()
    return {'said': said, 'took_s': took_s, 'closed_s': world_s, 'threads': threads, 'connections': left}


def one_fails_the_other_waits(world: World) -> None:
    if world.rank: raise ValueError('boom')
    world.gather(1)


def one_fails_the_other_computes(world: World) -> None:
    if world.rank: raise ValueError('boom')
    while True: sum(range(100))


def one_fails_the_other_catches_everything(world: World) -> None:
    if world.rank: raise ValueError('boom')
    try: time.sleep(60)
    except BaseException: world.gather(1)


def all_fail(world: World) -> None: raise ValueError(f'boom {world.rank}')


def one_fails_at_the_end(world: World) -> None:
    world.gather(1)
    if world.rank: raise ValueError('boom')


def well(world: World) -> None: world.gather(1)


JOBS = {f.__name__: f for f in (one_fails_the_other_waits, one_fails_the_other_computes, all_fail, well,
                                one_fails_the_other_catches_everything, one_fails_at_the_end)}


@pytest.mark.parametrize('job', ['one_fails_the_other_waits', 'one_fails_the_other_computes', 'one_fails_at_the_end',
                                 'one_fails_the_other_catches_everything'])
def test_one_fails_and_all_end_with_its_traceback(job: str) -> None:
    first, second = run_ranks(watched, 2, job)
    assert second['said'] == 'ValueError: boom' and second['took_s'] < 1
    assert first['said'].startswith('DistributedError: Process 1 of 2 failed: ValueError: boom\nTraceback (most recent')
    assert f'in {job}\n' in first['said'] and first['said'].endswith('ValueError: boom')
    assert first['took_s'] < (3 if 'wait' in job or 'end' in job else 5)
    assert all(end['threads'] == 0 >= end['connections'] for end in (first, second))


def test_each_keeps_its_own_error() -> None:
    assert [end['said'] for end in run_ranks(watched, 2, 'all_fail')] == ['ValueError: boom 0', 'ValueError: boom 1']


def test_a_run_that_is_well_pays_nothing_and_leaves_nothing() -> None:
    for end in run_ranks(watched, 2, 'well'):
        assert not end['said'] and end['threads'] == 0 >= end['connections'] and end['closed_s'] < 2


def test_a_second_watch_and_a_second_run() -> None:
    def twice(rank: int) -> list[str]:
        world, said = join_world(10), []
        for _ in range(2):
            watch = Watch(world, 5)

            def run(fails: bool, watch: Watch = watch) -> None:
                with watch.run(), watch.run():  # one in the other is the same
                    world.gather(1)
                    if fails: raise ValueError(f'boom {rank}')
            said += [said_by(lambda fails=fails, run=run: run(fails)) for fails in (True, False)]
            watch.close()
        world.leave()
        return said
    assert run_ranks(twice, 2) == [['ValueError: boom 0', ''] * 2, ['ValueError: boom 1', ''] * 2]


def test_a_process_that_does_not_react_is_ended() -> None:
    def job(rank: int) -> None:
        learn = synth_learner(cbs=Callback(after_loss=deaf) if rank else None)
        with learn.no_bar(), learn.no_logging(), learn.distributed('ddp', timeout=TIMEOUT_S): learn.fit(1)

    def deaf(cb: Callback) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(60)

    with started_ranks(job, 2) as (first, second):
        ended_s = [ended_after(child, 10) for child in (first, second)]
        assert first.code == second.code == 1 and max(ended_s) < TIMEOUT_S + 6
        assert 'Process 1 does not react, and is ended.' in second.stderr and 'in deaf\n' in second.stderr
        assert 'Process 1 of 2 has been in after_loss of Callback (epoch 0, batch 0)' in first.stderr


def test_a_first_process_that_is_stopped_is_named() -> None:
    def job(rank: int) -> None:
        learn = synth_learner(cbs=None if rank else Callback(after_loss=stop))
        with learn.no_bar(), learn.no_logging(), learn.distributed('ddp', timeout=TIMEOUT_S): learn.fit(1)

    def stop(cb: Callback) -> None: signal.raise_signal(signal.SIGSTOP)

    with started_ranks(job, 2) as (_, second):
        assert ended_after(second, 15) < TIMEOUT_S + 3 and second.code == 1
        assert 'DistributedError: Process 0 of 2 does not answer' in second.stderr


def ended_after(child: Child, timeout_s: float) -> float:
    began = time.monotonic()
    child.wait(timeout_s)
    return time.monotonic() - began


def test_a_watch_needs_no_signal_handler_and_no_import_time() -> None:
    handler = signal.getsignal(signal.SIGINT)
    run_ranks(watched, 2, 'well')
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_comes_of_another_is_told_from_what_does_not() -> None:
    def job(rank: int) -> list[bool]:
        world = join_world(10)
        watch = Watch(world, 5)
        lost = RuntimeError('[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1')
        outer = ValueError('of my own')
        outer.__context__ = lost
        told = [watch._comes_of_another(e) for e in (lost, outer, ValueError('x'), KeyboardInterrupt())]
        watch.close()
        world.leave()
        return told
    assert run_ranks(job, 2) == [[True, True, False, False]] * 2
