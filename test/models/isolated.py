"""Cases in a process of their own, so that a signal is one failure and not the end."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import IO, Any, Literal

FORK = multiprocessing.get_context("fork")  # no process imports again what this one has imported

Verdict = Literal["passed", "failed", "skipped"]
Outcome = tuple[str, Verdict, str]  # a case, its verdict and why
Cases = Iterator[tuple[str, Callable[[], tuple[Verdict, str]]]]  # a case and what judges it


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def outcomes(make_cases: Callable[[], Cases], seconds: float) -> Iterator[Outcome]:
    """Of each case, which may take so long. A case that ends its process, or is not over by then, has failed; another
    process takes those after it."""
    done = 0
    while True:
        case = None
        with tempfile.TemporaryFile("w+") as log:
            results, end = FORK.Pipe(duplex=False)
            process = FORK.Process(target=_judge, args=(make_cases, done, end, log))
            process.start()
            end.close()
            why = f"not over after {seconds} s"
            try:
                while results.poll(seconds):
                    case = results.recv()
                    if not results.poll(seconds):
                        break
                    yield case, *results.recv()
                    case = None
                    done += 1
                process.kill()
                process.join()
            except EOFError:
                process.join()
                if process.exitcode == 0:
                    return
                why = f"signal {signal.Signals(-process.exitcode).name}" if process.exitcode < 0 else "no case could begin"
            log.seek(0)
            said = [line.strip() for line in log]
        begin = next((n for n, line in enumerate(said) if line.startswith(("Fatal Python error", "terminate"))), -3)
        yield case or "before the first case", "failed", " | ".join([why, *said[begin:][:10]])
        if case is None:
            return
        done += 1


def _judge(make_cases: Callable[[], Cases], first: int, results: Connection, log: IO[Any]) -> None:
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log.fileno(), stream.fileno())
    faulthandler.enable()
    for number, (case, judge) in enumerate(make_cases()):
        if number >= first:
            results.send(case)
            results.send(judge())
