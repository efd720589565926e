"""Runs one measurement in a process of its own.

The processes are forked by a server that has imported what takes long, and has never used CUDA: a child of a process
that has cannot use CUDA. Where an import uses CUDA all the same, each process starts anew."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

import torch

# Has torch.cuda.is_available() ask the driver's management library, which leaves CUDA alone.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

IMPORTED_ONCE = ("numpy", *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "vit")))


class NotMeasured(Exception):
    """Has the reason, for the row."""


class CudaInUse(Exception):
    """The process was forked by one that has used CUDA."""


def answer(to: Connection, task: Callable[..., Any], *arguments: Any) -> None:
    if torch.cuda._is_in_bad_fork():
        to.send(CudaInUse())
        return
    try:
        to.send(task(*arguments))
    except ImportError as error:
        to.send(NotMeasured(f"not importable: {error}"))
    except Exception as error:
        traceback.print_exc()
        reason = str(error).strip().partition("\n")[0]
        to.send(NotMeasured(f"not runnable here: {type(error).__name__}: {reason}"))


def server_context() -> BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *IMPORTED_ONCE])  # what cannot be imported is left out
    return context


contexts = [multiprocessing.get_context("spawn"), server_context()]  # the last is used


def in_new_process(task: Callable[..., Any], *arguments: Any) -> Any:
    """What `task` returns there. Raises NotMeasured where it raises or the process dies."""
    context = contexts[-1]
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(sender, task, *arguments))
    process.start()
    sender.close()  # so that the child's is the last, and its death ends the wait
    try:
        result = receiver.recv()
    except EOFError:
        result = None
    process.join()
    if isinstance(result, CudaInUse):
        contexts.pop()
        return in_new_process(task, *arguments)
    if result is None:
        raise NotMeasured(f"not runnable here: its process ended with status {process.exitcode}")
    if isinstance(result, NotMeasured):
        raise result
    return result
