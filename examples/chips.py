"""Accelerators that a step can be planned for without them: their compilers, and their data sheets.

The compilers for GPUs and TPUs run on any machine (extra `compilers`). What is planned with the
numbers below is **modelled from the compiled program, not measured**.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from jax.experimental import topologies


class Chip(NamedTuple):
    """Peaks of one device, without sparsity.

    Attributes:
        flops_16: of products of 16 bits, in FLOP/s.
        flops_8: of products of float8; those of 16 bits where there are none.
        flops_32: of products of float32 at the highest precision: on a TPU six passes of bfloat16.
        memory: bytes.
        bandwidth: of memory, bytes/s.
        links: between devices, bytes/s one way.
        start: of a kernel, seconds.
        wait: of the host for a flag on the device, seconds.
    """

    flops_16: float
    flops_8: float
    flops_32: float
    memory: float
    bandwidth: float
    links: float
    start: float
    wait: float


# By a part of JAX's `device_kind`. H100, A100, L4 and T4: NVIDIA's data sheets (SXM, 80 GB, of the
# first two); links are half of the NVLink or PCIe figure. TPUs: cloud.google.com/tpu/docs, links
# are the sum over a chip. Starts and waits are rough: 2 us for a kernel of a CUDA graph, 20 us for
# a copy to the host and back.
CHIPS = {
    "H100": Chip(989e12, 1979e12, 67e12, 80e9, 3.35e12, 450e9, 2e-6, 20e-6),
    "A100": Chip(312e12, 312e12, 19.5e12, 80e9, 2.04e12, 300e9, 2e-6, 20e-6),
    "L4": Chip(121e12, 242e12, 30e12, 24e9, 0.3e12, 32e9, 2e-6, 20e-6),
    "T4": Chip(65e12, 65e12, 8.1e12, 16e9, 0.32e12, 16e9, 2e-6, 20e-6),
    "TPU v5 lite": Chip(197e12, 197e12, 33e12, 16e9, 0.82e12, 200e9, 0.5e-6, 20e-6),
    "TPU v5": Chip(459e12, 459e12, 77e12, 95e9, 2.77e12, 600e9, 0.5e-6, 20e-6),
    "TPU v6 lite": Chip(918e12, 918e12, 153e12, 32e9, 1.64e12, 448e9, 0.5e-6, 20e-6),
}


def chip_of(device: Any) -> Chip | None:
    """The data sheet of a device of JAX; None where there is none."""
    return next((chip for kind, chip in CHIPS.items() if kind in device.device_kind), None)


def devices_of(name: str) -> list[Any]:
    """Devices that programs can be compiled for, and not run: no such hardware is needed.

    Args:
        name: `h100:8`, for GPUs of one host, or `tpu:v5e:4x4` (v5e, v5p, v6e), with the topology as
            Google names it.

    Raises:
        RuntimeError: the compiler is not installed.
    """
    platform, _, of = name.partition(":")
    options = {"target_config": _h100(), "topology": f"1x1x{of}"}
    for variable in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        os.environ.setdefault(variable, "1")  # libtpu asks the cloud, and locks the TPU, otherwise
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        if platform == "tpu":
            return list(topologies.get_topology_desc(of, platform="tpu").devices)
        return list(topologies.get_topology_desc("", platform="cuda", **options).devices)
    except Exception as error:
        raise RuntimeError(
            f"No compiler for {name!r} here: pip install 'eqx-dp[compilers]', of JAX's version; "
            f"names are h100:8, tpu:v5e:4x4 and the like. It said: {error}"
        ) from error


def _h100() -> str:
    return Path(__file__).with_name("h100.txtpb").read_text(encoding="utf-8")
