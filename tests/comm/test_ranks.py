"""Ranks of a training: variables of launchers, and real torchrun, SLURM and existing process groups."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from learnkit.checkpoint.digest import WALL_CLOCK, differences
from learnkit.checkpoint.file import read_state
from learnkit.checkpoint.folder import entries
from learnkit.comm.ranks import SINGLE_RANK, join_ranks, launched_as
from learnkit.core.errors import DistributedError
from learnkit.distributed.launch import free_port
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = {
    'RANK': '3',
    'WORLD_SIZE': '4',
    'LOCAL_RANK': '1',
    'MASTER_ADDR': 'node0',
    'MASTER_PORT': '29500',
}

# as SLURM 22.05 has set them, for `srun -N2 -n4`, `sbatch -N2 -n4` and `salloc -N2 -n4`
JOB = {'SLURM_JOB_ID': '41', 'SLURM_JOB_NODELIST': 'n[1-2]', 'SLURM_NTASKS': '4'}
SRUN = {
    **JOB,
    'SLURM_LAUNCH_NODE_IPADDR': '10.0.0.9',
    'SLURM_LOCALID': '1',
    'SLURM_NODEID': '1',
    'SLURM_PROCID': '3',
    'SLURM_STEPID': '0',
    'SLURM_STEP_ID': '0',
    'SLURM_STEP_NODELIST': 'n[1-2]',
    'SLURM_STEP_NUM_NODES': '2',
    'SLURM_STEP_NUM_TASKS': '4',
    'SLURM_STEP_TASKS_PER_NODE': '2(x2)',
}
SBATCH = {**JOB, 'SLURM_LOCALID': '0', 'SLURM_NODEID': '0', 'SLURM_PROCID': '0'}


# -- variables of launchers


def test_torchrun_is_read_and_what_else_it_sets_is_left_alone() -> None:
    assert launched_as(TORCHRUN) == TORCHRUN
    elastic = {
        'TORCHELASTIC_RESTART_COUNT': '2',
        'TORCHELASTIC_USE_AGENT_STORE': 'True',
        'GROUP_RANK': '1',
    }
    assert launched_as({**TORCHRUN, **elastic}) == TORCHRUN


@pytest.mark.parametrize('missing', ['MASTER_ADDR', 'MASTER_PORT'])
def test_a_missing_address_is_named(missing: str) -> None:
    with pytest.raises(DistributedError, match=f'but not {missing}'):
        launched_as({k: v for k, v in TORCHRUN.items() if k != missing})


def test_srun_on_several_machines() -> None:
    assert launched_as(SRUN) == {
        'RANK': '3',
        'WORLD_SIZE': '4',
        'LOCAL_RANK': '1',
        'MASTER_ADDR': 'n1',
        'MASTER_PORT': '20041',
    }
    own = {'MASTER_ADDR': 'ib-n1', 'MASTER_PORT': '7'}
    assert {k: launched_as({**SRUN, **own})[k] for k in own} == own


@pytest.mark.parametrize(
    ('nodes', 'first'), [('big,small', 'big'), ('n[03-05,9],m1', 'n03'), ('a-1,a-[2-3]', 'a-1')]
)
def test_the_first_of_the_machines_of_a_step(nodes: str, first: str) -> None:
    assert launched_as({**SRUN, 'SLURM_STEP_NODELIST': nodes})['MASTER_ADDR'] == first


@pytest.mark.parametrize(
    'env',
    [SBATCH, JOB, {**SRUN, 'SLURM_STEP_NUM_TASKS': '1'}],
    ids=['batch script', 'shell of the allocation', 'srun of one task'],
)
def test_one_process_of_a_job_is_alone(env: dict[str, str]) -> None:
    assert launched_as(env) == {}


def test_a_process_that_nothing_has_started_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SRUN):
        monkeypatch.delenv(name, raising=False)
    assert join_ranks() is SINGLE_RANK


# -- joining


def _in_a_group_of_another(rank: int) -> tuple[Any, ...]:
    import torch.distributed as dist

    store = dist.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), 2, rank == 0)
    for name in TORCHRUN:
        os.environ.pop(name, None)  # Ray Train and the like may not set them
    dist.init_process_group('gloo', store=store, rank=rank, world_size=2)
    world = join_ranks(30.0)
    gathered = world.rank, world.size, world.is_ours, world.gather(f'I am {world.rank}')
    world.leave()
    t = torch.ones(1)
    dist.all_reduce(t)  # the group of the other is as it was
    dist.destroy_process_group()
    return *gathered, t.item()


@pytest.mark.dist
def test_a_group_that_is_there_is_used_and_left_as_it_is() -> None:
    both = ['I am 0', 'I am 1']
    expected = [(0, 2, False, both, 2.0), (1, 2, False, both, 2.0)]
    assert run_ranks(_in_a_group_of_another, 2) == expected


def _value(rank: int, n: int) -> Any:
    return {'text': 'x' * (n * (1 + rank)), 'rank': rank, 't': torch.arange(n) + rank}


def _gathers(rank: int) -> list[bool]:
    world, right = join_ranks(20.0), []

    def same(a: Any, b: Any) -> bool:
        return a['t'].equal(b.pop('t')) and {k: v for k, v in a.items() if k != 't'} == b

    for n in (0, 1, 50_000):
        mine, both = _value(rank, n), [_value(0, n), _value(1, n)]
        right += [same(m, b) for m, b in zip(world.gather(mine), both, strict=True)]
        right.append(same(world.broadcast(mine if rank == 0 else None), _value(0, n)))
    lopsided = world.gather('y' * 30_000 if rank else None)
    right.append(lopsided == [None, 'y' * 30_000])
    world.leave()
    return right


@pytest.mark.dist
def test_values_of_every_size_arrive() -> None:
    assert all(map(all, run_ranks(_gathers, 2)))


def _sums(rank: int) -> list[Any]:
    world = join_ranks(20.0)
    whole = torch.arange(6.0).view(2, 3)
    mine = (torch.arange(6, dtype=torch.float64) * (rank + 1)).view(2, 3)
    wait = world.start_sum(mine)
    total = world.sum(whole * (rank + 1))
    found = [
        wait().tolist(),
        total.tolist(),
        total.dtype is torch.float64,
        mine.tolist(),
        [world.any(flag) for flag in (rank == 1, False, True)],
    ]
    world.leave()
    return found


@pytest.mark.dist
def test_sums_and_flags_of_three_ranks() -> None:
    sums = [[0.0, 6.0, 12.0], [18.0, 24.0, 30.0]]  # (1 + 2 + 3) times the numbers of the first
    for rank, found in enumerate(run_ranks(_sums, 3)):
        own = [[(rank + 1.0) * i for i in row] for row in ([0, 1, 2], [3, 4, 5])]
        assert found == [sums, sums, True, own, [True, False, True]]


def _exchanges(rank: int) -> list[Any]:
    world, seen = join_ranks(20.0), []
    world.reset(clock=7.0)
    seen.append([world.post('stop', rank), world.value('clock')])
    world.exchange()
    seen.append([world.value('stop')])  # sent, and not received yet
    world.exchange(sends=False)
    seen.append([world.value('stop'), world.value('clock')])
    world.post('clock', 8.0)
    seen.append([world.sync(rank, 10 + rank), world.value('clock'), world.value('stop')])
    world.leave()
    world.leave()
    return seen


@pytest.mark.dist
def test_numbers_that_are_posted_arrive_one_exchange_later() -> None:
    expected = [[0.0, 7.0], [0.0], [1.0, 7.0], [[[0.0, 10.0], [1.0, 11.0]], 8.0, 1.0]]
    assert run_ranks(_exchanges, 2) == [expected] * 2


def _runs(rank: int) -> list[str]:
    world, found = join_ranks(20.0), []

    def fail() -> int:
        if rank:
            raise ValueError('broken')
        return 3

    try:
        world.run_on_all(fail)
    except (ValueError, DistributedError) as e:
        found.append(f'{type(e).__name__}: {e}')
    found.append(str(world.run_on_all(lambda: rank)))
    world.barrier()
    world.leave()
    return found


@pytest.mark.dist
def test_an_error_of_one_rank_is_raised_in_all() -> None:
    assert run_ranks(_runs, 2) == [
        ['DistributedError: Process 1 of 2 has failed: ValueError: broken', '0'],
        ['ValueError: broken', '1'],
    ]


# -- for real


def torchrun(*arguments: Any, **env: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        f'--master-port={free_port()}',
        *map(str, arguments),
    ]
    given = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'} | env
    done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-8000:]
    return done


def last_state(folder: Path) -> dict[str, Any]:
    "Return the contents of the last checkpoint."
    return read_state(entries(folder / 'checkpoints')[0].path)[0]


OPTIONS = '--epochs=2', '--bs=150', '--every=3ba'  # 5 batches an epoch


def _example(rank: int, folder: str) -> None:
    from examples.train_ddp import main

    sys.argv = ['train_ddp.py', *OPTIONS, f'--folder={folder}']
    main()


@pytest.mark.dist
def test_the_example_under_torchrun_resumes_after_a_sigkill_and_ends_as_without(
    tmp_path: Path,
) -> None:
    pytest.importorskip('sklearn')
    whole, killed, script = tmp_path / 'whole', tmp_path / 'killed', tmp_path / 'dies_once.py'
    run_ranks(_example, 2, str(whole))
    script.write_text(DIES_ONCE)
    done = torchrun(
        '--nproc-per-node=2', '--max-restarts=2', script, *OPTIONS, f'--folder={killed}'
    )

    assert 'exitcode: -9' in done.stderr
    # by the first process alone
    assert done.stdout.count('Resuming from') == done.stdout.count('2 processes') == 1
    unseeded = 'rng.python', 'rng.numpy'
    assert not differences(last_state(killed), last_state(whole), (*WALL_CLOCK, *unseeded))
    assert_same_weights(killed, whole)


DIES_ONCE = """
import os, signal
from pathlib import Path

import examples.train_ddp as example
from learnkit import Callback, Checkpoint

class DieOnce(Callback):
    "Kill the second process after the backward pass of the eighth batch, the first time."
    order = 0
    def after_backward(self):
        if self.train_iter != 7 or not os.environ['RANK'] == '1': return
        if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), signal.SIGKILL)

make = example.make_learner
def make_learner(*args):
    learn = make(*args)
    learn.add_cb(DieOnce())
    return learn

example.make_learner = make_learner
example.main()
"""


def assert_same_weights(one: Path, other: Path) -> None:
    a, b = (
        torch.load(folder / 'models/digits.pth', weights_only=True)['model']
        for folder in (one, other)
    )
    assert a.keys() == b.keys()
    for name, t in a.items():
        assert torch.equal(t, b[name]), name
