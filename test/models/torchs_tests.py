#!/usr/bin/env python3
"""Runs torch's own tests of autograd under ebb, and under hooks that do nothing.

usage: torchs_tests.py test_autograd.py, of the torch that is installed (github.com/pytorch/pytorch, test/); it needs
expecttest. Prints each test that passes under torch.autograd.graph.saved_tensors_hooks(identity, identity) and fails
under an offloader that recomputes, and a summary. The exit status is 1 if there is one.
"""

import argparse
import contextlib
import importlib.util
import re
import sys
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from isolated import Cases, Verdict, outcomes

import ebb
from ebb.policies import minimum_size, recompute

Guard = Callable[[], contextlib.AbstractContextManager[object]]

PLAIN: Guard = partial(torch.autograd.graph.saved_tensors_hooks, lambda tensor: tensor, lambda tensor: tensor)
GUARDS: dict[str, Guard] = {
    "wrap": lambda: ebb.Offloader("cpu", minimum_size(1)),
    "recompute": lambda: ebb.Offloader("cpu", recompute(ebb.Recompute.COMPUTE_BOUND, minimum_size(1))),
    "least-memory": lambda: ebb.Offloader("cpu", least_memory=True, planned_minimum_bytes=1),
}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        yield from tests_of(each) if isinstance(each, unittest.TestSuite) else [each]


def judge(test: unittest.TestCase, guard: Guard) -> tuple[Verdict, str]:
    result = unittest.TestResult()
    with guard():
        test.run(result)
    wrong = [*result.errors, *result.failures]
    if wrong:
        return "failed", " ".join(wrong[0][1].split())[-300:]
    return ("skipped" if result.skipped or result.expectedFailures else "passed"), ""


def cases(module: ModuleType, tests: str, guard: Guard) -> Cases:
    for test in tests_of(unittest.defaultTestLoader.loadTestsFromModule(module)):
        name = test.id().partition(".")[2]
        if re.search(tests, name):
            yield name, partial(judge, test, guard)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tests", default="", metavar="REGEX", help="those whose names have a match")
    parser.add_argument("--seconds", default=120, type=int, help="that a test may take (default: 120)")
    arguments = parser.parse_args()
    module = load(arguments.file)

    def run(guard: Guard) -> dict[str, tuple[Verdict, str]]:
        found = outcomes(partial(cases, module, arguments.tests, guard), arguments.seconds)
        return {test: (verdict, why) for test, verdict, why in found}

    plain = run(PLAIN)
    passed = failed = 0
    for name, guard in GUARDS.items():
        for test, (verdict, why) in run(guard).items():
            if plain[test][0] == "passed" and verdict == "failed":
                failed += 1
                print(f"failed  {name}  {test}  {why}", flush=True)
            passed += verdict == "passed"
    skipped = len(plain) * len(GUARDS) - passed - failed
    print(f"tests: {passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main())
