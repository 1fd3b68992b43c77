"""Classes of commands whose help shows ``--help`` as it is given, without the type of a value."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command; typer itself shows ``--help <bool>``."""

    def get_help_option(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's classes of contexts and options are private
        """Return typer's own option, shown without a value."""
        return _without_value(super().get_help_option(ctx))


class PlainGroup(TyperGroup):
    """A group of such commands."""

    def get_help_option(self, ctx: Any) -> Any:  # noqa: ANN401
        """Return typer's own option, shown without a value."""
        return _without_value(super().get_help_option(ctx))


def _without_value(help_option: Any) -> Any:  # noqa: ANN401
    if help_option is not None:
        help_option.metavar = ""
    return help_option
