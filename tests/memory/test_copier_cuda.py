"""The copier's way through CuPy, on a stand-in: what is asked of it, and in which order."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from raykv.memory.block_copier import BlockCopier
from raykv.memory.copy_batches import BlockOutcome

from .copier_parts import Script, as_bytes, device_rows, load, offload, outcomes, pattern

OK, CORRUPT, FAILED = BlockOutcome.OK, BlockOutcome.CORRUPT, BlockOutcome.FAILED


class DeviceArray(np.ndarray):
    """Copies of it are only noted; a stream's synchronize() carries them out."""

    @property
    def device(self):
        return contextlib.nullcontext()

    def get(self, *, stream, out, blocking):
        assert not blocking
        stream.due.append((out, self))

    def set(self, array, *, stream):
        stream.due.append((self, array))


class Stream:
    def __init__(self, *, non_blocking):
        assert non_blocking
        self.due, self.log, self.fails = [], [], False

    def wait_event(self, event):
        self.log.append(event)

    def synchronize(self):
        self.log.append(len(self.due))
        if self.fails:
            raise RuntimeError("the device is lost")
        for target, source in self.due:
            np.copyto(np.asarray(target), np.asarray(source))
        self.due.clear()


@pytest.fixture
def make_copier(slab):
    with contextlib.ExitStack() as stack:
        streams = []
        cuda = SimpleNamespace(
            Stream=lambda **options: streams.append(Stream(**options)) or streams[-1]
        )
        xp = SimpleNamespace(__name__="cupy", ndarray=DeviceArray, cuda=cuda)

        def make(*faults):
            copier = BlockCopier(slab, xp=xp, faults=Script(*faults))
            stack.enter_context(copier)
            copier.streams = streams
            return copier

        yield make


def on_device(key=0):
    return device_rows(key=key).view(DeviceArray)


def test_blocks_arrive_in_few_copies_on_one_stream(slab, make_copier):
    copier, memory = make_copier(), on_device()
    assert (
        outcomes(offload(copier, memory, [1, 2, 3, 7], [5, 6, 7, 8], after="written")) == [OK] * 4
    )
    target = on_device(key=1)
    assert outcomes(load(copier, target, [5, 6], [8, 6])) == [OK, OK]
    np.testing.assert_array_equal(as_bytes(np.asarray(target))[5], pattern(0, 7))
    np.testing.assert_array_equal(as_bytes(np.asarray(target))[6], pattern(0, 2))
    (stream,) = copier.streams
    assert stream.log == ["written", 2, 2], "an event, then each batch's stretches"


def test_checksums_are_compared(slab, make_copier):
    copier, memory = make_copier(), on_device()
    offload(copier, memory, [1, 2], [5, 6]).wait()
    slab.blocks[6, 0] ^= 1
    assert outcomes(load(copier, memory, [3, 4], [5, 6])) == [OK, CORRUPT]


def test_an_error_at_the_end_fails_the_whole_batch(slab, make_copier):
    copier, memory = make_copier(), on_device()
    assert outcomes(offload(copier, memory, [1], [5])) == [OK]
    copier.streams[0].fails = True
    ticket = load(copier, memory, [3, 4], [5, 5])
    assert outcomes(ticket) == [FAILED, FAILED]
    assert ticket.result.error == "RuntimeError: the device is lost"


def test_host_memory_is_refused(make_copier):
    with pytest.raises(ValueError, match=r"numpy.ndarray, but the copier needs a cupy.ndarray"):
        make_copier().submit("load", device_rows(), [1], [1], generations=[0])
