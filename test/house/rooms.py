#!/usr/bin/env python3
"""Which parts of the library include each other: exits 1 if too many units do, or two folders.

A unit is a header with the .cc files that implement it, whose names begin with the header's. Units that include each
other, directly or through others, can only be understood together.

usage: rooms.py [--most N]    N: how many units may form a cycle; default 3
"""

import argparse
import collections
import pathlib
import re
import sys

FOLDERS = ("offload", "policy", "streams")
INCLUDE = re.compile(r'^#include "([^"]+)\.h"', re.MULTILINE)


def unit_of(path, headers):
    """The header, without its ending, that the file implements; else the file itself."""
    words = path.stem.split("_")
    for count in range(len(words), 0, -1):
        unit = str(path.parent / "_".join(words[:count]))
        if unit in headers:
            return unit
    return str(path.with_suffix(""))


def reach(start, arrows):
    """All that `start` includes, directly or through others."""
    seen, to_visit = set(), [start]
    while to_visit:
        for unit in arrows.get(to_visit.pop(), set()) - seen:
            seen.add(unit)
            to_visit.append(unit)
    return seen


def cycles(arrows):
    """Sets of at least two that reach each other."""
    reached = {unit: reach(unit, arrows) for unit in arrows}
    return {
        frozenset({unit} | {other for other in others if unit in reached.get(other, set())})
        for unit, others in reached.items()
        if unit in others
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=3, help="how many units may form a cycle")
    most = parser.parse_args().most

    root = pathlib.Path(__file__).resolve().parents[2]
    files = [path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*.*")]
    files = [path for path in files if path.suffix in (".h", ".cc")]
    headers = {str(path.with_suffix("")) for path in files if path.suffix == ".h"}
    units, folders = collections.defaultdict(set), collections.defaultdict(set)
    for path in files:
        here = unit_of(path, headers)
        for included in INCLUDE.findall((root / path).read_text()):
            if included != here and included in headers:
                units[here].add(included)
                folder = str(pathlib.PurePath(included).parent)
                if folder != str(path.parent):
                    folders[str(path.parent)].add(folder)

    unit_cycles, folder_cycles = cycles(units), cycles(folders)
    for found in sorted(unit_cycles | folder_cycles, key=sorted):
        print("include each other:", " ".join(sorted(found)))
    largest = max(map(len, unit_cycles), default=0)
    print(f"{len(files)} files, {len(headers)} headers; largest cycle of units: {largest}, of at most {most}; "
          f"cycles of folders: {len(folder_cycles)}")
    sys.exit(largest > most or bool(folder_cycles))


if __name__ == "__main__":
    main()
