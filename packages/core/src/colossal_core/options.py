"""Options of pieces as plain values: built from files and dicts, checked, and written down again.

A piece's class is the one place of its options. What comes from Python has been through its constructor; what
comes from a file or a dict is checked here against the annotations first, so that ``degree = "8"`` is refused
with the key and the remedy instead of failing somewhere in the arithmetic.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePath

import attrs

from colossal_core.errors import ColossalError, PlanError
from colossal_core.spelling import join_names, suggest

__all__ = ["build_options", "check_value", "list_required", "write_options", "write_plain"]

_KINDS: Mapping[object, tuple[type, ...]] = {
    bool: (bool,),
    float: (int, float),
    int: (int,),
    str: (str,),
    types.NoneType: (types.NoneType,),
}
_KIND_NAMES: Mapping[object, str] = {
    bool: "true or false",
    float: "a number",
    int: "an integer",
    list: "a list",
    str: "a string",
    tuple: "a list",
    types.NoneType: "None",
}


def build_options(
    options: type[attrs.AttrsInstance],
    given: Mapping[str, object],
    places: Mapping[str, str],
    presets: Mapping[str, object],
    piece: str,
) -> tuple[attrs.AttrsInstance | None, list[ColossalError]]:
    """Make an object of options from plain values.

    Args:
        options: The class.
        given: Option name to value.
        places: Option name to where it was written, for messages.
        presets: Options that the record fixes, which cannot be given.
        piece: Name of the piece, for messages.

    Returns:
        The object and no errors, or None and everything that is wrong with the values.
    """
    problems: list[ColossalError] = []
    fields = {field.alias: field for field in attrs.fields(options) if field.init}
    hints = _read_hints(options)
    values: dict[str, object] = dict(presets)
    for name, value in given.items():
        place = places[name]
        if name in presets:
            message = f"{place} cannot be given: {piece!r} stands for {name}={presets[name]!r}"
            problems.append(PlanError(message, hint="leave it out, or choose another piece"))
        elif name not in fields:
            valid = fields.keys() - presets.keys()
            message = f"{place} is no option of {piece!r}; there are {join_names(valid)}"
            problems.append(PlanError(message, hint=suggest(name, valid) or "remove it", code="C003"))
        else:
            try:
                # A converter says by itself what it takes, "8GiB" for a number of bytes.
                expected = hints.get(fields[name].name) if fields[name].converter is None else None
                values[name] = check_value(value, expected, place)
            except PlanError as err:
                problems.append(err)
    missing = [name for name in list_required(options) if name not in values and name not in given]
    if missing:
        message = f"piece {piece!r} needs {', '.join(missing)}, which has no default"
        problems.append(PlanError(message, hint=f"give it in [pieces.{piece}], or pass an object"))
    if problems:
        return None, problems
    try:
        return options(**values), []
    except ColossalError as err:
        return None, [err]
    except (TypeError, ValueError, LookupError, ArithmeticError) as err:
        where = ", ".join(places[name] for name in given) or piece
        error = PlanError(
            f"options of piece {piece!r} are refused ({where}): {err}", hint="change the option"
        )
        error.__cause__ = err
        return None, [error]


def list_required(options: type[attrs.AttrsInstance]) -> tuple[str, ...]:
    """Return the options that have no default, in the order of the class."""
    return tuple(f.alias for f in attrs.fields(options) if f.init and f.default is attrs.NOTHING)


def _read_hints(options: type) -> Mapping[str, object]:
    """Return the annotations of a class as objects; empty when they cannot be evaluated."""
    try:
        return typing.get_type_hints(options)
    except (NameError, TypeError, AttributeError):
        # Names that exist for type checkers only; the constructor's own validators remain.
        return {}


def check_value(value: object, expected: object, place: str) -> object:
    """Return a plain value as the annotation wants it: lists become tuples, whole numbers become floats.

    Args:
        value: What was written.
        expected: The annotation. None, and annotations that plain values cannot match, are not checked.
        place: Where it was written, the start of the message.

    Raises:
        PlanError: The value is of another kind.
    """
    if expected is None or _accepts(value, expected):
        return _adapt(value, expected)
    hint = "give a value of that kind"
    if isinstance(value, str) and _accepts(_parse_number(value), expected):
        hint = f"write {value} without quotes"
    raise PlanError(f"{place} is {value!r}, expected {_print_type(expected)}", hint=hint)


def _parse_number(text: str) -> object:
    """Return the number that a string holds, or the string."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _list_choices(expected: object) -> tuple[object, ...] | None:
    """Return the members of a union, or None when the annotation is none."""
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        return typing.get_args(expected)
    return None


def _accepts(value: object, expected: object) -> bool:
    """Return whether a plain value goes with an annotation; annotations of other kinds accept everything."""
    choices, origin, args = _list_choices(expected), typing.get_origin(expected), typing.get_args(expected)
    if choices is not None:
        return any(_accepts(value, choice) for choice in choices)
    if origin is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if origin in (tuple, list) or expected in (tuple, list):
        return _accepts_sequence(value, args)
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return any(value in (member, member.value) for member in expected)
    # In Python True is an integer, and 2 is no float; in a plan it is the other way round.
    kinds = _KINDS.get(expected, (object,))
    return isinstance(value, kinds) and (not isinstance(value, bool) or expected not in (int, float))


def _accepts_sequence(value: object, items: tuple[object, ...]) -> bool:
    """Return whether a list goes with the item types of a tuple or list."""
    if not isinstance(value, list | tuple):
        return False
    if not items:
        return True
    if len(items) == 1 or (len(items) == 2 and items[1] is Ellipsis):
        return all(_accepts(item, items[0]) for item in value)
    return len(value) == len(items) and all(map(_accepts, value, items))


def _adapt(value: object, expected: object) -> object:
    """Return an accepted value in the form that the annotation names, so that equal plans are equal."""
    choices = _list_choices(expected)
    if choices is not None:
        # An exact match wins over a conversion: 1 stays 1 in int | float.
        fitting = [choice for choice in choices if _accepts(value, choice)]
        exact = [choice for choice in fitting if choice is type(value)]
        return _adapt(value, (exact or fitting or [None])[0])
    if expected is float and isinstance(value, int):
        return float(value)
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return next(member for member in expected if value in (member, member.value))
    if isinstance(value, list) and (typing.get_origin(expected) is tuple or expected is tuple):
        items = typing.get_args(expected)[:1]
        return tuple(_adapt(item, items[0] if items else None) for item in value)
    return value


def _print_type(expected: object) -> str:
    """Print an annotation for users: ``an integer``, ``'a' or 'b'``, ``an integer or 'auto'``."""
    choices = _list_choices(expected)
    if choices is not None:
        return " or ".join(dict.fromkeys(map(_print_type, choices)))
    if typing.get_origin(expected) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(expected)))
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return " or ".join(repr(member.value) for member in expected)
    return _KIND_NAMES.get(typing.get_origin(expected) or expected, str(expected))


def write_options(options: object, presets: Mapping[str, object]) -> dict[str, object]:
    """Return the options of a piece as plain values, without those that its record presets.

    Raises:
        PlanError: An option holds something that cannot be written down.
    """
    kind = type(options)
    fields = attrs.fields(kind) if attrs.has(kind) else ()
    hints = _read_hints(kind)
    plain: dict[str, object] = {}
    for field in fields:
        if field.init and field.alias not in presets:
            value, expected = getattr(options, field.name), hints.get(field.name)
            # Python lets a whole number stand for a float; written down, 7 and 7.0 would be two plans.
            value = _adapt(value, expected) if _accepts(value, expected) else value
            plain[field.alias] = write_plain(value, f"{kind.__name__}.{field.alias}")
    return plain


def write_plain(value: object, place: str) -> object:
    """Return a value as JSON can hold it; functions and classes become their import path.

    Raises:
        PlanError: The value has no such form.
    """
    if isinstance(value, enum.Enum):
        # First, since members of IntEnum and StrEnum are numbers and strings too.
        return write_plain(value.value, place)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping | AbstractSet | Sequence):
        return _write_container(value, place)
    if attrs.has(type(value)):
        return write_options(value, {})
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}:{value.__qualname__}"
    raise PlanError(
        f"{place} is {value!r}, which cannot be written into a plan",
        hint="use numbers, strings, lists, tables, functions of a module, or attrs classes of them",
    )


def _write_container(
    value: Mapping[object, object] | AbstractSet[object] | Sequence[object], place: str
) -> object:
    """Return a mapping as a table, and a set, sorted, or a sequence as a list."""
    if isinstance(value, Mapping):
        return {str(key): write_plain(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((write_plain(item, place) for item in value), key=repr)
    return [write_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
