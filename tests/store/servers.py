"""A real Redis server for one test session, which can be killed and frozen."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time

import pytest

MISSING = "redis-server is not installed; on Debian and Ubuntu: apt-get install redis-server"


class RedisServer:
    """Listens on a loopback port of its own and keeps nothing on the disk."""

    def __init__(self, folder):
        self.program = shutil.which("redis-server")
        if self.program is None:
            pytest.skip(MISSING)
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process = None

    def start(self):
        command = [
            *(self.program, "--port", str(self.port), "--bind", "127.0.0.1"),
            *(
                "--save",
                "",
                "--appendonly",
                "no",
                "--dir",
                str(self.folder),
                "--loglevel",
                "warning",
            ),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603
        for _ in range(500):
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
                    link.sendall(b"PING\r\n")
                    if link.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                time.sleep(0.02)
        self.kill()
        raise AssertionError(f"{command} does not answer")

    def freeze(self):
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
