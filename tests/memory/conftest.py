"""A stand-in for CuPy, so that the CUDA paths run without a GPU; a host slab and its copiers."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from raykv.memory.block_copier import BlockCopier
from raykv.memory.host_slab import HostSlab

from .copier_parts import BLOCK_BYTES, NUM_SLAB_BLOCKS
from .peers import Peer


class FakeCudaArray(np.ndarray):
    """Host memory that is told apart from a NumPy array, as a CuPy array is."""

    def get(self):
        return np.asarray(self)


def make_fake_cupy(free_bytes):
    """Offer what raykv uses of CuPy, with CuPy's signatures where they differ from NumPy's."""

    def take(a, indices, axis=None, out=None):
        assert isinstance(indices, FakeCudaArray)
        return np.take(a, indices, axis=axis, out=out, mode="clip")

    def free_all_blocks():
        fake.freed = True

    def get_free_and_total():
        return (free_bytes if fake.freed else 0, 2 * free_bytes)

    fake = SimpleNamespace(
        __name__="cupy",
        ndarray=FakeCudaArray,
        freed=False,
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(FakeCudaArray),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(FakeCudaArray),
        asarray=lambda a: np.array(a).view(FakeCudaArray),
        asnumpy=lambda a: a.get(),
        take=take,
        may_share_memory=np.may_share_memory,
        where=np.where,
        isnan=np.isnan,
        abs=np.abs,
        maximum=np.maximum,
        minimum=np.minimum,
        multiply=np.multiply,
        rint=np.rint,
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=free_all_blocks),
        cuda=SimpleNamespace(
            is_available=lambda: True, runtime=SimpleNamespace(memGetInfo=get_free_and_total)
        ),
    )
    return fake


@pytest.fixture
def fake_cupy(monkeypatch):
    fake = make_fake_cupy(free_bytes=1 << 30)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.fixture(params=["cpu", "cuda"], ids=["cpu", "fake-cuda"])
def device(request):
    if request.param == "cuda":
        request.getfixturevalue("fake_cupy")
    return request.param


@pytest.fixture
def slab():
    with HostSlab.create(NUM_SLAB_BLOCKS, BLOCK_BYTES) as slab:
        yield slab
        if not slab.is_closed:
            slab.check_integrity()


@pytest.fixture
def make_copier(slab):
    copiers = []

    def make(faults=None):
        copiers.append(BlockCopier(slab, faults=faults))
        return copiers[-1]

    yield make
    for copier in copiers:
        copier.check_integrity()
        copier.close()
        copier.check_integrity()


@pytest.fixture
def new_peer():
    peers = []

    def make():
        peers.append(Peer())
        return peers[-1]

    yield make
    for peer in peers:
        peer.kill()
