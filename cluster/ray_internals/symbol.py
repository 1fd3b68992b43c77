"""A private name of Ray, and the check that this version of Ray still has it."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from tramontane.proto.errors import ConfigError

# Ray may change private names in any version, and ``pyproject.toml`` pins the minor version for
# that reason. Names are looked up when they are used, so that a missing one is a one-line error at
# start and not an ImportError in some module.

RAY_VERSION = "2.60.0"  # the version that ``table.py`` was written for


@dataclass(frozen=True, slots=True)
class PrivateSymbol:
    """One private name: ``path`` is ``module:name`` or ``module:Class.name``.

    ``needed_for``: why we use it; ``breaks``: what does not work without it. ``parameters``: the
    parameters that we pass, or that a replacement of ours relies on.
    """

    path: str
    parameters: tuple[str, ...]
    ray_version: str
    needed_for: str
    breaks: str

    @property
    def value(self) -> Any:  # any object of Ray's
        """The object itself. Raises ConfigError if Ray has it no more."""
        try:
            return getattr(self._owner(), self._name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(describe_changes([self._missing])) from error

    def replace(self, value: object) -> None:
        """Put ``value`` in the place of Ray's own object, in this process; a function keeps the
        names of the parameters.
        """
        setattr(self._owner(), self._name, value)

    @contextmanager
    def replaced(self, value: object) -> Iterator[None]:
        """Put ``value`` in the place of Ray's own object while the block runs."""
        previous = self.value
        self.replace(value)
        try:
            yield
        finally:
            self.replace(previous)

    def change(self) -> str:
        """Describe the changes to it in this version of Ray, and the consequences; empty without
        changes.
        """
        try:
            owner = self._owner()
        except (ImportError, AttributeError):
            return self._missing
        if not hasattr(owner, self._name):
            return "" if inspect.isclass(owner) and _is_set(owner, self._name) else self._missing
        if not self.parameters:
            return ""
        known = inspect.signature(getattr(owner, self._name)).parameters
        missing = [name for name in self.parameters if name not in known]
        return (
            f"{self.path} has no parameter {', '.join(missing)} (breaks {self.breaks})"
            if missing
            else ""
        )

    @property
    def is_attribute(self) -> bool:
        """True for an attribute or method of a class."""
        return "." in self.path.partition(":")[2]

    @property
    def _missing(self) -> str:
        return f"{self.path} is missing (breaks {self.breaks})"

    @property
    def _name(self) -> str:
        return self.path.rpartition(":")[2].rpartition(".")[2]

    def _owner(self) -> Any:  # a module or a class
        module, _, name = self.path.partition(":")
        owner: Any = import_module(module)
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        return owner


def _is_set(owner: type, name: str) -> bool:
    """Return whether a constructor sets an attribute: the constructor of the class, or of a base
    class.
    """
    constructors = [vars(each).get("__init__") for each in owner.__mro__]
    return any(name in each.__code__.co_names for each in constructors if inspect.isfunction(each))


def describe_changes(changes: list[str]) -> str:
    """Return the error of a version of Ray with these changes."""
    return (
        f"Ray {version('ray')} has changed private names that Tramontane uses (it was tested with"
        f" {RAY_VERSION}): {'; '.join(changes)}; install ray=={RAY_VERSION}"
    )


def is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it; for a nested package, its
    parents are imported.
    """
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # an outer package is missing
        return False
