"""The ``shoal`` command: one file per verb, imported on use.

Exit statuses: 0 success; 2 a user's mistake, in one line; 3 a result not to be used as it is; 75
stopped in order, can be resumed; 1 any other failure.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

VERBS = ("run", "resize", "study", "simulate", "reproduce", "report", "doctor")


def application() -> typer.Typer:
    """The command line's application with all its verbs."""
    import typer

    app = typer.Typer(
        name="shoal",
        help="Train PyTorch models on a number of workers that changes while they train.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _shoal() -> None:
        """Train PyTorch models on a number of workers that changes while they train."""

    for verb in VERBS:
        if importlib.util.find_spec(f"shoal.cli.{verb}") is not None:
            importlib.import_module(f"shoal.cli.{verb}").register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: without the program's name; those of the process by default.
    """
    import typer

    from shoal.errors import ShoalError

    command = typer.main.get_command(application())
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = command.main(args=given, prog_name="shoal", standalone_mode=False)
        _flush()
    except ShoalError as error:
        _complain(f"shoal: {error}")
        return error.exit_code
    except OSError as error:
        text = error.strerror or str(error)
        place = f"{error.filename}: " if error.filename is not None else ""
        _complain(f"shoal {_verb(given).strip()}".rstrip() + f": {place}{text}")
        return 1
    except typer.Abort:
        return 1
    except Exception as error:
        # Typer's own complaints about the command line, whatever package its parser lives in.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        text = " ".join(str(message()).split())
        if text:
            _complain(f"shoal: {text}; see `shoal {_verb(given)}--help`")
        return int(getattr(error, "exit_code", 2))
    return result if isinstance(result, int) else 0


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        print(text, file=sys.stderr, flush=True)


def _flush() -> None:
    """Get rid of what nobody reads any more: at exit it would be an error and another status."""
    from shoal.children import let_go_of

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            let_go_of([stream.fileno()])


def _verb(given: list[str]) -> str:
    return f"{given[0]} " if given and given[0] in VERBS else ""
