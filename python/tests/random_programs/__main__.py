"""Random programs beside plain autograd. The last line is `programs: N, seed: S, moved: M, wrong: W`.

Exits 0 if nothing was wrong, something was moved and few runs were excused, 1 if not, 2 for flags that cannot be used.
Programs run in child processes, so that a program that ends its process is known by its number.
"""

import argparse
import dataclasses
import gc
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # which torch's checkpoint imports when first called: once, and not in each child

from random_programs.check import Checker, Tally
from random_programs.check import wrong as check
from random_programs.generator import generate
from random_programs.program import Program, size, to_text
from random_programs.setting import Setting, random_settings
from random_programs.shrinker import shrink

BATCH = 100  # programs in one process
SECONDS = 300  # that one program may take
MOST_REPORTS = 5  # that are shrunk


@dataclasses.dataclass
class Wrong:
    number: int
    setting: Setting | None  # None: the process ended without ebb
    what: str


def _in_child(work: Callable[[Callable[[Any], None]], None], take: Callable[[Any], None]) -> int:
    """Runs work(send) in a child, gives take() what was sent, and returns the child's status, below 0 for a signal."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)  # warnings of ebb's, and of torch's
            with os.fdopen(write, "wb") as pipe:

                def send(message: Any) -> None:
                    pickle.dump(message, pipe)
                    pipe.flush()

                try:
                    work(send)
                    status = 0
                except BaseException as error:
                    send(error if isinstance(error, KeyboardInterrupt) else RuntimeError(repr(error)))
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        while True:
            try:
                message = pickle.load(pipe)
            except (EOFError, pickle.UnpicklingError):
                break
            if isinstance(message, BaseException):
                raise message
            take(message)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _ended(status: int) -> str:
    if status == -signal.SIGALRM:
        return f"still running after {SECONDS} s"
    return f"the process ended by {signal.Signals(-status).name}" if status < 0 else f"the process ended with {status}"


def wrong_alone(program: Program, setting: Setting) -> str | None:
    """What is wrong with the program, which runs in a process of its own."""
    found: list[str | None] = []

    def work(send: Callable[[Any], None]) -> None:
        signal.alarm(SECONDS)
        send(check(program, setting))

    status = _in_child(work, found.append)
    return found[0] if found else _ended(status)


class Run:
    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags = flags
        self._wrong: list[Wrong] = []
        self._tally = Tally()
        self._programs = 0
        self._at: tuple[int, Setting | None] = (0, None)

    def all(self) -> int:
        flags = self._flags
        first, end = flags.first, flags.first + flags.programs
        start = time.monotonic()
        while first < end and not (flags.seconds and time.monotonic() - start > flags.seconds):
            first = self._batch(first, min(first + BATCH, end))
        tally = self._tally
        print(
            f"saves: {tally.saved}, offloaded: {tally.offloaded}, recomputed: {tally.recomputed}, "
            f"runs that followed a plan: {tally.planned}\n"
            f"programs in which plain autograd raised: {tally.errors}, unsteady: {tally.unsteady}, "
            f"runs that were refused for a write: {tally.refusals} of {tally.runs}"
        )
        shows_something = tally.offloaded > 0 and (tally.unsteady + tally.refusals) * 10 <= tally.runs + 10
        if not shows_something:
            print("nothing was offloaded, or over a tenth of the runs was excused: this run shows nothing")
        numbers = {each.number for each in self._wrong}
        print(f"programs: {self._programs}, seed: {flags.seed}, moved: {tally.offloaded}, wrong: {len(numbers)}")
        return 0 if shows_something and not numbers else 1

    def _batch(self, first: int, end: int) -> int:
        """Returns the number of the program to go on with."""

        def work(send: Callable[[Any], None]) -> None:
            gc.collect()
            gc.freeze()
            for number in range(first, end):
                signal.alarm(SECONDS)
                send((number, None))
                program = generate(number, self._flags.seed)
                checker = Checker(program)
                for setting in random_settings(number, self._flags.seed):
                    send((number, setting))
                    if what := checker.wrong(setting):
                        send(checker.tally)
                        send(Wrong(number, setting, what))
                        return  # what is wrong may have left the process so
                send(checker.tally)

        wrong_before = len(self._wrong)
        status = _in_child(work, self._take)
        number, setting = self._at
        if status != 0:
            self._programs += 1
            if setting is None and status == -signal.SIGALRM:
                print(f"passed over program {number}: plain autograd alone is {_ended(status)}", flush=True)
                return number + 1
            self._take(Wrong(number, setting, _ended(status)))
        return end if len(self._wrong) == wrong_before else number + 1

    def _take(self, message: Any) -> None:
        if isinstance(message, tuple):
            self._at = message
            if self._flags.print and message[1] is None:
                print(f"program {message[0]}:\n{to_text(generate(message[0], self._flags.seed))}", flush=True)
        elif isinstance(message, Tally):
            self._tally += message
            self._programs += 1
        else:
            self._wrong.append(message)
            self._report(message)

    def _report(self, wrong: Wrong) -> None:
        seed = self._flags.seed
        where = f"under {wrong.setting}" if wrong.setting else "with plain autograd"
        print(f"WRONG program {wrong.number} of seed {seed}, {where}: {wrong.what}", flush=True)
        if wrong.setting is None or len(self._wrong) > self._flags.reports:
            return
        program = generate(wrong.number, seed)
        print(
            f"  repeat: ./dev test random_python --programs 1 --first {wrong.number} --seed {seed}\n"
            f"  shrinking {size(program)} lines",
            flush=True,
        )
        what = wrong_alone(program, wrong.setting)
        if what is None:
            print("  right, when run alone", flush=True)
            return
        program = shrink(program, lambda smaller: wrong_alone(smaller, wrong.setting) is not None)
        print(
            f"  shrunk to {size(program)} lines, steps: {program.steps}, weights updated: {program.updates}\n"
            f"{to_text(program)}  {wrong_alone(program, wrong.setting) or 'right, when run once more'}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser("random_python", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="of all choices")
    parser.add_argument("--first", type=int, default=0, help="the first program's number")
    parser.add_argument("--seconds", type=float, help="start no more programs after this time")
    parser.add_argument("--reports", type=int, default=MOST_REPORTS, help="how many wrong programs are shrunk")
    parser.add_argument("--print", action="store_true", help="print each program before it runs")
    torch.set_num_threads(1)
    return Run(parser.parse_args()).all()


if __name__ == "__main__":
    sys.exit(main())
