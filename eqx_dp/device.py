"""The default device: its kind and its memory."""

import os

import jax


def is_cpu() -> bool:
    """Whether the device is the host's CPU."""
    return jax.local_devices()[0].platform == "cpu"


def device_memory() -> int | None:
    """Bytes of memory of the device (of the host, if it is the device); None if unknown."""
    if not is_cpu():
        return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not known on this system
        return None
