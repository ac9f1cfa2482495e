"""The pytest plugin: the fixture ``ranks``, the markers ``gpu`` and ``slow``, and the end of the pool.

pytest loads it in every run of an environment that has testkit, so it imports nothing heavy: torch comes with
the first test that uses a fixture. A test that carries ``@pytest.mark.gpu`` is skipped with a reason that
says what is missing, one that carries ``@pytest.mark.slow`` runs with ``--slow`` or when it is selected by
``-m``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from colossal_testkit.ranks import RankPool

__all__ = [
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_setup",
    "pytest_unconfigure",
    "ranks",
]

# A failing assertion of a contract shows its values, also where the package is installed in place and pytest
# cannot see from its metadata what belongs to it.
pytest.register_assert_rewrite("colossal_testkit.contracts")

_MARKERS = (
    "gpu(count=1): needs that many accelerators; skipped with a reason that says what is missing",
    "slow: minutes rather than seconds; runs with --slow, or when -m selects it",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer ``--slow``."""
    group = parser.getgroup("colossal", "many-rank tests of Colossal")
    group.addoption("--slow", action="store_true", help="run tests that are marked slow")


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, so that strict runs accept them."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests unless they were asked for."""
    if config.getoption("--slow") or "slow" in str(config.getoption("-m")):
        return
    reason = pytest.mark.skip(reason="slow: run with --slow, or select it with -m slow")
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(reason)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the pool import torch while the first tests run, when a test file or a fixture will use it."""
    if session.config.getoption("--collect-only") or not session.items:
        return
    is_used = "colossal_testkit.ranks" in sys.modules
    if is_used or any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        from colossal_testkit.ranks import session_pool

        session_pool().start()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs accelerators which this machine, or this build of torch, does not have."""
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        missing = _describe_missing_accelerators(int(marker.kwargs.get("count", 1)))
        if missing:
            pytest.skip(missing)


def pytest_unconfigure() -> None:
    """End the processes of the pool, when there are any."""
    module = sys.modules.get("colossal_testkit.ranks")
    if module is not None:
        module.session_pool().close()


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Give the pool of workers: ``ranks(function, nproc, *args)`` returns what every rank returned."""
    from colossal_testkit.ranks import session_pool

    return session_pool()


def _describe_missing_accelerators(count: int) -> str:
    """Return what a test on ``count`` accelerators lacks here, or nothing."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"needs {count} accelerators: this torch ({torch.__version__}) is built without CUDA and ROCm"
    found = torch.cuda.device_count()
    if found < count:
        seen = f"torch {torch.__version__} sees {found}"
        return f"needs {count} accelerators: {seen} (driver, or CUDA_VISIBLE_DEVICES)"
    return ""
