"""Putting a leaf module of another class into the place of the user's.

The one idea: the new object shares the ``__dict__`` of the old one, so parameters, buffers, hooks, the
training flag and whatever else the user keeps there are one state under two classes. Nothing has to be copied
back, and who kept the old object still switches it between training and evaluation with the model; only
calling it is refused, because it would compute without what the replacement adds.

Copies and pickles of the new object are plain again: objects of the user's class, without anything of ours.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex, final

from attrs import frozen
from torch import nn

from colossal_core.errors import CapabilityError, UsageError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["Replacement", "Stand", "check_replaceable", "replace_module", "replacement_of"]

Place = tuple[nn.Module, str]
"""A parent and the name under which it registers a child."""

_KEY = "_colossal_replacement"
"""Where the shared state keeps the :class:`Replacement`."""


class Stand(nn.Module):
    """Base of what replaces a module; stands before the user's class in the order of resolution.

    Subclasses add methods and no ``__init__``: their objects are never built, they take over a state.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Describe an object of the user's class with this state, for copies and pickles."""
        del protocol
        state = dict(vars(self))
        replacement: Replacement = state.pop(_KEY)
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            state[name] = OrderedDict(state[name])
            state[name].pop(replacement.refusal.id, None)
        return object.__new__, (type(replacement.old),), state

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy as an object of the user's class, which references to the old module then mean as well."""
        old = replacement_of(self).old
        if id(old) in memo:
            found: nn.Module = memo[id(old)]
            return found
        make, args, state = self.__reduce_ex__(4)
        twin: nn.Module = make(*args)
        memo[id(self)] = memo[id(old)] = twin
        twin.__setstate__(copy.deepcopy(state, memo))
        return twin


@final
@frozen(kw_only=True, eq=False)
class Replacement:
    """One module that stands in the place of another.

    Attributes:
        old: The user's module.
        new: What stands there now.
        places: Where it is registered.
        payload: What the new module needs besides the user's state.
        refusal: The hook that refuses calls of the old module.
    """

    old: nn.Module
    new: nn.Module
    places: tuple[Place, ...]
    payload: Any
    refusal: RemovableHandle

    def __reduce__(self) -> tuple[Any, ...]:
        """Vanish from copies and pickles of the old module."""
        return type(None), ()

    def undo(self) -> None:
        """Put the old module back wherever the new one still stands."""
        self.refusal.remove()
        vars(self.old).pop(_KEY, None)
        for parent, name in self.places:
            if _child(parent, name) is self.new:
                parent.register_module(name, self.old)


def replacement_of(module: nn.Module) -> Replacement:
    """Return the replacement that a module is the new object of."""
    found: Replacement = vars(module)[_KEY]
    return found


def check_replaceable(roots: Iterable[nn.Module], name: str, old: nn.Module) -> None:
    """Refuse what :func:`replace_module` cannot replace; pure.

    Args:
        roots: Every model in which the module may be registered.
        name: How to call it in errors.
        old: The user's module.

    Raises:
        CapabilityError: It is a whole model, so there is no parent in which another object could stand.
        UsageError: It has a forward of its own on the object, which would hide that of the new class.
    """
    if any(old is root for root in roots):
        raise CapabilityError(
            f"the model is a {type(old).__name__} itself, which has to be replaced and has no parent",
            hint="wrap it: torch.nn.Sequential(module)",
        )
    if "forward" in vars(old):
        raise UsageError(
            f"module {name!r} has a forward that was set on the object and not on its class, so a "
            "replacement would have no effect",
            hint="remove it before boost, or write it as a subclass",
        )


def replace_module(
    roots: Iterable[nn.Module], name: str, old: nn.Module, stand: type[Stand], payload: Any = None
) -> Replacement:
    """Replace a module, wherever it is registered, by one of a class that adds ``stand`` to its own.

    Args:
        roots: Every model in which it may be registered.
        name: How to call it in errors.
        old: The user's module; it must not be replaced already.
        stand: What the new class adds.
        payload: What the new module needs; see :attr:`Replacement.payload`.

    Returns:
        What undoes it.

    Raises:
        CapabilityError: See :func:`check_replaceable`.
        UsageError: See :func:`check_replaceable`.
    """
    roots = tuple(roots)
    check_replaceable(roots, name, old)
    plain: Any = type(old)
    added: Any = stand
    kind = _kind(plain, added)
    new = kind.__new__(kind)
    object.__setattr__(new, "__dict__", vars(old))
    replacement = Replacement(
        old=old,
        new=new,
        places=_places(roots, old),
        payload=payload,
        refusal=old.register_forward_pre_hook(_Refusal(old, name), prepend=True),
    )
    vars(old)[_KEY] = replacement
    for parent, own in replacement.places:
        parent.register_module(own, new)
    return replacement


class _Refusal:
    """A hook on the shared state that lets the new module pass and stops the old one."""

    def __init__(self, old: nn.Module, name: str) -> None:
        """Remember which one is refused."""
        self._old, self._name = old, name

    def __call__(self, module: nn.Module, _args: object) -> None:
        """Raise for the old module.

        Raises:
            UsageError: It was called.
        """
        if module is self._old:
            raise UsageError(
                f"this {type(module).__name__} was replaced by boost, and calling it would leave out what "
                f"the plan adds; module {self._name!r} of the model is another object now",
                hint="reach it through the model instead of keeping a reference",
            )


@functools.lru_cache(maxsize=256)
def _kind(plain: type[Any], stand: type[Any]) -> type[nn.Module]:
    """Return the class of the new object; one for each pair, so equal modules stay of equal class."""
    name = f"{stand.__name__}{plain.__name__}"
    return type(name, (stand, plain), {"__module__": stand.__module__, "__doc__": stand.__doc__})


def _places(roots: Iterable[nn.Module], wanted: nn.Module) -> tuple[Place, ...]:
    """Find every parent of a module and the names that it has there, each once."""
    found: list[Place] = []
    for root in roots:
        for path, module in root.named_modules(remove_duplicate=False):
            if module is wanted:
                parent, _, name = path.rpartition(".")
                place = (root.get_submodule(parent), name)
                if not any(place[0] is other and name == known for other, known in found):
                    found.append(place)
    return tuple(found)


def _child(parent: nn.Module, name: str) -> nn.Module | None:
    """Return the child of that name, or None when there is none any more."""
    return next((child for path, child in parent.named_modules(remove_duplicate=False) if path == name), None)
