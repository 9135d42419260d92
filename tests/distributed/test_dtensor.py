"""The mesh of hosts for a mesh of accelerators exists as long as a strategy uses it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from learnkit import DistributedError
from learnkit.distributed.dtensor import close_hosts, host_mesh, open_hosts
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist


def come_and_go(rank: int) -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    dist.init_process_group('gloo')
    groups = [dist.new_group(backend='gloo') for _ in range(2)]
    # made without an accelerator
    meshes: Any = [DeviceMesh.from_group(dist.group.WORLD, 'cuda') for _ in range(2)]
    assert meshes[0] == meshes[1]

    for mesh, group in zip(meshes, groups, strict=True):
        open_hosts(mesh, group)
    for first, stays in ((groups[0], groups[1]), (groups[1], groups[0])):
        close_hosts(first)
        found = [host_mesh(mesh) for mesh in meshes]
        assert (
            found[0] is found[1] and found[0].get_group() is stays and found[0].device_type == 'cpu'
        )
        open_hosts(meshes[0], first)  # it comes again
        assert host_mesh(meshes[1]).get_group() is first

    gone = weakref.ref(host_mesh(meshes[0]))
    found.clear()
    for group in groups:
        close_hosts(group)
    gc.collect()
    assert gone() is None
    with pytest.raises(DistributedError, match='no longer train together') as e:
        host_mesh(meshes[0])
    return str(e.value)


def test_hosts_are_forgotten_with_their_group() -> None:
    assert len({*run_ranks(come_and_go)}) == 1
