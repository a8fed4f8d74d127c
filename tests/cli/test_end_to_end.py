import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_demo(smollm2):
    result = subprocess.run(
        [sys.executable, "-m", "raykv", "demo", "--quick", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        timeout=580,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1, result.stdout
    values = json.loads(result.stdout)
    assert (values["dp_size"], values["requests"]) == (2, 12)
    assert values["prompt_tokens"] > values["hit_tokens"] > 0
    assert values["hit_rate"] > 0.5
    assert values["outputs_equal"] is True
    assert values["near_ties"] <= 2
    assert values["compared_no_cache"] == 12
    assert values["compared_generate"] == 1
    assert values["max_logit_diff"] <= 1e-4
    assert values["corrupted_logit_diff"] > 1e-3
    assert values["leaked_blocks"] == 0
    assert values["checks_failed"] == []
    assert values["ttft_warm_ms"] < values["ttft_cold_ms"]
    assert values["tokens_per_s"] > 0
    assert values["tokens_per_s_no_cache"] > 0
    assert len(values["workload_sha256"]) == 64
    # Nothing but our own lines: no log of Ray's, no warning of transformers'.
    assert all(line.startswith("done") for line in result.stderr.splitlines()), result.stderr
