"""Several drivers on one pool: each has its own sequences, and may die by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray

from raykv import PoolConfig, SamplingParams, Sequence
from raykv.actors import attach, end, launch
from raykv.errors import RankUnavailableError, RequestError

from .conftest import SETTINGS, rank_processes, run_python, session_processes, wait_until

BOUND_S = 60
SPACE = "pools"
LEASE_S = 2.0
LONG = "SamplingParams(max_tokens=3000, ignore_eos=True)"


@pytest.fixture
def make_shared(cluster):
    """Launches pools under a name, and ends what is left of them."""
    made = []

    def make(name, **settings):
        ray_config = {"lease_s": LEASE_S}
        config = PoolConfig(**SETTINGS | {"dp_size": 2, "ray": ray_config} | settings)
        made.append(launch(config, name=name, namespace=SPACE))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
    assert rank_processes() == []


def driver(source, address=None):
    """A driver in a process of its own, which prints when it is ready and reads commands."""
    address = ray.get_runtime_context().gcs_address if address is None else address
    head = f"""
import os, sys, threading, time
os.environ["RAY_ADDRESS"] = {address!r}
import raykv
from raykv import PoolConfig, SamplingParams, Sequence
from raykv.actors import attach, end, launch
"""
    return run_python(head + source, stdin=subprocess.PIPE)


def hear(process, word):
    line = process.stdout.readline()
    if line != f"{word}\n":
        process.kill()
        pytest.fail(f"{line!r} instead of {word!r}: {process.communicate()[1]}")


def finish(process, word):
    """Let a driver go on to its end."""
    out, err = process.communicate("go\n", timeout=BOUND_S)
    assert process.returncode == 0, err
    assert out.splitlines()[-1:] == [word]


VICTIM = f"""
pool = attach("shared", namespace={SPACE!r})
held = [Sequence(range(100 * i, 100 * i + 12)) for i in range(4)]
assert pool.allocate(held)
def generate():
    pool.generate([[1, 2, 3], [4, 5, 6]], {LONG})
threading.Thread(target=generate, daemon=True).start()
while sum(pool.num_used_blocks()) < 15:
    time.sleep(0.01)
print("ready", flush=True)
sys.stdin.readline()
"""

BYSTANDER = f"""
pool = attach("shared", namespace={SPACE!r})
params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
held = Sequence(range(1000, 1012))
assert pool.allocate(held)
prompts = [[7, 8, 9], [10, 11]]
expected = [output.token_ids for output in pool.generate(prompts, params)]
outcomes = []
stopped = threading.Event()
def work():
    while not stopped.is_set():
        outputs = pool.generate(prompts, params)
        outcomes.append([output.token_ids for output in outputs] == expected)
        held.append(1)
        outcomes.append(pool.allocate(held) and held.kv_state.num_blocks * 4 >= held.num_tokens)
        if held.num_tokens > 60:
            pool.deallocate(held)
thread = threading.Thread(target=work)
thread.start()
print("ready", flush=True)
sys.stdin.readline()
stopped.set()
thread.join()
assert outcomes and all(outcomes)
assert [rank.session for rank in pool.ranks] == [0, 0], "it lost nothing"
assert pool.generations.num_failed_over == 0
pool.deallocate(held)
pool.close()
print("fine")
"""


def test_a_driver_that_dies_leaves_nothing_behind_and_the_others_notice_nothing(
    make_shared, tiny_model
):
    pool = make_shared("shared", model={"path": tiny_model}, num_blocks=2000)
    mine = Sequence(range(500, 509))
    assert pool.allocate(mine)
    victim, bystander = driver(VICTIM), driver(BYSTANDER)
    hear(victim, "ready")
    hear(bystander, "ready")
    before = [rank.info.pid for rank in pool.ranks]
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    # The bystander holds one sequence of up to 16 blocks, and two requests of up to 16 each.
    wait_until(lambda: sum(pool.num_used_blocks()) <= 3 + 3 * 16, BOUND_S)
    finish(bystander, "fine")
    wait_until(lambda: sum(pool.num_used_blocks()) == 3, BOUND_S)
    pool.check_integrity()
    mine.append(1)
    assert pool.allocate(mine)
    assert [rank.session for rank in pool.ranks] == [0, 0]
    assert [rank.info.pid for rank in pool.ranks] == before
    for process in (victim, bystander):
        wait_until(lambda process=process: session_processes(process.pid) == [])
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


def test_closing_an_attached_pool_gives_back_what_it_held_and_the_ranks_live_on(make_shared):
    pool = make_shared("shared")
    pids = sorted(rank_processes())
    for _ in range(2):
        attached = attach("shared", namespace=SPACE)
        sequences = [Sequence(range(100 * i, 100 * i + 8)) for i in range(4)]
        assert attached.allocate(sequences)
        assert pool.num_used_blocks() == [4, 4]
        attached.close()
        attached.close()
        wait_until(lambda: pool.num_used_blocks() == [0, 0])
        with pytest.raises(RankUnavailableError, match="closed"):
            attached.stats()
        attached.deallocate(sequences)
    assert sorted(rank_processes()) == pids
    pool.check_integrity()


def test_drivers_share_what_is_cached(make_shared):
    pool = make_shared("shared")
    sequence = Sequence(range(9))
    assert pool.allocate(sequence)
    sequence.kv_state.num_computed_tokens = 9
    rank = sequence.dp_rank
    pool.deallocate(sequence)
    with attach("shared", namespace=SPACE) as attached:
        again = Sequence(range(9))
        again.dp_rank = rank
        assert attached.allocate(again)
        assert again.kv_state.num_computed_tokens == 8
        attached.deallocate(again)


def test_a_request_of_a_pool_that_is_closed_fails(make_shared, tiny_model):
    pool = make_shared("shared", model={"path": tiny_model}, num_blocks=2000)
    attached = attach("shared", namespace=SPACE)
    errors = []
    requests = attached.make_requests([1, 2, 3], SamplingParams(max_tokens=3000, ignore_eos=True))
    attached.start(requests, [lambda delta: errors.append(delta.error)])
    wait_until(lambda: sum(pool.num_used_blocks()) > 0)
    attached.close()
    wait_until(lambda: errors and isinstance(errors[-1], RankUnavailableError))
    wait_until(lambda: pool.num_used_blocks() == [0, 0])


@pytest.mark.parametrize("what", ["attach", "end"])
def test_a_name_that_is_not_there_is_the_callers_error(cluster, what):
    call = {"attach": attach, "end": end}[what]
    with pytest.raises(RequestError, match=r"no pool 'nobody' in Ray namespace 'pools'"):
        call("nobody", namespace=SPACE)


def test_a_pool_can_be_ended_by_its_name(make_shared):
    pool = make_shared("shared")
    attached = attach("shared", namespace=SPACE)
    assert attached.allocate(Sequence(range(8)))
    end("shared", namespace=SPACE)
    wait_until(lambda: rank_processes() == [])
    for one in (pool, attached):
        wait_until(lambda one=one: all(rank.lost for rank in one.ranks))
        with pytest.raises(RankUnavailableError):
            one.stats()
    attached.close()
    with pytest.raises(RequestError, match="no pool 'shared'"):
        attach("shared", namespace=SPACE)
    pool.close()
    again = make_shared("shared")
    assert again.allocate(Sequence(range(8))), "the name is free again"


def test_attaching_where_no_ray_runs_is_the_callers_error():
    source = """
try:
    attach("shared")
except raykv.errors.RequestError as error:
    print("no Ray" in str(error))
"""
    assert driver(source, "").communicate(timeout=BOUND_S)[0] == "True\n"


def test_a_detached_pool_outlives_its_launcher():
    with tempfile.TemporaryDirectory(prefix="rk", dir="/tmp") as folder:
        ray_script = Path(sys.executable).with_name("ray")
        head = subprocess.Popen(  # noqa: S603 - our own command line
            [
                ray_script, "start", "--head", "--block", "--port=0", "--num-cpus=3",
                "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--temp-dir", folder,
                "--object-store-memory=100000000", "--disable-usage-stats",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            found = Path(folder) / "ray_current_cluster"
            wait_until(found.exists, BOUND_S)
            address = found.read_text().strip()
            launcher = driver(
                f"""
config = PoolConfig(**{SETTINGS}, dp_size=2, ray={{"lease_s": {LEASE_S}}})
pool = launch(config, name="lasting", namespace={SPACE!r}, lifetime="detached")
assert pool.allocate([Sequence(range(100 * i, 100 * i + 8)) for i in range(4)])
print("ready", flush=True)
sys.stdin.readline()
os._exit(0)
""",
                address,
            )
            hear(launcher, "ready")
            launcher.communicate("go\n", timeout=BOUND_S)
            user = driver(
                f"""
import ray
ray.init(log_to_driver=False)  # stays when the pool is closed
pool = attach("lasting", namespace={SPACE!r})
deadline = time.monotonic() + {BOUND_S}
while pool.num_used_blocks() != [0, 0]:
    assert time.monotonic() < deadline
    time.sleep(0.05)
assert pool.allocate(Sequence(range(8)))
pool.close()
end("lasting", namespace={SPACE!r})
try:
    attach("lasting", namespace={SPACE!r})
except raykv.errors.RequestError:
    pass
while ray.available_resources().get("CPU") != 3:  # what its launcher reserved is free again
    assert time.monotonic() < deadline + {BOUND_S}
    time.sleep(0.05)
print("fine")
""",
                address,
            )
            finish(user, "fine")
        finally:
            head.terminate()
            head.wait(BOUND_S)
            for pid, _ in session_processes(head.pid):
                os.kill(pid, signal.SIGKILL)
