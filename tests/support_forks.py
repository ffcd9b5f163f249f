"""Processes that start in milliseconds and are killed at a moment: for tests of what that does."""

from __future__ import annotations

import json
import subprocess
import sys

# Imports once, then runs each order that it reads in a process of its own, forked.
# An order: {"argv": of agfa, or "code": Python; "seconds", "file": kill after so long, or once it is there; or null}
FORKS = """
import json, os, signal, sys, time
import agfa.cli, agfa.training.trainer, agfa.inference.predictor, agfa.benchmark.running, agfa.data.download
for line in sys.stdin:
    order = json.loads(line)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        if order["code"]:
            try:
                exec(order["code"])
                os._exit(0)
            finally:
                os._exit(1)
        sys.argv = ["agfa", *order["argv"]]
        agfa.cli.main()
    ended = 0
    while not ended:
        ended, status = os.waitpid(child, os.WNOHANG)
        late = order["seconds"] is not None and time.monotonic() - began > order["seconds"]
        if not ended and (late or (order["file"] and os.path.exists(order["file"]))):
            os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, 0)
        time.sleep(0.001)
    print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - began]), flush=True)
"""


class Forks:
    """What is started has the folder and the environment that this was made in; what it prints goes to `out`."""

    def __init__(self, out: str = "out.txt") -> None:
        self.out = out
        command = [sys.executable, "-c", FORKS]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def agfa(
        self, *argv: str, code: str = "", seconds: float | None = None, file: str | None = None
    ) -> tuple[int, float]:
        """The exit status (-9 when killed) and the seconds that it took."""
        self.begin(*argv, code=code, seconds=seconds, file=file)
        return self.end()

    def begin(self, *argv: str, code: str = "", seconds: float | None = None, file: str | None = None) -> None:
        """Start it."""
        order = {"argv": argv, "code": code, "seconds": seconds, "file": file, "out": self.out}
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def end(self) -> tuple[int, float]:
        """Wait for what was started."""
        assert self.process.stdout is not None
        status, took = json.loads(self.process.stdout.readline())
        return status, took

    def close(self) -> None:
        """No more."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
