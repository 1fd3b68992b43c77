"""Classes of commands whose help shows ``--help`` as it is given, without the type of a value; how commands end in errors."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from tramontane.proto.errors import TramontaneError, UserError


def print_error(message: str) -> None:
    """Print the one line about what has ended the command."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


def exit_code(error: TramontaneError) -> int:
    """Return 2 for a user's mistake and 1 for a failed pipeline or a server that does not answer."""
    return 2 if isinstance(error, UserError) else 1


@contextmanager
def print_errors_at_once() -> Iterator[None]:
    """Print an error of the block before what is reported while the command ends, such as that the stages are removed."""
    try:
        yield
    except TramontaneError as error:
        print_error(str(error))
        raise typer.Exit(exit_code(error)) from error


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
