#!/usr/bin/env python3
"""Trains toy models of transformers and timm with ebb and without, and compares every bit.

Each model trains four steps in its settings (attention "eager" or "sdpa", float32 or bfloat16, without checkpointing or
with either kind of torch's) and in each mode of using ebb (modes.py). Losses, gradients, weights and
buffers must be those of plain autograd. One line is printed for each case that fails, and then a summary. Each model has
a process of its own, so that a signal is one failure. The exit status is 1 if a case fails.
"""

import argparse
import os
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from isolated import FORK, Cases, Verdict, outcomes
from modes import MODES
from trial import Trial, settings
from zoo import ZOO

CONTRACT = Path(__file__).resolve().parents[2] / "docs" / "correctness.md"


class Excused(NamedTuple):
    """Cases that need not have the bits of plain autograd, and the words of docs/correctness.md that say so."""

    models: str  # a regular expression
    cases: str  # a regular expression
    words: str


EXCUSED: tuple[Excused, ...] = ()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", metavar="REGEX", help="those whose names have a match")
    parser.add_argument("--modes", default="", metavar="REGEX", help="cases, \"SETTING MODE\", that have a match")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", default=1, type=int, help="of weights, batches and dropout (default: 1)")
    parser.add_argument("--jobs", default=os.cpu_count(), type=int, help="models at a time (default: one for each core)")
    parser.add_argument("--seconds", default=120, type=int, help="that a case may take (default: 120)")
    parser.add_argument("--every-setting", action="store_true", help="twice as many cases")
    parser.add_argument("--verbose", action="store_true", help="prints cases that pass, too")
    return parser.parse_args()


def cases(model: str, arguments: argparse.Namespace) -> Cases:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for setting in settings(ZOO[model], arguments.every_setting):
        trial = cache(partial(Trial, ZOO[model], setting, arguments.device, arguments.seed))
        for name, mode in MODES.items():
            if re.search(arguments.modes, f"{setting} {name}"):
                yield f"{setting} {name}", lambda trial=trial, mode=mode: trial().judge(mode)


def judge(model: str, arguments: argparse.Namespace) -> Counter[tuple[str, Verdict]]:
    """Prints what is wrong with a model, and counts the verdicts in each mode."""
    counts: Counter[tuple[str, Verdict]] = Counter()
    for case, verdict, why in outcomes(partial(cases, model, arguments), arguments.seconds):
        if verdict == "failed" and any(re.search(e.models, model) and re.search(e.cases, case) for e in EXCUSED):
            verdict = "skipped"
        counts[case.split()[-1], verdict] += 1
        if verdict == "failed" or arguments.verbose:
            print(f"{verdict}  {model}  {case}  {why}".rstrip(), flush=True)
    return counts


def main() -> int:
    arguments = parse()
    contract = " ".join(CONTRACT.read_text().split())
    unsaid = [each.words for each in EXCUSED if each.words not in contract]
    if unsaid:
        sys.exit(f"{CONTRACT} does not say: {unsaid}")
    models = [model for model in ZOO if re.search(arguments.models, model)]
    with ProcessPoolExecutor(arguments.jobs, mp_context=FORK) as pool:
        counts = sum(pool.map(partial(judge, arguments=arguments), models), Counter())
    judged = {mode for mode, verdict in counts if verdict != "skipped"}
    for mode in {mode for mode, _ in counts} - judged:
        counts[mode, "failed"] += 1
        print(f"failed  every model  {mode}  no case could be judged")
    passed, failed, skipped = (sum(n for (_, each), n in counts.items() if each == v) for v in get_args(Verdict))
    print(f"models: {passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0 or passed == 0)


if __name__ == "__main__":
    sys.exit(main())
