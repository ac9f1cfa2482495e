"""What the parent and its workers say to each other: jobs down, reports up.

Everything is a frozen value that pickles. Values of users (arguments, results, errors) are nested as bytes,
because their classes may live in the test file, which a worker must load before it can unpickle them.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from colossal_testkit.pool.references import FunctionReference, ModuleReference

__all__ = ["Failure", "GroupRecord", "Job", "Ready", "Report", "Reset", "WarningFilter"]


@attrs.frozen(kw_only=True)
class WarningFilter:
    """One entry of ``warnings.filters``, its category by name so that an unknown one can be passed over."""

    action: str
    message: str
    category_module: str
    category_name: str
    module: str
    line: int


@attrs.frozen(kw_only=True)
class Job:
    """One function call on one rank.

    Attributes:
        number: Count of jobs of this crew; makes the rendezvous prefix unique.
        rank: The rank that the worker plays.
        num_ranks: World size of the job.
        reference: The function.
        payload: ``(args, kwargs)``, pickled.
        modules: Modules that must be there before the payload is unpickled.
        environment: The parent's environment with the variables that torchrun would set.
        directory: The parent's working directory.
        import_path: The parent's ``sys.path``.
        filters: The parent's warning filters, strongest first.
        store_port: Port of the rendezvous store on the loopback device.
        timeout_seconds: When the parent will give up.
        makes_group: Whether a default process group is there before the function starts.
        seed: What Python's, torch's and numpy's generators start from.
    """

    number: int
    rank: int
    num_ranks: int
    reference: FunctionReference
    payload: bytes
    modules: tuple[ModuleReference, ...]
    environment: Mapping[str, str]
    directory: str
    import_path: tuple[str, ...]
    filters: tuple[WarningFilter, ...]
    store_port: int
    timeout_seconds: float
    makes_group: bool
    seed: int


@attrs.frozen(kw_only=True)
class Reset:
    """Ask a worker to take the job's groups down and to become as new; it answers `Ready`."""


@attrs.frozen(kw_only=True)
class Ready:
    """A worker is clean again."""

    problem: str = ""


@attrs.frozen(kw_only=True)
class GroupRecord:
    """What one rank knows about one process group at the end of a job.

    Attributes:
        name: Name that the group has on all of its ranks.
        ranks: Its global ranks.
        num_collectives: How many collectives this rank issued in it, or None when the record was lost.
        latest: The most recent ones, oldest first, as text.
    """

    name: str
    ranks: tuple[int, ...]
    num_collectives: int | None
    latest: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Failure:
    """An exception of one rank.

    Attributes:
        kind: Qualified name of its class.
        message: ``str()`` of it.
        traceback: Formatted, without the frames of the harness, with the locals of the innermost frame of the
            file.
        pickled: The exception itself, when it survives pickling.
        is_skip: Whether it was ``pytest.skip``.
    """

    kind: str
    message: str
    traceback: str
    pickled: bytes | None
    is_skip: bool = False


@attrs.frozen(kw_only=True)
class Report:
    """What one rank made of its job.

    Attributes:
        rank: The rank.
        time: ``time.monotonic()`` at the end, comparable between processes of one machine.
        result: The pickled return value, when it returned.
        failure: What was raised, when it raised.
        groups: The process groups that exist at the end.
    """

    rank: int
    time: float
    result: bytes | None = None
    failure: Failure | None = None
    groups: tuple[GroupRecord, ...] = ()
