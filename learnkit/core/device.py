# SPDX-License-Identifier: Apache-2.0
"""The accelerator of this machine, by the interface that torch has for all of them."""

from __future__ import annotations

from functools import cache

import torch

from learnkit.core.errors import LoaderError

# types of devices whose number torch knows without a context on them
COUNTED = ('cuda', 'xpu', 'mps', 'mtia', 'hpu')


def find_accelerator() -> torch.device | None:
    """Return the accelerator that torch can use: CUDA, ROCm, XPU, MPS or a plugin's; None without one.

    The call creates no context on the device.
    """
    return torch.accelerator.current_accelerator(check_available=True)


@cache  # asked for each batch
def has_streams(device: torch.device) -> bool:
    """Return True if copies from pinned memory to the device overlap with its work, on streams.

    >>> has_streams(torch.device('cpu'))
    False
    """
    if device.type in ('cpu', 'mps', 'meta'):
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


@cache
def records_streams(device: torch.device) -> bool:
    "Return True if the allocator of a device with streams can be told that another stream uses a tensor."
    try:
        torch.empty(1, device=device).record_stream(torch.accelerator.current_stream(device))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def find_used_accelerator() -> torch.device | None:
    "Return the accelerator if this process has used it, else None."
    # without asking whether it is available, which may start the driver, after which no process can be forked
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    is_used = getattr(module, 'is_initialized', module.is_available)()
    return accelerator if is_used else None


def pins_memory() -> bool:
    "Return True if this process has used an accelerator to which pinned memory is copied ahead."
    accelerator = find_used_accelerator()
    return accelerator is not None and has_streams(accelerator)


def synchronize() -> None:
    "Wait for the accelerator, if this process has used it."
    if find_used_accelerator() is not None:
        torch.accelerator.synchronize()


def empty_cache() -> None:
    "Return unused memory of the accelerator to the system, if this process has used it."
    if find_used_accelerator() is not None:
        torch.accelerator.empty_cache()


def check_device(device: torch.device | str) -> torch.device:
    """Return a device; raise `LoaderError` for a device that this machine or this torch does not have.

    >>> check_device('cpu')
    device(type='cpu')
    """
    try:
        checked = torch.device(device)
        if checked.type not in COUNTED:
            torch.empty(0, device=checked)
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise LoaderError(
            f"device='{device}': torch {torch.__version__} has no such device. Leave `device` out to "
            "take what there is, or pass 'cpu'."
        ) from e
    if checked.type not in COUNTED:
        return checked
    accelerator = find_accelerator()
    is_there = accelerator is not None and accelerator.type == checked.type
    n = torch.accelerator.device_count() if is_there else 0
    if (checked.index or 0) >= n:
        raise LoaderError(
            f"device='{checked}': torch {torch.__version__} finds {n} such devices. Leave `device` out "
            "to take what there is, or pass 'cpu'."
        )
    return checked
