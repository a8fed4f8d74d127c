"""A host tier behind a real GPU; the CPU runs the same checks, to keep them true."""

import numpy as np
import pytest

from raykv import HierarchyBlockManagerPool, PoolConfig, Sequence
from raykv.errors import ConfigError
from raykv.memory import KVBuffers, KVSpec, resolve_device
from raykv.memory.block_copier import BlockCopier
from raykv.memory.copy_batches import BlockOutcome
from raykv.memory.host_slab import HostSlab

SPEC = KVSpec.uniform(2, 2, 8, 4, "float16")
NUM_BLOCKS, WAIT_S = 12, 30


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda":
        try:
            resolve_device("cuda")
        except ConfigError as error:
            pytest.skip(f"no usable GPU: {error}")
    return request.param


def host(array):
    return array.copy() if isinstance(array, np.ndarray) else array.get()


def test_blocks_go_to_the_slab_and_back(device):
    buffers = KVBuffers(SPEC, NUM_BLOCKS, device=device)
    values = np.random.default_rng(0).normal(size=buffers.storage.shape).astype(np.float16)
    buffers.storage[...] = buffers.xp.asarray(values)
    with HostSlab.create(NUM_BLOCKS, SPEC.block_bytes) as slab:
        assert slab.register_pinned(buffers.xp) == (device == "cuda")
        with BlockCopier(slab, xp=buffers.xp) as copier:
            there, ours, back = [7, 3, 4, 9], [2, 3, 8, 5], [10, 11, 1, 6]
            generations = slab.reassign(there)

            def copy(direction, rows):
                ticket = copier.submit(
                    direction, buffers.storage, rows, there, generations=generations,
                    after=buffers.record_event(),
                )  # fmt: skip
                return ticket.wait(WAIT_S).outcomes.tolist()

            assert copy("offload", ours) == [BlockOutcome.OK] * 4
            assert copy("load", back) == [BlockOutcome.OK] * 4
            np.testing.assert_array_equal(host(buffers.storage)[back], values[ours])
            slab.blocks[3, 5] ^= 1  # the control: a byte that changed is noticed
            assert copy("load", back)[1] == BlockOutcome.CORRUPT


def test_prompts_come_back_from_the_host(device):
    config = PoolConfig(
        num_blocks=NUM_BLOCKS,
        block_size=4,
        memory={"device": device, "num_layers": 1, "num_kv_heads": 1, "head_dim": 4},
        host={"num_blocks": 64},
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 100, 33) for _ in range(4)]
    kv_of = [rng.normal(size=(33, 1, 4)).astype(np.float32) for _ in prompts]
    with HierarchyBlockManagerPool.local(config) as pool:
        buffers = pool.ranks[0].kv.buffers
        for turn in range(3):
            for prompt, values in zip(prompts, kv_of, strict=True):
                sequence = Sequence(prompt)
                assert pool.allocate(sequence)
                pool.transfer_blocks([sequence], wait_s=WAIT_S)
                num_computed = sequence.kv_state.num_computed_tokens
                assert num_computed == (32 if turn else 0)
                read = buffers.read_slots(0, "k", sequence.slot_ids(0, num_computed))
                np.testing.assert_array_equal(read, values[:num_computed])
                for position in range(num_computed, 33):
                    block, offset = divmod(position, 4)
                    view = buffers.view(0, "k")
                    view[sequence.kv_state.block_ids[block], offset] = buffers.xp.asarray(
                        values[position]
                    )
                sequence.kv_state.num_computed_tokens = 33
                pool.deallocate(sequence)
                assert pool.wait_for_transfers(WAIT_S)
        assert pool.stats().total.host_hits_total == 2 * 4 * 32
        pool.check_integrity()
