"""What becomes of a layer, as values: names that users write in plans, and reasons that they read.

No torch here: options and explanations are read where it must not be.
"""

from __future__ import annotations

import re
from typing import Literal, cast, get_args

from attrs import field, frozen

from colossal_core.errors import UsageError

__all__ = ["Cut", "Role"]

Cut = Literal["column", "gathered-column", "row", "vocabulary", "whole"]
"""How a layer is cut: by output features, which stay cut; by output features, which are gathered; by input
features, of which the previous layer left this rank's; by rows of the vocabulary; or not at all."""

_ROLE = re.compile(r"([a-z-]+)(?::([1-9]\d*))?")


@frozen
class Role:
    """What a plan asks of a layer.

    Attributes:
        cut: How it is cut.
        num_parts: Fused parts of its output features, each of which is cut; None when nobody said.
        source: Who asks, for messages.
    """

    cut: Cut
    num_parts: int | None = None
    source: str = field(default="the plan", eq=False)

    @classmethod
    def parse(cls, text: object, place: str, source: str = "the plan") -> Role:
        """Read a role as users write it, ``"column"`` or ``"column:3"``.

        Args:
            text: What was written.
            place: Where, for messages.
            source: Who asks.

        Raises:
            UsageError: It is no role.
        """
        found = _ROLE.fullmatch(text) if isinstance(text, str) else None
        if found is None or found[1] not in get_args(Cut):
            raise UsageError(
                f"{place} is {text!r}, expected one of {', '.join(map(repr, get_args(Cut)))}",
                hint="add ':3' to 'column' when three parts are fused in it, as queries, keys and values are",
            )
        if found[2] is not None and found[1] != "column":
            raise UsageError(
                f"{place} is {text!r}, but only 'column' has fused parts", hint=f"write {found[1]!r}"
            )
        return cls(cast("Cut", found[1]), None if found[2] is None else int(found[2]), source)
