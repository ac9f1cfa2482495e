"""Tier one: what is installed, read from metadata alone.

Nothing of a plugin is imported here. Entry points come in the order of directories, which differs between
hosts, so everything is sorted by name.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import TYPE_CHECKING, Literal, TypeAlias, final

import attrs

from colossal_core.plugins.hookspec import GROUP
from colossal_core.plugins.layers import CORE_PLUGIN

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = [
    "CORE_DISTRIBUTION",
    "PluginInfo",
    "describe_core",
    "find_incompatibility",
    "find_installed",
    "find_local",
]

Origin: TypeAlias = Literal["core", "installed", "local", "object"]

CORE_DISTRIBUTION = "colossal-core"

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*\(?([^;\[@)]*)\)?\s*")


@final
@attrs.frozen(kw_only=True)
class PluginInfo:
    """One plugin as its metadata describes it.

    Attributes:
        name: Entry-point name, which users type.
        module: The light module, or ``module:attribute``, that is imported at activation.
        distribution: Name of the distribution; empty for local files and objects.
        version: Its version; empty for local files and objects.
        is_editable: Whether it is installed from a source tree, so that the version does not tell the
            contents.
        origin: ``"core"``, ``"installed"``, ``"local"`` (a single file) or ``"object"`` (given to an isolated
            registry).
        requires: Requirements of the distribution, as written in its metadata.
        path: The file of a local plugin.
    """

    name: str
    module: str
    distribution: str = ""
    version: str = ""
    is_editable: bool = False
    origin: Origin = "installed"
    requires: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def package(self) -> str:
        """Top-level package of the light module, which tells objects of the plugin without an import."""
        return self.module.partition(":")[0].partition(".")[0]

    @property
    def provider(self) -> str:
        """Who brings the plugin: ``"colossal-zero 0.1.0"``, the local file, or its name."""
        if self.distribution:
            return f"{self.distribution} {self.version}"
        return str(self.path) if self.path is not None else f"object {self.name!r}"

    @property
    def title(self) -> str:
        """How errors call it: ``"plugin 'zero' (colossal-zero 0.1.0)"``."""
        return f"plugin {self.name!r} ({self.provider})"

    def find_fault(self) -> str:
        """Return what is wrong with the name, or an empty string."""
        if _NAME.fullmatch(self.name) is None:
            return f"a plugin's name is lower-case letters and digits joined by hyphens, got {self.name!r}"
        return ""


def find_installed() -> tuple[PluginInfo, ...]:
    """Read the entry points of every installed distribution, sorted by name and then by distribution.

    Two distributions may offer the same name; both are returned, and the registry decides what that means.
    """
    found = [_read_entry_point(point) for point in metadata.entry_points(group=GROUP)]
    return tuple(sorted(found, key=lambda info: (info.name, info.distribution, info.module)))


def _read_entry_point(point: metadata.EntryPoint) -> PluginInfo:
    """Describe one entry point."""
    distribution = point.dist
    if distribution is None:
        return PluginInfo(name=point.name, module=point.value)
    # One parse for all fields: each attribute of the distribution would read the file again.
    fields = distribution.metadata
    return PluginInfo(
        name=point.name,
        module=point.value.partition("[")[0].strip(),
        distribution=fields["Name"] or "unknown",
        version=fields["Version"] or "unknown",
        is_editable=_is_editable(distribution),
        requires=tuple(fields.get_all("Requires-Dist") or ()),
    )


def _is_editable(distribution: metadata.Distribution) -> bool:
    """Return whether a distribution is installed from a source tree (PEP 610)."""
    text = distribution.read_text("direct_url.json")
    if not text or "editable" not in text:
        return False
    import json

    url = json.loads(text)
    return bool(url.get("dir_info", {}).get("editable", False))


def describe_core(module: str) -> PluginInfo:
    """Describe core itself, whose own pieces come in as a plugin.

    Args:
        module: The module with core's registrations.
    """
    try:
        distribution = metadata.distribution(CORE_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        # A source tree on the path without installation; the version is unknown and nothing can be
        # incompatible with it.
        version, editable = "", True
    else:
        version, editable = distribution.version, _is_editable(distribution)
    return PluginInfo(
        name=CORE_PLUGIN,
        module=module,
        distribution=CORE_DISTRIBUTION,
        version=version,
        is_editable=editable,
        origin="core",
    )


def find_local(paths: Iterable[Path]) -> tuple[PluginInfo, ...]:
    """Describe single-file plugins, sorted by name: ``my_schedule.py`` is the plugin ``my-schedule``."""
    found = [
        PluginInfo(
            name=path.stem.replace("_", "-"), module=path.stem, origin="local", path=path, is_editable=True
        )
        for path in paths
    ]
    return tuple(sorted(found, key=lambda info: info.name))


def find_incompatibility(info: PluginInfo, core_version: str) -> str:
    """Return why a plugin does not go with this core, or an empty string when it does.

    The plugin's own requirement on core decides. A pre-release of core counts as compatible when it, or the
    release it leads to, is admitted.
    """
    for text in info.requires:
        specifier = _read_core_requirement(text)
        if specifier and core_version and not _admits(specifier, core_version):
            return f"needs {CORE_DISTRIBUTION}{specifier}, but {core_version} is installed"
    return ""


def _read_core_requirement(text: str) -> str:
    """Return the version specifier if a requirement is about core and applies here, else an empty string."""
    plain = _REQUIREMENT.match(text)
    if plain is None or re.sub(r"[-_.]+", "-", plain[1]).lower() != CORE_DISTRIBUTION:
        return ""
    if plain.end() == len(text):
        return plain[2].strip()
    # Extras and markers are rare on this line, and parsing them costs 10 ms of imports.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return ""
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    return str(requirement.specifier) if applies else ""


def _admits(specifier: str, version: str) -> bool:
    """Return whether a specifier admits a version or, for a pre-release, the release it leads to."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import Version

    try:
        admitted = SpecifierSet(specifier)
    except InvalidSpecifier:
        return False
    candidates = {version, Version(version).base_version}
    return any(admitted.contains(candidate, prereleases=True) for candidate in candidates)
