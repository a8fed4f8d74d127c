"""Starting pools on Ray, ending them, and refusing what cannot be."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import ray

import raykv.errors
from raykv import PoolConfig, Sequence
from raykv.actors import launch
from raykv.actors.errors import translate
from raykv.errors import ConfigError, RankUnavailableError, RaykvError, RequestError

from .conftest import (
    SETTINGS,
    rank_processes,
    run_python,
    session_processes,
    wait_until,
)


def make_sequence(num_tokens, first=0):
    return Sequence(np.arange(first, first + num_tokens))


def test_a_closed_pool_leaves_nothing_behind(make_pool):
    pool = make_pool(dp_size=2)
    pids = [rank.info.pid for rank in pool.ranks]
    assert sorted(rank_processes()) == sorted(pids)
    wait_until(lambda: ray.available_resources()["CPU"] == 4)  # one each is reserved
    assert pool.allocate(make_sequence(8))
    pool.close()
    assert rank_processes() == []
    pool.close()
    assert ray.is_initialized(), "a Ray that others started goes on"


def test_an_error_in_the_block_closes_the_pool(cluster):
    with pytest.raises(ZeroDivisionError), launch(PoolConfig(**SETTINGS)):
        assert 1 // (len(rank_processes()) - 1)
    assert rank_processes() == []


def test_ranks_share_one_secret_and_each_start_is_a_later_epoch(make_pool):
    pool = make_pool(dp_size=2)
    assert pool.config.hash_seed is not None
    epochs = [rank.info.epoch for rank in pool.ranks]
    assert make_pool().ranks[0].info.epoch > max(epochs)


# Tokens per rank: 4 KB in one part; 640 KB in several; 1.3 MB through the object store.
@pytest.mark.parametrize("num_tokens", [32, 5000, 10_000])
def test_a_list_costs_one_round_trip_per_rank(make_pool, monkeypatch, num_tokens):
    pool = make_pool(dp_size=2, num_blocks=30_000, max_num_seqs=64, block_size=16)
    counts = [0, 0]
    for index, rank in enumerate(pool.ranks):

        def send(call, index=index, send=rank.send):
            counts[index] += 1
            return send(call)

        monkeypatch.setattr(rank, "send", send)
    rng = np.random.default_rng(0)
    sequences = [Sequence(rng.integers(0, 1000, num_tokens)) for _ in range(64)]
    assert pool.allocate(sequences)
    assert counts == [1, 1]
    for sequence in sequences:
        sequence.append(7)
    assert pool.allocate(sequences)
    assert counts == [2, 2]
    pool.deallocate(sequences)
    assert counts == [3, 3]
    pool.check_integrity()


def test_calls_of_many_threads_arrive_in_order(make_pool):
    pool = make_pool(num_blocks=400, max_num_seqs=64)
    errors = []

    def work(first):
        try:
            for round_ in range(10):
                # Small and large calls in turn: the large ones travel another way.
                sequence = make_sequence(1500 if round_ % 5 == 0 else 5, first)
                while not pool.allocate(sequence):
                    time.sleep(0.001)
                sequence.append(1)
                pool.allocate(sequence)
                pool.deallocate(sequence)
        except Exception as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(10_000 * i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert pool.num_used_blocks() == [0]


def test_actors_carry_the_pools_name(make_pool):
    pool = make_pool(dp_size=2, name="mine")
    for index in range(2):
        info, _ = ray.get(ray.get_actor(f"mine-rank-{index}").ready.remote())
        assert info.pid == pool.ranks[index].info.pid
    with pytest.raises(ConfigError, match="mine-rank-0"):
        make_pool(dp_size=2, name="mine")
    for settings, words in (({"name": 5}, "name is 5"), ({"lifetime": "forever"}, "'forever'")):
        with pytest.raises(ConfigError, match=words):
            launch(PoolConfig(**SETTINGS), **settings)
    assert pool.allocate(make_sequence(8)), "the first one is unharmed"


def test_a_given_placement_group_is_used_and_kept(make_pool):
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    try:
        with make_pool(dp_size=2, placement_group=group) as pool:
            assert pool.allocate(make_sequence(8))
            wait_until(lambda: ray.available_resources()["CPU"] == 4)
            states = [entry["state"] for entry in ray.util.placement_group_table().values()]
            assert states.count("CREATED") == 1, "no other was reserved"
        assert group.wait(10)
        with pytest.raises(ConfigError, match="placement group"):
            make_pool(placement_group=group, ray={"num_cpus": 2})
    finally:
        ray.util.remove_placement_group(group)


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"dp_size": 7}, "7 CPUs .* 6 CPUs"),
        ({"ray": {"num_gpus": 1}}, "1 GPUs .* 0 GPUs"),
        ({"dp_size": 2, "ray": {"placement_strategy": "STRICT_SPREAD"}}, "on 1 nodes"),
        ({"dp_size": 2, "ray": {"num_cpus": 4}}, "8 CPUs .* room for 1 ranks"),
        ({"memory": {"device": "cuda", "num_layers": 1, "num_kv_heads": 1, "head_dim": 8}}, "cuda"),
    ],
)
def test_what_the_cluster_can_never_hold_is_refused_at_once(cluster, settings, numbers):
    start = time.monotonic()
    with pytest.raises(ConfigError, match=numbers):
        launch(PoolConfig(**SETTINGS | settings))
    assert time.monotonic() - start < 5
    assert rank_processes() == []


def test_detached_actors_need_a_cluster_that_lasts():
    source = f"""
import raykv, raykv.actors
try:
    raykv.actors.launch(raykv.PoolConfig(**{SETTINGS}), lifetime="detached")
except raykv.errors.ConfigError as error:
    print(error)
"""
    assert "ray start" in run_python(source).communicate(timeout=60)[0]


def test_resources_that_others_hold_are_waited_for_within_bounds(make_pool):
    make_pool(dp_size=5)
    with pytest.raises(RankUnavailableError, match=r"no room for 2 ranks.* 1 CPUs and 0 GPUs are"):
        make_pool(dp_size=2, ray={"start_timeout_s": 0.5})
    with pytest.raises(RankUnavailableError, match=r"not ready within 0\.5 s: 0 "):
        make_pool(ray={"start_timeout_s": 0.5, "num_cpus": 2})
    assert len(rank_processes()) == 5


def test_a_missing_model_is_the_callers_error(make_pool):
    with pytest.raises(ConfigError, match="/no/such/model") as caught:
        make_pool(dp_size=2, model={"path": "/no/such/model"})
    assert type(caught.value) is ConfigError
    wait_until(lambda: rank_processes() == [])


def test_the_rank_raises_what_a_local_one_would(make_pool):
    pool = make_pool()
    with pytest.raises(RequestError, match="asks for 1000 tokens"):
        pool.allocate(make_sequence(1000))
    with pytest.raises(raykv.errors.NotSupportedError, match="no engine"):
        pool.ranks[0].poll(0.1)
    with pytest.raises(raykv.errors.NotSupportedError, match="no engine"):
        pool.ranks[0].abort(["x"]).result()


@pytest.mark.parametrize(
    "kind",
    [
        value
        for value in vars(raykv.errors).values()
        if isinstance(value, type) and issubclass(value, RaykvError)
    ],
)
def test_every_error_crosses_ray_unchanged(cluster, kind):
    error = kind("cause, 3 numbers, remedy")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(copy), copy.args) == (kind, error.args)

    @ray.remote(num_cpus=0)
    def fail():
        raise error

    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(fail.remote())
    translated = translate(caught.value, "rank 0", 1)
    assert (type(translated), translated.args) == (kind, error.args)


def test_a_fault_inside_a_rank_names_its_cause(cluster):
    @ray.remote(num_cpus=0)
    def fail():
        return {}["nothing"]

    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(fail.remote())
    translated = translate(caught.value, "rank 3", 1)
    assert type(translated) is RaykvError
    assert "rank 3" in str(translated)
    assert "KeyError: 'nothing'" in str(translated)


OWN_RAY = f"""
import time, ray
from raykv import PoolConfig, Sequence
from raykv.actors import launch
assert not ray.is_initialized()
config = PoolConfig(**{SETTINGS | {"dp_size": 5, "ray": {"num_cpus": 1}}})
"""


def test_launch_starts_a_ray_of_its_own_and_ends_it_with_the_last_pool():
    source = (
        OWN_RAY
        + """
with launch(config) as first:
    second = launch(config.model_copy(update={"dp_size": 1, "ray": {"num_cpus": 0}}))
    assert ray.cluster_resources()["CPU"] >= 5, "enough for the ranks, whatever the machine has"
    assert first.allocate(Sequence(range(8)))
assert second.allocate(Sequence(range(8)))
second.close()
assert not ray.is_initialized()
for pool in (first, second):
    pool.close()
    try:
        pool.stats()
    except Exception as error:
        print(type(error).__name__, error)
assert not ray.is_initialized(), "asking a closed pool starts nothing"
"""
    ).replace('"ray": {"num_cpus": 0}', '"ray": config.ray.model_copy(update={"num_cpus": 0})')
    process = run_python(source)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("was closed") == 2
    assert err == ""
    wait_until(lambda: session_processes(process.pid) == [])


def test_an_interrupt_ends_everything():
    process = run_python(
        OWN_RAY
        + """
with launch(config) as pool:
    print("ready", flush=True)
    sequence = Sequence(range(8))
    while True:
        pool.allocate(sequence)
        pool.deallocate(sequence)
"""
    )
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=30)
    assert err.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: session_processes(process.pid) == [])


def test_imports_stay_light():
    source = """
import sys, raykv
from raykv import PoolConfig, Sequence, BlockManagerPool
print([name for name in ("ray", "torch", "cupy", "transformers") if name in sys.modules])
import raykv.actors
print([name for name in ("ray", "torch", "cupy", "transformers") if name in sys.modules])
"""
    out = run_python(source).communicate(timeout=60)[0]
    assert out.splitlines() == ["[]", "['ray']"]
