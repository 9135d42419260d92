"""The mesh of hosts for a mesh of accelerators exists as long as a strategy uses it."""

import gc
import weakref

import pytest

from learnkit import DistributedError
from learnkit.comm.dtensor import close_hosts, host_mesh, open_hosts
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


def come_and_go(rank: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    dist.init_process_group('gloo')
    group = dist.new_group(backend='gloo')
    # made without an accelerator
    mesh, again = (DeviceMesh.from_group(dist.group.WORLD, 'cuda') for _ in range(2))
    open_hosts(mesh, group)
    hosts = host_mesh(again)
    assert hosts.get_group() is group and hosts.device_type == 'cpu' and host_mesh(hosts) is hosts
    gone = weakref.ref(hosts)
    del hosts
    close_hosts()
    gc.collect()
    assert gone() is None
    with pytest.raises(DistributedError, match='no longer train together'):
        host_mesh(mesh)

    # of tensor parallelism: parameters have the whole mesh, or its first dimension
    sizes = {'mesh': [[0], [1]], 'mesh_dim_names': ('data', 'tensor')}
    groups = [dist.group.WORLD, dist.new_group([rank], use_local_synchronization=True)]
    mesh = DeviceMesh.from_group(groups, 'cuda', **sizes)
    open_hosts(mesh, group)
    assert host_mesh(mesh)['data'] == host_mesh(mesh['data']) and host_mesh(mesh).size() == 2
    close_hosts()


def test_hosts_are_forgotten_when_the_training_ends() -> None:
    run_ranks(come_and_go)
