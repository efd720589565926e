"""Question: what does a save that ebb passes through cost the host in Python, on top of plain autograd?

From the repository's root, with ebb installed: python bench/overhead/saves.py [--out FILE]. A chain of small operations
runs forward and backward, with a guard and without one in turn; the difference of the medians, for each operation, is
what one save and its unpack cost. The difference of the two plain runs is the noise. The same in C++ is
`./dev bench overhead --benchmark_filter=chain`."""

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path

import torch

import ebb

OPERATIONS = 2000
PASSES = 60


def time_ns(guard: contextlib.AbstractContextManager) -> tuple[float, float]:
    """Nanoseconds of an operation's forward and backward."""
    x = torch.zeros(4, requires_grad=True)
    y = x
    start = time.perf_counter_ns()
    with guard:
        for _ in range(OPERATIONS):
            y = y.sin()
    middle = time.perf_counter_ns()
    y.backward(torch.ones_like(y))
    return (middle - start) / OPERATIONS, (time.perf_counter_ns() - middle) / OPERATIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    offloader = ebb.Offloader("cpu")
    times = {"plain": [], "plain again": [], "ebb": []}
    for _ in range(PASSES):
        times["plain"].append(time_ns(contextlib.nullcontext()))
        times["ebb"].append(time_ns(offloader))
        times["plain again"].append(time_ns(contextlib.nullcontext()))
    medians = {name: [statistics.median(part) for part in zip(*pairs)] for name, pairs in times.items()}
    rows = {
        "forward_ns": {name: round(pair[0], 1) for name, pair in medians.items()},
        "backward_ns": {name: round(pair[1], 1) for name, pair in medians.items()},
        "save_ns": round(medians["ebb"][0] - medians["plain"][0], 1),
        "unpack_and_end_ns": round(medians["ebb"][1] - medians["plain"][1], 1),
    }
    print(json.dumps(rows, indent=1))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
