"""Random numbers that nothing else can disturb: private states for the generators that user code draws from.

The one idea: datasets and samplers draw from the global generators of ``torch``, ``random`` and numpy, whose
states differ between ranks and depend on what the model drew before. Running their code with states of our
own, derived from a seed and the place in the data, makes it a function of that place: equal on all ranks
where it has to be, the same after a restart, whatever the number of workers. Outside, the global generators
are untouched.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import random
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, final

import torch

__all__ = ["PrivateDraws", "attributes_of", "mix_seed", "own_generators", "seed_process"]

_NUMPY_SEEDS = 2**32


def mix_seed(*parts: int | str) -> int:
    """Return a seed in ``[0, 2**63)`` that depends on all parts and their order, equally on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_process(seed: int) -> None:
    """Seed the global generators as entering ``PrivateDraws(seed)`` does, for a process of our own."""
    for number, generator in enumerate(_global_generators()):
        generator.seed(mix_seed(seed, number) if number else seed)


class _Generator(Protocol):
    """A generator whose state can be exchanged."""

    def get(self) -> Any:
        """Return the state."""

    def set(self, state: Any) -> None:
        """Continue from a state."""

    def seed(self, seed: int) -> None:
        """Start anew."""


class _Torch:
    """A ``torch.Generator``."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def get(self) -> Any:
        """Return the state."""
        return self._generator.get_state()

    def set(self, state: Any) -> None:
        """Continue from a state."""
        self._generator.set_state(state)

    def seed(self, seed: int) -> None:
        """Start anew."""
        self._generator.manual_seed(seed)


class _Python:
    """A ``random.Random``, or the module, which is one as well."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def get(self) -> Any:
        """Return the state."""
        return self._generator.getstate()

    def set(self, state: Any) -> None:
        """Continue from a state."""
        self._generator.setstate(state)

    def seed(self, seed: int) -> None:
        """Start anew."""
        self._generator.seed(seed)


class _NumpyLegacy:
    """A ``numpy.random.RandomState``, or the module ``numpy.random``."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def get(self) -> Any:
        """Return the state."""
        return self._generator.get_state()

    def set(self, state: Any) -> None:
        """Continue from a state."""
        self._generator.set_state(state)

    def seed(self, seed: int) -> None:
        """Start anew; numpy takes 32 bits."""
        self._generator.seed(seed % _NUMPY_SEEDS)


class _Numpy:
    """A ``numpy.random.Generator``."""

    def __init__(self, generator: Any) -> None:
        self._bits = generator.bit_generator

    def get(self) -> Any:
        """Return the state."""
        return self._bits.state

    def set(self, state: Any) -> None:
        """Continue from a state."""
        self._bits.state = state

    def seed(self, seed: int) -> None:
        """Start anew."""
        self._bits.state = type(self._bits)(seed).state


@final
class PrivateDraws:
    """States of our own for the global generators, and for those given; put in place within ``with``.

    Entering again continues where the last ``with`` ended. Not thread-safe, as the global generators are not.
    """

    def __init__(
        self, seed: int, own: Sequence[_Generator] = (), own_states: Sequence[Any] | None = None
    ) -> None:
        """Derive the states from a seed; nothing changes until they are entered.

        Args:
            seed: See :func:`mix_seed`.
            own: Further generators, as :func:`own_generators` returns them.
            own_states: What these start from; by default they are seeded, too.
        """
        self._seed = seed
        self._own = own
        self._own_states = own_states
        self._kept: list[tuple[_Generator, Any]] | None = None
        self._outside: list[tuple[_Generator, Any]] = []

    def __enter__(self) -> None:
        """Put the private states in place."""
        if self._kept is not None:
            self._outside = [(generator, generator.get()) for generator, _ in self._kept]
            for generator, state in self._kept:
                generator.set(state)
            return
        everyone = [*_global_generators(), *self._own]
        self._outside = [(generator, generator.get()) for generator in everyone]
        for number, generator in enumerate(everyone):
            generator.seed(mix_seed(self._seed, number) if number else self._seed)
        if self._own_states is not None:
            for generator, state in zip(self._own, self._own_states, strict=True):
                generator.set(state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep the private states and put back what was there."""
        self._kept = [(generator, generator.get()) for generator, _ in self._outside]
        for generator, state in self._outside:
            generator.set(state)


def own_generators(*owners: object) -> list[_Generator]:
    """Return the generators among the attributes of some objects, for :class:`PrivateDraws`.

    Args:
        owners: Samplers, say. Attributes of attributes are not looked at.
    """
    return [found for owner in owners for found in _generators_of(owner)]


def attributes_of(owner: object) -> list[Any]:
    """Return the values of an object's attributes; none for what has no ``__dict__``, such as a list."""
    try:
        return list(vars(owner).values())
    except TypeError:
        return []


def _generators_of(owner: object) -> Iterator[_Generator]:
    """Yield the generators among the attributes of one object, by type."""
    numpy = _numpy()
    for value in attributes_of(owner):
        if isinstance(value, torch.Generator):
            yield _Torch(value)
        elif isinstance(value, random.Random):
            yield _Python(value)
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            yield _NumpyLegacy(value)
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            yield _Numpy(value)


def _global_generators() -> list[_Generator]:
    """Return the generators of the process: of torch on the CPU, ``random``, numpy where it is installed."""
    numpy = _numpy()
    found: list[_Generator] = [_Torch(torch.default_generator), _Python(random)]
    return found if numpy is None else [*found, _NumpyLegacy(numpy.random)]


@functools.cache
def _numpy() -> Any:
    """Return numpy, or None where it is not installed.

    It is imported, as torch does in its workers: user code may import it later, and would then draw from a
    state that differs between ranks.
    """
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None
