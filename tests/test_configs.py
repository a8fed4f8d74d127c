"""Settings: the files in configs/, what is refused and how that reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raykv.cli.settings import DemoOptions, pool_config
from raykv.config import MemoryConfig, ModelConfig, PoolConfig, RayConfig, RoutingConfig
from raykv.core import ConcurrentBlockManagerImpl
from raykv.errors import ConfigError
from raykv.rank_build import make_block_manager

CONFIGS = Path(__file__).parents[1] / "configs"
SHAPE = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 4}


def refusal(**values):
    """The one line that says why these settings are refused."""
    with pytest.raises(ConfigError) as caught:
        PoolConfig(**{"num_blocks": 8, **values})
    message = str(caught.value)
    assert "\n" not in message
    assert "Input should" not in message  # pydantic's words
    return message


def sent(value):
    """The value as another process gets it."""
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - our own bytes


def read(tmp_path, text):
    path = tmp_path / "pool.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return PoolConfig.from_yaml(path)


# -- the files that we ship ------------------------------------------------------------------------


def test_the_files_are_those_we_know():
    assert sorted(path.name for path in CONFIGS.iterdir()) == [
        "bookkeeping.yaml",
        "host.yaml",
        "hybrid.yaml",
        "local.yaml",
        "multi_node.yaml",
        "one_gpu.yaml",
    ]


def test_local_is_what_the_demo_runs_by_itself():
    assert PoolConfig.from_yaml(CONFIGS / "local.yaml") == pool_config(DemoOptions())


def test_hybrid():
    config = PoolConfig.from_yaml(CONFIGS / "hybrid.yaml")
    assert config.linear_state.match == "deepest"
    assert config.linear_state.num_slots > 4 * config.max_num_seqs
    assert config.model.path == "qwen3_5-tiny"


def test_host():
    config = PoolConfig.from_yaml(CONFIGS / "host.yaml")
    assert config == pool_config(DemoOptions(num_blocks=80, host_blocks=1024))
    assert config.host.num_blocks > config.dp_size * config.num_blocks


def test_one_gpu():
    config = PoolConfig.from_yaml(CONFIGS / "one_gpu.yaml")
    assert config.dp_size == config.ray.num_gpus == 1
    assert config.memory == MemoryConfig(device="cuda", dtype="bfloat16")


def test_multi_node():
    config = PoolConfig.from_yaml(CONFIGS / "multi_node.yaml")
    assert (config.dp_size, config.ray.num_gpus) == (4, 1)
    assert config.ray.placement_strategy == "SPREAD"
    assert (config.ray.on_rank_loss, config.ray.max_restarts) == ("fail_over", -1)


def test_bookkeeping_has_neither_model_nor_memory():
    config = PoolConfig.from_yaml(CONFIGS / "bookkeeping.yaml")
    assert config.model is None
    assert config.memory is None
    assert config.max_tokens_per_sequence == 131072


# -- defaults --------------------------------------------------------------------------------------


def test_the_block_table_has_a_row_per_sequence_and_one_for_padding():
    assert PoolConfig(num_blocks=8).num_single_blocks == 257
    assert PoolConfig(num_blocks=8, max_num_seqs=4).num_single_blocks == 5
    assert PoolConfig(num_blocks=8, num_single_blocks=5).max_num_seqs == 4
    assert PoolConfig(num_blocks=8, max_num_seqs=np.int64(4)).num_single_blocks == 5
    assert PoolConfig(num_blocks=8, max_num_seqs=2, num_single_blocks=9).num_single_blocks == 9


def test_a_model_brings_memory():
    config = PoolConfig(num_blocks=8, model={"path": "smollm2"})
    assert config.memory == MemoryConfig()
    assert not config.memory.has_shape
    assert PoolConfig(num_blocks=8, memory=SHAPE).memory.has_shape


def test_a_sequence_reaches_the_smaller_of_pool_and_model():
    assert PoolConfig(num_blocks=9, block_size=4).max_tokens_per_sequence == 32
    config = PoolConfig(num_blocks=9, block_size=4, max_model_len=20)
    assert config.max_tokens_per_sequence == 20


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"bloc_size": 4}, ["bloc_size: unknown", "did you mean block_size?"]),
        ({"zzz": 4}, ["zzz: unknown", "known here: dp_size, num_blocks, block_size"]),
        ({"memory": {"devise": "cpu"}}, ["memory.devise: unknown", "did you mean device?"]),
        ({"model": {"path": "x", "threads": 2}}, ["model.threads: unknown", "num_threads"]),
        ({"ray": {"gpus": 1}}, ["ray.gpus: unknown", "num_gpus"]),
        ({"self": 1}, ["self: unknown"]),
    ],
)
def test_unknown_settings_are_refused_and_the_right_one_is_named(values, parts):
    message = refusal(**values)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_size": 0}, "block_size: must be greater than or equal to 1, got 0"),
        ({"num_blocks": 1}, "num_blocks: must be greater than or equal to 2, got 1"),
        ({"num_blocks": 2**31}, "num_blocks: must be less than 2147483648, got 2147483648"),
        ({"num_blocks": 8.5}, "num_blocks: must be a valid integer, got 8.5"),
        ({"num_blocks": "many"}, "num_blocks: must be a valid integer, got 'many'"),
        ({"dp_size": 0}, "dp_size: must be greater than or equal to 1, got 0"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be greater than or equal to 1, got 0"),
        ({"max_num_seqs": "few"}, "max_num_seqs: must be a valid integer, got 'few'"),
        ({"num_single_blocks": 1}, "num_single_blocks: must be greater than or equal to 2, got 1"),
        ({"num_single_blocks": "a"}, "num_single_blocks: must be a valid integer, got 'a'"),
        ({"max_model_len": 0}, "max_model_len: must be greater than or equal to 1, got 0"),
        (
            {"eviction": "fifo"},
            "eviction: must be 'lru', 'lrfu', 'priority' or module:Class, got 'fifo'",
        ),
        (
            {"routing": {"policy": "x"}},
            (
                "routing.policy: must be 'available_blocks', 'free_blocks', 'cache_aware' or "
                "module:Class, got 'x'"
            ),
        ),
        (
            {"memory": {**SHAPE, "device": "tpu"}},
            "memory.device: must be 'auto', 'cpu' or 'cuda', got 'tpu'",
        ),
        (
            {"memory": {**SHAPE, "head_dim": 0}},
            "memory.head_dim: must be greater than or equal to 1, got 0",
        ),
        ({"model": "smollm2"}, "model: must hold settings of its own, got 'smollm2'"),
        ({"model": {}}, "model.path: is required"),
        ({"ray": {"num_gpus": -1}}, "ray.num_gpus: must be greater than or equal to 0, got -1"),
        (
            {"ray": {"call_timeout_s": float("inf")}},
            "ray.call_timeout_s: must be a finite number, got inf",
        ),
        ({"ray": {"start_timeout_s": 0}}, "ray.start_timeout_s: must be greater than 0, got 0"),
    ],
)
def test_impossible_values_are_refused_with_key_value_and_rule(values, message):
    assert refusal(**values) == message


def test_a_setting_without_default_is_asked_for():
    with pytest.raises(ConfigError, match=r"^num_blocks: is required$"):
        PoolConfig()


def test_every_fault_is_named_at_once():
    message = refusal(block_size=0, ray={"num_gpus": -1, "num_cpu": 1}, dp_sise=2)
    assert message.split("; ") == [
        "block_size: must be greater than or equal to 1, got 0",
        "ray.num_gpus: must be greater than or equal to 0, got -1",
        "ray.num_cpu: unknown setting",
        "did you mean num_cpus?",
        "dp_sise: unknown setting",
        "did you mean dp_size?",
    ]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (
            {"max_num_seqs": 4, "num_single_blocks": 4},
            ["num_single_blocks is 4", "max_num_seqs 4", "5 are needed"],
        ),
        ({"memory": {"num_layers": 3}}, ["memory:", "(3, None, None)", "all three, or none"]),
        ({"memory": {}}, ["memory: num_layers, num_kv_heads and head_dim", "no model", "give all"]),
        (
            {"model": {"path": "smollm2"}, "memory": SHAPE},
            ["memory: num_layers 2, num_kv_heads 1 and head_dim 4", "smollm2", "leave them out"],
        ),
    ],
)
def test_contradictions_are_refused(values, parts):
    message = refusal(**values)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("states", "parts"),
    [
        ({"num_slots": 8, "stride_tokens": 40}, ["stride_tokens is 40", "block_size 16", "as 32"]),
        ({"num_slots": 4}, ["num_slots is 4", "max_num_seqs 4", "at least 5"]),
        ({}, ["linear_state.num_slots: is required"]),
        ({"num_slots": 8, "slots": 1}, ["linear_state.slots: unknown", "num_slots"]),
        ({"num_slots": 8, "match": "longest"}, ["linear_state.match", "'deepest'", "'longest'"]),
        ({"num_slots": 8, "at_stride": False}, ["at_stride", "contiguous", "deepest"]),
    ],
)
def test_impossible_state_slots_are_refused(states, parts):
    message = refusal(max_num_seqs=4, linear_state=states)
    assert all(part in message for part in parts), message


def test_state_slots_can_be_switched_off():
    for off in ({"enable": False}, {"enable": False, "num_slots": 2}):
        assert not PoolConfig(num_blocks=8, linear_state=off).has_linear_state
    assert PoolConfig(num_blocks=8, max_num_seqs=1, linear_state={"num_slots": 2}).has_linear_state
    assert not PoolConfig(num_blocks=8).has_linear_state


@pytest.mark.parametrize("key", ["manager_types", "xtensor"])
@pytest.mark.parametrize("value", [{"num_slots": 4}, {}, [], False])
def test_sections_of_later_versions_are_refused(key, value):
    message = refusal(**{key: value})
    assert message.startswith(f"{key}: ")
    assert f"not part of this version, got {value!r}; leave it out" in message
    assert getattr(PoolConfig(num_blocks=8, **{key: None}), key) is None


MEMORY = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2}
HOST = {"num_blocks": 9}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"host": HOST}, ["neither memory nor model", "leave host out"]),
        ({"host": HOST, "memory": MEMORY, "enable_prefix_cache": False}, ["enable_prefix_cache"]),
        ({"host": {"num_blocks": 1}, "memory": MEMORY}, ["host.num_blocks", "1"]),
        ({"host": {**HOST, "eviction": "fifo"}, "memory": MEMORY}, ["host.eviction", "'fifo'"]),
        ({"host": {**HOST, "scope": "rack"}, "memory": MEMORY}, ["host.scope", "'rack'"]),
        ({"host": {**HOST, "checksum_rate": 2}, "memory": MEMORY}, ["host.checksum_rate", "2"]),
        ({"store": {"type": "disk", "path": "x"}, "memory": MEMORY}, ["host", "host.num_blocks"]),
        ({"host": HOST, "store": {"type": "disk"}, "memory": MEMORY}, ["store", "path"]),
        ({"host": HOST, "store": {"type": "redis", "path": "x"}, "memory": MEMORY}, ["url"]),
        (
            {
                "host": HOST, "memory": MEMORY, "store": {"type": "disk", "path": "x"},
                "max_num_seqs": 1, "linear_state": {"num_slots": 4, "stride_tokens": 16},
            },
            ["linear_state", "leave store out"],
        ),
    ],
)  # fmt: skip
def test_host_memory_that_cannot_work_is_refused(settings, parts):
    message = refusal(**settings)
    assert all(part in message for part in parts), message


def test_a_store_makes_managers_thread_safe():
    config = PoolConfig(num_blocks=8, memory=MEMORY, host=HOST, store={"type": "disk", "path": "x"})
    assert isinstance(make_block_manager(config), ConcurrentBlockManagerImpl)
    without = config.model_copy(update={"store": None})
    assert not isinstance(make_block_manager(without), ConcurrentBlockManagerImpl)


@pytest.mark.parametrize("make", [RoutingConfig, MemoryConfig, ModelConfig, RayConfig])
def test_a_section_on_its_own_refuses_likewise(make):
    with pytest.raises(ConfigError, match="nonsense: unknown setting"):
        make(nonsense=1)


def test_a_refusal_survives_pickling():
    with pytest.raises(ConfigError) as caught:
        PoolConfig(num_blocks=1)
    assert str(sent(caught.value)) == str(caught.value)


# -- YAML ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "but holds nothing"),
        ("# only a comment\n", "but holds nothing"),
        ("- 1", "but holds a value of type list"),
        ("12", "but holds a value of type int"),
        ("num_blocks: [", "is not valid YAML: while parsing"),
        ("num_blocks: 8\n\tblock_size: 4", "line 2"),
        ("a: !!python/object:os.system {}", "is not valid YAML"),
        (b"\xff\xfe\x00", "is not valid YAML"),
        (b"num_blocks: \x00", "is not valid YAML"),
        ("1: 2\nnum_blocks: 8", "1 is no name of a setting"),
        ("num_blocks: 8\nray: {2: 3}", "2 is no name of a setting"),
        ("num_blocks: 1", "num_blocks: must be greater than or equal to 2, got 1"),
    ],
)
def test_a_bad_file_is_one_clear_line_that_names_it(tmp_path, text, part):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert str(tmp_path / "pool.yaml") in message
    assert part in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        PoolConfig.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        PoolConfig.from_yaml(tmp_path)


counts = st.integers(1, 2**20)
configs = st.builds(
    PoolConfig,
    dp_size=counts,
    num_blocks=st.integers(2, 2**31 - 1),
    block_size=counts,
    enable_prefix_cache=st.booleans(),
    max_num_seqs=counts,
    max_model_len=st.none() | counts,
    hash_seed=st.none() | st.binary(min_size=1),
    disagg_pd=st.booleans(),
    routing=st.sampled_from([{}, {"policy": "free_blocks"}, {"policy": "module:Class"}]),
    memory=st.none() | st.fixed_dictionaries(dict.fromkeys(SHAPE, counts)),
    ray=st.fixed_dictionaries({}, optional={"num_gpus": st.floats(0, 8)}),
)


@given(configs)
def test_what_yaml_holds_comes_back(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("configs") / "pool.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()), encoding="utf-8")
    assert PoolConfig.from_yaml(path) == config
    assert sent(config) == config


# -- frozen, and its secret ------------------------------------------------------------------------


def test_it_is_frozen_all_the_way():
    config = PoolConfig(num_blocks=8)
    with pytest.raises(ValidationError, match="frozen"):
        config.num_blocks = 9
    with pytest.raises(ValidationError, match="frozen"):
        config.ray.num_gpus = 1


def test_the_hash_seed_is_drawn_once_and_travels():
    config = PoolConfig(num_blocks=8)
    assert config.hash_seed is None
    seeded, other = config.with_seed(), config.with_seed()
    assert len(seeded.hash_seed) == 16
    assert seeded.hash_seed != other.hash_seed
    assert seeded.with_seed() is seeded
    assert sent(seeded).hash_seed == seeded.hash_seed
    assert seeded.model_dump(exclude={"hash_seed"}) == config.model_dump(exclude={"hash_seed"})


def test_the_hash_seed_is_never_shown():
    config = PoolConfig(num_blocks=8, hash_seed=b"swordfish")
    assert "swordfish" not in f"{config} {config!r}"
    assert refusal(hash_seed=["swordfish"]).endswith("got a secret that is not shown")
    assert "hash_seed" in refusal(hash_seed=b"")
