"""Contracts cannot be weakened quietly.

# Note [Open names]
A contract class lists the names that a subclass fills in: the options object, the formulas. Every other
attribute of the contract, tests and tolerances alike, must be the contract's own in the subclass. Two ways
out are visible in every report: a test that is overridden with ``@pytest.mark.xfail(reason=...)``, and an
entry in ``waivers``, which skips the test with its reason. `Contract.test_contract_is_whole` fails for
anything else, and a subclass cannot drop it: the machinery that makes the class puts it back.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

__all__ = ["Contract", "find_weakenings"]

_GUARD = "test_contract_is_whole"


class Contract:
    """Base of all contract classes.

    Attributes:
        open_names: What a subclass may define; see Note [Open names].
        waivers: Name of a test to the reason why this piece does not pass it.
    """

    open_names: ClassVar[frozenset[str]] = frozenset({"waivers"})
    waivers: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, *, is_contract: bool = False, **keywords: Any) -> None:
        """Remember which classes are contracts, and keep the guard in all others."""
        super().__init_subclass__(**keywords)
        cls._is_contract = is_contract
        if _GUARD in vars(cls):
            delattr(cls, _GUARD)

    _is_contract: ClassVar[bool] = True

    def test_contract_is_whole(self) -> None:
        """The subclass drops and overrides nothing but what the contract leaves open."""
        problems = find_weakenings(type(self))
        if problems:
            pytest.fail("the contract is weakened:\n" + "\n".join(f"  {problem}" for problem in problems))

    @pytest.fixture(autouse=True)
    def _honour_waivers(self, request: pytest.FixtureRequest) -> None:
        """Skip a test that the piece waives, with its reason."""
        reason = self.waivers.get(request.node.originalname, "")
        if reason and request.node.originalname != _GUARD:
            pytest.skip(f"waived: {reason}")


def find_weakenings(subclass: type[Contract]) -> list[str]:
    """Return what a subclass changes that the contract does not leave open, as sentences."""
    contracts = [
        base for base in subclass.__mro__ if issubclass(base, Contract) and vars(base)["_is_contract"]
    ]
    open_names = frozenset[str]().union(*(base.open_names for base in contracts))
    problems = []
    promised: dict[str, type[Contract]] = {}
    for base in contracts:
        for name in vars(base):
            if not name.startswith("__") and name not in open_names:
                promised.setdefault(name, base)
    for name, base in promised.items():
        found = inspect.getattr_static(subclass, name, None)
        if name in ("open_names", "_is_contract") or found is vars(base)[name] or _is_expected_failure(found):
            continue
        problems.append(
            f"{subclass.__name__}.{name} replaces that of {base.__name__}: "
            + ("mark it xfail with a reason, or waive it" if name.startswith("test_") else "it is not open")
        )
    for name, reason in subclass.waivers.items():
        if name not in promised or not name.startswith("test_") or name == _GUARD:
            problems.append(
                f"{subclass.__name__}.waivers names {name!r}, which is no test that can be waived"
            )
        elif not reason.strip():
            problems.append(f"{subclass.__name__}.waivers gives no reason for {name!r}")
    return problems


def _is_expected_failure(function: object) -> bool:
    """Say whether a test is marked xfail with a reason."""
    marks = getattr(function, "pytestmark", [])
    return any(mark.name == "xfail" and str(mark.kwargs.get("reason", "")).strip() for mark in marks)
