"""The device at hand: what it is, and the memory that it has."""

import os

import jax


def is_cpu() -> bool:
    """Whether the device is the host itself."""
    return jax.local_devices()[0].platform == "cpu"


def device_memory(*, free: bool = False) -> int | None:
    """Bytes of memory of the device, or of the host where it is the device; None if unknown.

    If `free`, those that nothing is held in now.
    """
    if is_cpu():
        pages = "SC_AVPHYS_PAGES" if free else "SC_PHYS_PAGES"
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
        except (AttributeError, ValueError, OSError):  # no such question on this system
            return None
    stats: dict[str, int] = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - (stats.get("bytes_in_use", 0) if free else 0)
