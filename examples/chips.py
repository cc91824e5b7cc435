"""Accelerators that a step can be planned for without them: their compilers, and their data sheets.

The compilers for GPUs and TPUs run on any machine (extra `compilers`). What is planned with the
numbers of their data sheets, `CHIPS`, is **modelled from the compiled program, not measured**.
"""

import os
from pathlib import Path
from typing import Any

from jax.experimental import topologies

from eqx_dp.gradients.choice import CHIPS, Chip


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
