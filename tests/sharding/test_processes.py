"""Which process holds which part of a batch, on meshes of made-up devices."""

from types import SimpleNamespace

import numpy as np
import pytest

from eqx_dp.sharding import processes

pytestmark = pytest.mark.usefixtures("unchecked")  # a mesh of several processes is no mesh here


def mesh_of(of_devices, *axis_names):
    devices = np.vectorize(lambda i: SimpleNamespace(process_index=int(i)), otypes=[object])
    return SimpleNamespace(devices=devices(np.asarray(of_devices)), axis_names=axis_names)


@pytest.mark.parametrize("of_devices", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]])
def test_a_process_holds_its_own_parts(of_devices):
    assert processes.local_shards(mesh_of(of_devices, "data"), ("data",)) == 2


def test_a_part_that_two_processes_hold_is_refused():
    mesh = mesh_of([[0, 1]], "data", "model")
    with pytest.raises(ValueError, match="axes model go over devices of several processes"):
        processes.local_shards(mesh, ("data",))
