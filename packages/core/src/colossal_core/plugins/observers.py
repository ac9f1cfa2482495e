"""Calling observers at run, step and checkpoint boundaries.

The hooks that may not communicate are isolated: an error is logged once with the plugin's name, and that
observer is skipped from then on. The others are not, because a rank that swallows an error leaves its peers
waiting in a collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from colossal_core.errors import PluginError
from colossal_core.plugins.hookspec import OBSERVERS
from colossal_core.plugins.target import describe_failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import pluggy

    from colossal_core.plan import Plan
    from colossal_core.plugins.discovery import PluginInfo

__all__ = ["Observers"]


@final
class Observers:
    """The observers of one registry, in the order in which they run: core's, then by plugin name.

    Lives as long as its registry. Calling a hook that nobody observes costs one dictionary look-up.
    """

    def __init__(
        self,
        implementations: Mapping[str, Iterable[tuple[PluginInfo, pluggy.HookImpl]]],
        *,
        is_strict: bool = False,
    ) -> None:
        """Take the implementations.

        Args:
            implementations: Hook name to plugin and implementation, in call order.
            is_strict: Raise instead of isolating, except while another error is being reported.
        """
        self._active = {hook: list(implementations.get(hook, ())) for hook in OBSERVERS}
        self._is_strict = is_strict

    def before_run_started(self, plan: Plan) -> None:
        """Tell observers that a run is about to start. Not isolated."""
        self._notify("colossal_before_run_started", {"plan": plan})

    def after_run_finished(self, summary: Mapping[str, object]) -> None:
        """Tell observers that a run has ended well. Isolated."""
        self._notify("colossal_after_run_finished", {"summary": summary})

    def before_step_taken(self, step: int) -> None:
        """Tell observers that a real step is about to be taken. Isolated."""
        self._notify("colossal_before_step_taken", {"step": step})

    def after_step_taken(self, step: int, metrics: Mapping[str, object]) -> None:
        """Tell observers that a step was taken. Isolated."""
        self._notify("colossal_after_step_taken", {"step": step, "metrics": metrics})

    def after_checkpoint_saved(self, path: Path, step: int) -> None:
        """Tell observers that a checkpoint is complete. Isolated."""
        self._notify("colossal_after_checkpoint_saved", {"path": path, "step": step})

    def on_run_error(self, error: BaseException, step: int) -> None:
        """Tell observers what ends the run. Isolated, also in strict mode: it must never hide that error."""
        self._notify("colossal_on_run_error", {"error": error, "step": step})

    def _notify(self, hook: str, arguments: Mapping[str, object]) -> None:
        """Call every observer of a hook with the arguments that it asks for.

        Raises:
            PluginError: An observer of a hook that is not isolated raised.
        """
        active = self._active[hook]
        for observer in tuple(active):
            info, implementation = observer
            try:
                implementation.function(*(arguments[name] for name in implementation.argnames))
            except Exception as err:
                message = f"{info.title} failed in {hook}\n{describe_failure(err)}"
                reports = hook == "colossal_on_run_error"
                if not OBSERVERS[hook] or (self._is_strict and not reports):
                    raise PluginError(message, hint=f"colossal plugins doctor {info.name}") from err
                active.remove(observer)
                _log_once(message)


def _log_once(message: str) -> None:
    """Log that an observer is skipped from now on."""
    import logging

    logging.getLogger("colossal_core.plugins").warning("%s\n  this observer is skipped from now on", message)
