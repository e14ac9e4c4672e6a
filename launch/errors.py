"""Errors for people: one line each, and the exit codes that scripts read."""

import os
import sys
import traceback
from collections.abc import Callable

from configs.loader import ConfigError
from trainer.preemption import Preempted

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_PREEMPTED = 0, 1, 2, 75


class Failed(Exception):
    """Something went wrong that is no fault of the input; the message says what to do."""


class Told(Exception):
    """Something went wrong that another rank has said already; ends this one with an exit code."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(code)


def exit_code(action: Callable[[], int]) -> int:
    """Run a command; turn what goes wrong into lines on stderr and an exit code.

    ROFORMER_TRACEBACK=1 shows where in the code an error arose.
    """
    try:
        return action()
    except Preempted as stopped:
        _say(str(stopped))
        return EXIT_PREEMPTED
    except Told as told:
        return told.code
    except KeyboardInterrupt:
        _say("interrupted; start again to go on from the last checkpoint")
        return 130
    except ConfigError as error:
        for problem in error.problems:
            _say(f"error: {problem}")
        return EXIT_BAD_INPUT
    except Failed as error:
        _say(f"error: {error}")
        return EXIT_FAILED
    except (ValueError, OSError) as error:
        _say(f"error: {one_line(error)}")
        return EXIT_BAD_INPUT


def one_line(error: ValueError | OSError) -> str:
    """Say what an error says, and where it has to do with a file, which."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _say(text: str) -> None:
    if os.environ.get("ROFORMER_TRACEBACK"):
        traceback.print_exc()
    has_others = os.environ.get("WORLD_SIZE", "1") != "1"
    rank = f"rank {os.environ.get('RANK', '?')}: " if has_others else ""
    print(f"roformer: {rank}{text}", file=sys.stderr, flush=True)
