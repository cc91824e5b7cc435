"""Which process holds which part of a batch, on meshes of made-up devices."""

from types import SimpleNamespace

import numpy as np
import pytest

from eqx_dp.sharding import processes

pytestmark = pytest.mark.usefixtures("unchecked")  # a mesh of several processes is no mesh here


def mesh_of(of_devices, *axis_names):
    devices = np.vectorize(lambda i: SimpleNamespace(process_index=int(i)), otypes=[object])
    return SimpleNamespace(devices=devices(np.asarray(of_devices)), axis_names=axis_names)


@pytest.mark.parametrize(
    ("of_devices", "slots"),
    [
        ([0, 0, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0, 1, 0, 1], [0, 1, 4, 5, 2, 3, 6, 7]),
        ([1, 1, 0, 0], [4, 5, 6, 7, 0, 1, 2, 3]),
    ],
)
def test_slots_are_in_the_order_of_processes(of_devices, slots):
    mesh = mesh_of(of_devices, "data")
    assert processes.slots_by_process(mesh, ("data",), 8).tolist() == slots
    assert processes.local_shards(mesh, ("data",)) == 2


def test_examples_over_two_axes_behind_another():
    mesh = mesh_of([[[0, 1], [0, 1]], [[0, 1], [0, 1]]], "model", "data", "replica")
    found = processes.slots_by_process(mesh, ("replica", "data"), 4)
    assert found.tolist() == [0, 1, 2, 3]
    assert processes.slots_by_process(mesh, ("data", "replica"), 4).tolist() == [0, 2, 1, 3]


def test_a_part_that_two_processes_hold_is_refused():
    mesh = mesh_of([[0, 1]], "data", "model")
    with pytest.raises(ValueError, match="axes model go over devices of several processes"):
        processes.local_shards(mesh, ("data",))
