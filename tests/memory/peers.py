"""Other processes for tests: each carries out Python statements until it is killed."""

import ast
import contextlib
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import pickle, sys, traceback
from raykv.memory.host_slab import HostSlab
scope = globals()
for line in sys.stdin:
    code = bytes.fromhex(line).decode()
    try:
        exec(code, scope)
        print(repr(("done", scope.pop("answer", None))), flush=True)
    except Exception as error:
        print(repr(("failed", f"{type(error).__name__}: {error}")), flush=True)
"""


class Peer:
    def __init__(self):
        self.process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def start(self, code):
        """Carry out statements."""
        self.process.stdin.write(code.encode().hex() + "\n")
        self.process.stdin.flush()

    def run(self, code):
        """Carry out statements; returns what they leave in ``answer``."""
        self.start(code)
        how, answer = ast.literal_eval(self.process.stdout.readline())
        if how == "failed":
            raise RuntimeError(answer)
        return answer

    def kill(self):
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def holders(name):
    """Processes that have shared memory of this name open or mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        seen = ""
        with contextlib.suppress(OSError):  # it is gone
            seen += (process / "maps").read_text()
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # that one is closed
                    seen += str(link.readlink())
        if f"/memfd:{name}" in seen:
            found.add(int(process.name))
    return found


def num_open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def attach(peer, descriptor):
    peer.run(f"slab = HostSlab.attach(pickle.loads({pickle.dumps(descriptor)!r}))")


def descriptor_of(peer):
    return pickle.loads(peer.run("answer = pickle.dumps(slab.descriptor)"))  # noqa: S301 - ours
