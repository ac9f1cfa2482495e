"""One piece of a plan while its sources are put together.

A piece may be asked for by several sources: a file gives some of its options, the call gives its name or an
object. A name adds nothing, written options add up, and an object states all of its options; where two of
them differ, both are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import attrs

from colossal_core.config import Given
from colossal_core.errors import ColossalError, PlanError
from colossal_core.options import build_options
from colossal_core.plan import PlannedPiece

if TYPE_CHECKING:
    from colossal_core.plugins.entries import Registered

__all__ = ["PieceChoice"]


@final
@attrs.define
class PieceChoice:
    """What has been said about one piece so far.

    Attributes:
        entry: The record.
        origin: Who asked for the piece first.
        written: Options that were written down, by name.
        whole: The object of options, when one was given.
    """

    entry: Registered
    origin: str
    written: dict[str, Given] = attrs.field(factory=dict)
    whole: Given | None = None

    def add_written(self, options: Mapping[str, Given]) -> list[ColossalError]:
        """Take options from a file or dict, and return disagreements with those from before."""
        problems: list[ColossalError] = []
        for name, given in options.items():
            known = self.written.setdefault(name, given)
            if known.value != given.value:
                problems.append(self._disagree(name, known, given))
        return problems

    def add_whole(self, options: object, origin: str) -> list[ColossalError]:
        """Take an object of options, and return disagreements with the one from before."""
        given = Given(options, origin)
        if self.whole is None:
            self.whole = given
        return self._compare(self.whole, given, names=None)

    def plan(self) -> tuple[PlannedPiece | None, list[ColossalError]]:
        """Return the planned piece, or None and everything that is wrong with its options.

        Raises:
            PluginLoadError: The class of options cannot be imported.
        """
        piece = self.entry.piece
        if self.whole is not None and not self.written:
            return self._make(self.whole.value), []
        values = {name: given.value for name, given in self.written.items()}
        places = {name: given.origin for name, given in self.written.items()}
        if self.whole is not None:
            # The object fills what was not written, so that only what was written is compared with it.
            rest = {name: value for name, value in self._read(self.whole.value).items() if name not in values}
            values.update(rest)
            places.update(dict.fromkeys(rest, self.whole.origin))
        options, problems = build_options(
            self.entry.load_options(), values, places, piece.presets, piece.name
        )
        if options is None or self.whole is None:
            return (None if options is None else self._make(options)), problems
        built = Given(options, self.origin)
        return self._make(self.whole.value), self._compare(built, self.whole, names=self.written)

    def list_origins(self) -> dict[str, str]:
        """Return ``NAME.OPTION`` to where the option was given, for those that somebody gave."""
        origins: dict[str, str] = {}
        if self.whole is not None:
            origins = dict.fromkeys(self._read(self.whole.value), self.whole.origin)
        origins.update({name: given.origin for name, given in self.written.items()})
        return {f"{self.entry.record.name}.{name}": origin for name, origin in origins.items()}

    def _make(self, options: object) -> PlannedPiece:
        """Return the planned piece for an object of options."""
        piece = self.entry.piece
        return PlannedPiece(record=piece, plugin=self.entry.plugin, options=options, origin=self.origin)

    def _read(self, options: object) -> dict[str, object]:
        """Return all options of an object but those that the record presets."""
        fields = attrs.fields(self.entry.load_options())
        presets = self.entry.piece.presets
        return {f.alias: getattr(options, f.name) for f in fields if f.init and f.alias not in presets}

    def _compare(self, first: Given, second: Given, names: Mapping[str, Given] | None) -> list[ColossalError]:
        """Return disagreements of two objects; of the named options only, whose own origins are then told."""
        left, right = self._read(first.value), self._read(second.value)
        problems: list[ColossalError] = []
        for name in left if names is None else names:
            if left[name] != right[name]:
                # The value as it was written is easier to find than what the class made of it.
                shown = Given(left[name], first.origin) if names is None else names[name]
                problems.append(self._disagree(name, shown, Given(right[name], second.origin)))
        return problems

    def _disagree(self, option: str, first: Given, second: Given) -> PlanError:
        """Return the error for two values of one option."""
        name = f"{self.entry.record.name}.{option}"
        message = f"{name} is {first.value!r} by {first.origin}, but {second.value!r} by {second.origin}"
        return PlanError(message, hint="keep one of them; an object states all of its options")
