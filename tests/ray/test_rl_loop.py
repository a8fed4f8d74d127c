"""scripts/rl_loop.py learns, from samples that each came from the weights of its round."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from raykv import BlockManagerPool

from .conftest import rank_processes

SCRIPT = Path(__file__).parents[2] / "scripts" / "rl_loop.py"
NUM_ROUNDS, NUM_SAMPLES, NUM_TOKENS = 20, 64, 16


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(before)


def test_the_loop_learns_from_the_weights_of_each_round(cluster, one_thread, monkeypatch, capsys):
    rounds, versions, generate = [], [], BlockManagerPool.generate

    def watch(pool, *arguments):
        versions.append(pool.weights_version())
        rounds.append(generate(pool, *arguments))
        return rounds[-1]

    monkeypatch.setattr(BlockManagerPool, "generate", watch)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = re.findall(
        r"round +(\d+): .*reward ([\d.]+), .*within (\S+)", capsys.readouterr().out
    )
    assert [int(number) for number, _, _ in printed] == list(range(NUM_ROUNDS))

    rewards = [float(reward) for _, reward, _ in printed]
    assert rewards[0] == pytest.approx(0.5, abs=0.1)
    assert rewards[-1] > rewards[0] + 0.2
    assert max(float(gap) for _, _, gap in printed) < 1e-3, "the trainer's log-probabilities"

    assert versions == [[version, version] for version in range(NUM_ROUNDS)]
    for version, outputs in enumerate(rounds):
        assert {output.weights_versions for output in outputs} == {(version,) * NUM_TOKENS}
        assert {output.dp_rank for output in outputs} == {0, 1}
        assert len(outputs) == NUM_SAMPLES
        assert len({output.token_ids for output in outputs}) > NUM_SAMPLES // 2, "samples differ"
    assert rank_processes() == []


def test_it_is_short():
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 60
