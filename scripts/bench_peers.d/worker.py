"""One side in a process of its own: reads a workload a line, answers with its row, as JSON.

Run as ``worker.py raykv|vllm|sglang``, in the environment of that side. The first line it writes
says which versions it runs and what it includes.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[[dict[str, Any]], dict[str, Any]]


def load_raykv() -> tuple[dict[str, Any], Run]:
    """This checkout's own rows."""
    import raykv  # noqa: PLC0415
    from raykv.bench import managers, timing  # noqa: PLC0415

    by_name = {each.__name__: each for each in managers.WORKLOADS}
    hello = {
        "version": raykv.__version__,
        "machine": timing.machine(),
        "workloads": [*by_name],
        "includes": {
            "prompt": "an int32 array",
            "admit": "allocate_shared, allocate; handles, references, exact comparison of tokens",
            "decode": "BlockTables.grow: the step's blocks in one call, written to the dense table",
            "finish": "cache (copies the tokens into the tree), deallocate, release",
            "left out": "Sequence, single blocks and statistics of BlockManagerPool",
        },
    }
    return hello, lambda order: by_name[order["workload"]](order["num_runs"]).as_json()


def load_peer(name: str) -> tuple[dict[str, Any], Run]:
    """A peer's rows."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    from workloads import WORKLOADS, Bench, Side  # noqa: PLC0415

    make: type[Side]
    if name == "vllm":
        from vllm_side import VllmSide as make  # noqa: N813, PLC0415
    else:
        from sglang_side import SglangSide as make  # noqa: N813, PLC0415
    hello = {
        "version": importlib.metadata.version(name),
        "torch": torch.__version__,
        "workloads": [*WORKLOADS],
        "includes": make.includes,
        "split_of": make.split_of,
    }

    def run(order: dict[str, Any]) -> dict[str, Any]:
        bench = Bench(make, order["label"], order["num_runs"])
        return {**WORKLOADS[order["workload"]](bench), "level": name}

    return hello, run


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    sys.path.append(str(ROOT))
    name = sys.argv[1]
    hello, run = load_raykv() if name == "raykv" else load_peer(name)
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
