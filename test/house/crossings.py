#!/usr/bin/env python3
"""How often a call goes from one part of the library into another: for one save, and for one next use of a weight.

The library is built without optimization, with every call reported (-finstrument-functions). A unit is a header with
the .cc files that implement it. Counted are the calls, on the main thread, of functions that stand in a .cc file; a
crossing is such a call out of another unit's .cc file.

usage: crossings.py BUILD [--built] [--most SCENARIO=N ...] [--trace SCENARIO]
    BUILD    a folder for the build; LIBTORCH_PYTHON names the Python whose torch is used
    --built  the program is there already
    --most   exits 1 if a scenario has more crossings
    --trace  prints each crossing of the scenario
"""

import argparse
import collections
import pathlib
import subprocess
import sys

import rooms

ROOT = pathlib.Path(__file__).resolve().parents[2]


def build(folder):
    """The program's path."""
    subprocess.run(["cmake", "-S", ROOT / "test/house", "-B", folder, "-G", "Ninja"], check=True, stdout=sys.stderr)
    subprocess.run(["ninja", "-C", folder, "crossings"], check=True, stdout=sys.stderr)
    return pathlib.Path(folder) / "crossings"


def units_of(program, addresses, headers):
    """By address, the unit in whose .cc file a function stands, and the function; None for all other functions."""
    answer = subprocess.run(["addr2line", "-fC", "-e", program], input="\n".join(addresses), text=True, check=True,
                            capture_output=True).stdout.splitlines()
    found = {}
    for address, name, place in zip(addresses, answer[::2], answer[1::2]):
        path = pathlib.Path(place.split(":")[0])
        inside = path.is_relative_to(ROOT) and path.suffix == ".cc" and path.name != "crossings.cc"
        found[address] = (rooms.unit_of(path.relative_to(ROOT), headers), name) if inside else None
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--built", action="store_true")
    parser.add_argument("--most", action="append", default=[], metavar="SCENARIO=N")
    parser.add_argument("--trace", metavar="SCENARIO")
    arguments = parser.parse_args()

    program = pathlib.Path(arguments.build) / "crossings" if arguments.built else build(arguments.build)
    lines = subprocess.run([program], text=True, check=True, capture_output=True).stdout.splitlines()
    calls = [(scenario, address, int(depth)) for _, scenario, address, depth in
             (line.split() for line in lines if line.startswith("call "))]
    headers = {str(path.relative_to(ROOT).with_suffix("")) for folder in rooms.FOLDERS
               for path in (ROOT / folder).rglob("*.h")}
    units = units_of(program, sorted({address for _, address, _ in calls}), headers)

    counts = collections.defaultdict(collections.Counter)
    seen = collections.defaultdict(set)
    stack = []  # of (depth, unit) that are under way
    for scenario, address, depth in calls:
        while stack and stack[-1][0] >= depth:
            stack.pop()
        if units[address] is None:
            continue
        unit, name = units[address]
        counts[scenario]["calls"] += 1
        seen[scenario].add(unit)
        if stack and stack[-1][1] != unit:
            counts[scenario]["crossings"] += 1
            if arguments.trace == scenario:
                print(f"{'  ' * len(stack)}{stack[-1][1]} -> {unit}: {name.split('(')[0]}")
        stack.append((depth, unit))

    limits = {name: int(most) for name, most in (each.split("=") for each in arguments.most)}
    for scenario, count in counts.items():
        limit = f", of at most {limits[scenario]}" if scenario in limits else ""
        print(f"{scenario}: {count['calls']} calls, {count['crossings']} crossings{limit}, {len(seen[scenario])} units")
    sys.exit(any(counts[name]["crossings"] > most for name, most in limits.items()))


if __name__ == "__main__":
    main()
