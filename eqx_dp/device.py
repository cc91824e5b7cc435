"""The devices that a program is made for: their platform and their memory."""

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import jax

# A part of the key of JAX's caches: one program traced for two platforms is two programs.
_made_for: Any = jax.make_user_context(None)


def made_for(rules: Any) -> AbstractContextManager[Any]:
    """Within this context programs are made for the devices of some sharding rules' mesh.

    They need not be here. Without rules nothing changes.
    """
    device = None if rules is None else rules.mesh.devices.flat[0]
    return _made_for(f"{device.platform}:{device.device_kind}") if device else nullcontext()


def platform() -> str:
    """The platform that programs are made for: `cpu`, `gpu`, `tpu`; JAX's default if none is said.

    `jax.default_backend()` says what this machine has. A program may be planned here, and run on a
    mesh of GPUs elsewhere.
    """
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    name = _made_for.value or getattr(default, "platform", default) or jax.default_backend()
    return name.partition(":")[0]


def device_kind() -> str:
    """What JAX calls such a device, with the platform in front or without."""
    return _made_for.value or jax.local_devices(backend=platform())[0].device_kind


def is_cpu() -> bool:
    """Whether that is the host's CPU."""
    return platform() == "cpu"


def device_memory() -> int | None:
    """Bytes of memory of the device (of the host, if it is the device); None if unknown."""
    # Not known, or no such device here.
    with suppress(AttributeError, ValueError, OSError, RuntimeError):
        if is_cpu():
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return (jax.local_devices(backend=platform())[0].memory_stats() or {}).get("bytes_limit")
