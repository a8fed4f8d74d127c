"""From a configuration to the parts of a rank (the seed's section 5.1)."""

from raykv.config import PoolConfig
from raykv.core.block_manager import BlockManagerImpl
from raykv.core.block_tables import BlockTables
from raykv.core.concurrent import ConcurrentBlockManagerImpl
from raykv.core.single import SingleBlockManager
from raykv.errors import ConfigError
from raykv.memory.buffers import KVBuffers
from raykv.memory.room import available_bytes
from raykv.memory.spec import KVSpec
from raykv.memory.state_buffers import StateBuffers
from raykv.memory.state_spec import StateSpec
from raykv.rank_states import RankStates


def make_block_manager(config: PoolConfig) -> BlockManagerImpl:
    """Choose the manager as the seed's section 5.1 does."""
    is_shared = config.disagg_pd or config.store is not None
    kind = ConcurrentBlockManagerImpl if is_shared else BlockManagerImpl
    return kind(
        config.num_blocks,
        config.block_size,
        enable_prefix_cache=config.enable_prefix_cache,
        hash_seed=config.hash_seed,
        eviction=config.eviction,
    )


def make_buffers(config: PoolConfig, spec: KVSpec | None) -> KVBuffers | None:
    """The rank's K/V memory, or None if the configuration describes none."""
    memory = config.memory
    if memory is None:
        return None
    if spec is None:
        if memory.num_layers is None or memory.num_kv_heads is None or memory.head_dim is None:
            return None
        spec = KVSpec.uniform(
            memory.num_layers,
            memory.num_kv_heads,
            memory.head_dim,
            config.block_size,
            memory.dtype,
        )
    return KVBuffers(spec, config.num_blocks, device=memory.device)


def make_states(
    config: PoolConfig,
    manager: BlockManagerImpl,
    singles: SingleBlockManager,
    kv: KVBuffers | None,
    spec: StateSpec | None,
) -> RankStates | None:
    """The rank's recurrent state, or None where sequences have none.

    Args:
        config: the pool's.
        manager: the rank's KV blocks.
        singles: hands out rows of the block table.
        kv: the rank's K/V memory, which must fit beside the states.
        spec: what one sequence keeps; None keeps books of slots only.

    Raises:
        ConfigError: the configuration and the model disagree, or the memory does not fit.
    """
    states = config.linear_state
    if states is None or not states.enable:
        if spec is not None:
            raise ConfigError(
                f"the model keeps {spec.slot_bytes} bytes of recurrent state per sequence, but "
                "linear_state is not configured: give linear_state.num_slots, at least "
                f"{config.max_num_seqs + 1} (max_num_seqs + 1) and one more for each checkpoint, "
                "and match: deepest to reuse the most"
            )
        return None
    buffers = None
    if spec is not None and config.memory is not None:
        buffers = StateBuffers(
            spec,
            states.num_slots,
            num_rows=config.num_single_blocks,
            checkpoint_dtype=states.checkpoint_dtype,
            device=config.memory.device,
        )
        if kv is not None and kv.device == "cpu":
            _check_fits_together(config, kv, buffers)
    return RankStates(states, manager, singles, buffers)


def _check_fits_together(config: PoolConfig, kv: KVBuffers, states: StateBuffers) -> None:
    """Each fits alone; on the CPU neither has touched its pages yet, so their sum is looked at."""
    available = available_bytes()
    if available is not None and kv.nbytes + states.nbytes > available:
        raise ConfigError(
            f"{config.num_blocks} blocks of K and V need {kv.nbytes / 2**30:.2f} GiB and "
            f"{states.num_slots} state slots of {states.checkpoint_bytes} bytes "
            f"{states.nbytes / 2**30:.2f} GiB beside it, but {available / 2**30:.2f} GiB are "
            "available on cpu: lower num_blocks or linear_state.num_slots"
        )


def make_tables(config: PoolConfig) -> BlockTables:
    """Block tables with a row per single block, as wide as the longest sequence.

    Raises:
        ConfigError: they do not fit into memory.
    """
    rows = config.num_single_blocks
    max_blocks = -(-config.max_tokens_per_sequence // config.block_size)
    try:
        return BlockTables(rows, max_blocks, config.block_size)
    except (MemoryError, ValueError):
        raise ConfigError(
            f"block tables of {rows} rows and {max_blocks} blocks need "
            f"{rows * max_blocks * 4 / 2**30:.1f} GiB: lower max_num_seqs or max_model_len"
        ) from None
