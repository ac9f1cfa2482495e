"""An interpreter that has imported torch, and forks a fresh program for each piece of code.

Importing torch and its compiler costs some two seconds of processor time (measured with torch 2.13), more
than what most programs of the documentation compute. A fork begins where these imports have ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_SERVER = """
import json, os, sys
import torch, torch._dynamo, torch.distributed

sys.stdin = open(os.dup(0))
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
nothing = os.open(os.devnull, os.O_RDONLY)
for target, source in ((0, nothing), (1, output), (2, output)):
    os.dup2(source, target)
os.chdir(job["folder"])
os.environ.clear()
os.environ.update(job["environment"])
code = compile(job["code"], "<string>", "exec")
for name in [name for name in globals() if not name.startswith("__") and name != "code"]:
    del globals()[name]
del name
exec(globals().pop("code"))
"""


class Preloaded:
    """The interpreter; one program runs at a time, with warnings as errors."""

    def __init__(self) -> None:
        """Start it without waiting for its imports."""
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
        """Run a program as ``python -W error -c`` would, and return its exit code and all that it printed.

        Args:
            code: The program.
            folder: Where it runs.
            environment: All its variables.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = folder / ".output"
        job = {"code": code, "folder": str(folder), "environment": dict(environment), "output": str(output)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        exit_code = int(self._process.stdout.readline())
        printed = output.read_text(encoding="utf-8")
        output.unlink()
        return exit_code, printed

    def close(self) -> None:
        """End the interpreter; a program that still runs ends by itself."""
        with self._process:
            self._process.kill()
