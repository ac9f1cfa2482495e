"""Answers to a name or an object that no active plugin offers.

Before saying that something does not exist, plugins that are disabled, incompatible or failed are consulted,
since it may be theirs, and so is the list of our own distributions that are not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from colossal_core.errors import ColossalError, UnknownNameError, UsageError
from colossal_core.mesh.axes import DATA_AXIS
from colossal_core.plugins.catalogue import DISTRIBUTION_BY_AXIS, DISTRIBUTION_BY_NAME
from colossal_core.spelling import join_names, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from colossal_core.plugins.entries import PluginStatus, Registered

__all__ = ["explain_axis", "explain_missing", "explain_piece", "tell_state"]


def explain_missing(
    kind: str,
    name: str,
    offered: Sequence[Registered],
    pieces: Sequence[Registered],
    inactive: Sequence[PluginStatus],
) -> ColossalError:
    """Return the error for a name that is not offered.

    Args:
        kind: What was looked for.
        name: The name, perhaps qualified.
        offered: All records of that kind.
        pieces: All records of pieces, in case the name is of the other kind.
        inactive: Plugins that are disabled, incompatible or failed.
    """
    plugin, _, short = name.rpartition(":")
    valid = {entry.record.name for entry in offered}
    message = f"there is no {kind.replace('_', ' ')} {name!r}; there are: {join_names(valid)}"
    other = [entry for entry in pieces if name in (entry.record.name, entry.qualified_name)]
    if other:
        message += f"; {name!r} is a {other[0].record.kind.replace('_', ' ')}"
    distribution = DISTRIBUTION_BY_NAME.get(short) or DISTRIBUTION_BY_NAME.get(plugin, "")
    closest = suggest(name, valid | {entry.qualified_name for entry in offered})
    return _consult(message, closest, distribution, inactive, names={plugin, short})


def explain_axis(
    axis: str, place: str, pieces: Sequence[Registered], inactive: Sequence[PluginStatus]
) -> ColossalError:
    """Return the error for a mesh axis that no active piece brings.

    Args:
        axis: The axis.
        place: Where it was written, the start of the message.
        pieces: All records of pieces.
        inactive: Plugins that are disabled, incompatible or failed.
    """
    valid = {DATA_AXIS, *(spec.name for entry in pieces for spec in entry.piece.axes)}
    message = f"{place}: no piece brings the axis {axis!r}; there are: {join_names(valid)}"
    closest = suggest(axis, valid | DISTRIBUTION_BY_AXIS.keys())
    return _consult(message, closest, DISTRIBUTION_BY_AXIS.get(axis, ""), inactive, names={axis})


def _consult(
    message: str, closest: str, distribution: str, inactive: Sequence[PluginStatus], *, names: set[str]
) -> UnknownNameError:
    """Add to a message who may bring the missing thing, and what to do.

    Args:
        message: What is missing.
        closest: The question about the closest name, or empty.
        distribution: Our distribution that brings it, or empty.
        inactive: Plugins that are disabled, incompatible or failed.
        names: Names of plugins that would bring it for certain.
    """
    # Whoever brings the name for certain is named alone; otherwise any inactive plugin may be the one.
    certain = [status for status in inactive if status.name in names or status.distribution == distribution]
    blamed = certain or ([] if distribution else list(inactive))
    for status in blamed:
        message += f"\n  {tell_state(status)}, and {'brings' if certain else 'may bring'} it"
    hints = [closest]
    if certain or (blamed and not closest):
        hints.append(_tell_remedy(blamed[0]))
    elif distribution:
        hints.append(f"pip install {distribution}")
    return UnknownNameError(message, hint=" or ".join(filter(None, hints)) or "see colossal plugins list")


def explain_piece(
    options: object,
    pieces: Sequence[Registered],
    same_class: Sequence[Registered],
    blamed: Sequence[PluginStatus],
) -> ColossalError:
    """Return the error for an object that is the piece of no record.

    Args:
        options: The object.
        pieces: All records of pieces.
        same_class: Those that name its class, but preset other values.
        blamed: Inactive plugins of the package that the object comes from.
    """
    names = join_names(entry.record.name for entry in pieces)
    if isinstance(options, type):
        message = f"a piece is an object, got the class {options.__qualname__}"
        return UsageError(message, hint=f"write {options.__name__}(...)")
    if same_class:
        presets = "; ".join(f"{entry.record.name} is {_print_presets(entry)}" for entry in same_class)
        return UsageError(f"{options!r} is no piece that is offered: {presets}", hint="give one of these")
    if blamed:
        message = f"{options!r} cannot be used: {tell_state(blamed[0])}"
        return UsageError(message, hint=_tell_remedy(blamed[0]))
    message = (
        f"{options!r} is no piece: no plugin offers {type(options).__module__}:{type(options).__qualname__}"
    )
    return UsageError(f"{message}; there are {names}", hint="give a piece, or the name of one")


def tell_state(status: PluginStatus) -> str:
    """Return one clause about a plugin: ``plugin 'gemini' (colossal-gemini 0.3.1) is disabled ...``."""
    provider = f"{status.distribution} {status.version}".strip()
    title = f"plugin {status.name!r} ({provider})" if provider else f"plugin {status.name!r}"
    if status.state == "failed":
        return f"{title} has failed: {status.reason}"
    source = f" by {status.source}" if status.state == "disabled" else ""
    return f"{title} is {status.state}{source}: {status.reason}"


def _tell_remedy(status: PluginStatus) -> str:
    """Return the next step for a plugin that is not active."""
    if status.state == "disabled":
        by_switch = status.source.startswith("-") or status.source.startswith("COLOSSAL_")
        return f"change {status.source}" if by_switch else f"colossal plugins enable {status.name}"
    if status.state == "incompatible":
        return f"install a version of {status.distribution} that goes with this colossal-core"
    return f"colossal plugins doctor {status.name}"


def _print_presets(entry: Registered) -> str:
    """Print the values that make an object this piece: ``stage=1``."""
    values: Iterable[str] = (f"{name}={value!r}" for name, value in sorted(entry.piece.presets.items()))
    return ", ".join(values) or "without presets"
