"""Time ``colossal plugins list`` as a person meets it: a fresh process, installed wheels, bytecode in place.

The claim: at most 150 ms, the median of several runs. The limit is held against processor time, which is
nearly all of it and does not depend on what else the machine does; the time that passed stands beside it. Run
by ``nox -s startup``, which installs the wheels.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = (("plugins", "list"), ("plugins", "list", "--json"), ("--help",))


def time_command(program: Path, arguments: tuple[str, ...]) -> tuple[float, float]:
    """Return the milliseconds of one process: on a processor, and from start to end.

    Raises:
        subprocess.CalledProcessError: It failed, so its time means nothing.
    """
    used, started = measure_children(), time.perf_counter()
    subprocess.run([program, *arguments], check=True, capture_output=True)  # noqa: S603 - our own program
    return measure_children() - used, (time.perf_counter() - started) * 1e3


def measure_children() -> float:
    """Return the milliseconds that processes which ended have spent on a processor."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (usage.ru_utime + usage.ru_stime) * 1e3


def main() -> int:
    """Print the median of each command; 1 when one is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-ms", type=float, default=150.0)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    program = Path(sys.executable).with_name("colossal")
    is_within = True
    for arguments in COMMANDS:
        time_command(program, arguments)  # the first run fills the disk cache
        times = [time_command(program, arguments) for _ in range(options.runs)]
        processor, passed = (statistics.median(column) for column in zip(*times, strict=True))
        is_within &= processor <= options.limit_ms
        print(
            f"colossal {' '.join(arguments)}: median {processor:.0f} ms on a processor, {passed:.0f} passed, "
            f"{len(times)} runs"
        )
    print(f"limit {options.limit_ms:.0f} ms: {'kept' if is_within else 'exceeded'}")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
