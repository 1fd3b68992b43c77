"""Classes of commands whose help cuts no option's name, and shows ``--help`` without a value; how
commands end in errors.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from tramontane.proto.errors import TramontaneError, UserError


def print_error(message: str) -> None:
    """Print the one line about what has ended the command."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


def exit_code(error: TramontaneError) -> int:
    """Return 2 for a user's mistake and 1 for a failed pipeline or a server that does not
    answer.
    """
    return 2 if isinstance(error, UserError) else 1


@contextmanager
def print_errors_at_once() -> Iterator[None]:
    """Print an error of the block before what is reported while the command ends, such as that the
    stages are removed.
    """
    try:
        yield
    except TramontaneError as error:
        print_error(str(error))
        raise typer.Exit(exit_code(error)) from error


class PlainCommand(TyperCommand):
    """A command; typer itself shows ``--help <bool>``, and cuts long names in a narrow terminal."""

    # typer's classes of contexts and options are private
    def get_help_option(self, ctx: Any) -> Any:
        """Return typer's own option, shown without a value."""
        return _without_value(super().get_help_option(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Show typer's help with each option's long names and its value in one column, which is
        wrapped between them.

        Typer has a column for each, and cuts all of them where their sum is too wide:
        ``--max-queued-reque…``.
        """
        shown = copy(self)
        shown.params = [
            _in_one_column(each, ctx) if isinstance(each, TyperOption) else each
            for each in self.params
        ]
        super(PlainCommand, shown).format_help(ctx, formatter)


class PlainGroup(TyperGroup):
    """A group of such commands."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return typer's own option, shown without a value."""
        return _without_value(super().get_help_option(ctx))


def _without_value(help_option: Any) -> Any:
    if help_option is not None:
        help_option.metavar = ""
    return help_option


def _in_one_column(option: TyperOption, context: Any) -> TyperOption:
    shown = copy(option)
    long = [name for name in option.opts if name.startswith("--")]
    words = [*long, *option.secondary_opts, _describe_value(option, context)]
    shown.opts = [
        " ".join(filter(None, words)),
        *(name for name in option.opts if name not in long),
    ]
    shown.secondary_opts, shown.metavar, shown.min, shown.max = [], "", None, None
    return shown


def _describe_value(option: TyperOption, context: Any) -> str:
    """Return ``<int> [1<=x<=64]`` where typer has ``<int range>`` and a column of its own for the
    range.
    """
    kind = (option.display_type_rich(context) or "").replace(" range>", ">")
    match option.min, option.max:
        case None, None:
            return kind
        case None, high:
            return f"{kind} [x<={high}]"
        case low, None:
            return f"{kind} [x>={low}]"
        case low, high:
            return f"{kind} [{low}<=x<={high}]"
