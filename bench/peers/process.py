"""Runs one measurement in a process of its own."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class NotMeasured(Exception):
    """Has the reason, for the row."""


def answer(to: Connection, task: Callable[..., Any], *arguments: Any) -> None:
    try:
        to.send(task(*arguments))
    except ImportError as error:
        to.send(NotMeasured(f"not importable: {error}"))
    except Exception as error:
        traceback.print_exc()
        reason = str(error).strip().partition("\n")[0]
        to.send(NotMeasured(f"not runnable here: {type(error).__name__}: {reason}"))


def in_new_process(task: Callable[..., Any], *arguments: Any) -> Any:
    """What `task` returns there. Raises NotMeasured where it raises or the process dies."""
    spawn = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA after its parent has
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=answer, args=(sender, task, *arguments))
    process.start()
    sender.close()  # so that the child's is the last, and its death ends the wait
    try:
        result = receiver.recv()
    except EOFError:
        result = None
    process.join()
    if result is None:
        raise NotMeasured(f"not runnable here: its process ended with status {process.exitcode}")
    if isinstance(result, NotMeasured):
        raise result
    return result
