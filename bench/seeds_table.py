"""Prints README's tables of what `./dev bench seeds` measured: python bench/seeds_table.py seeds.json"""

import json
import sys
from pathlib import Path

MIB = 1 << 20


def size(number):
    return f"{number / 1e9:.2f} GB" if number >= 1e8 else f"{number / MIB:.2f} MiB"


def same(row):
    return "equal" if row["gradients_equal"] else "DIFFERENT"


def print_models(rows):
    print("| model | configuration | ms/step | over none | after forward | peak | gradients |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = (
            row["case"],
            row["config"],
            f"{row['ms_median']:.1f}",
            f"{100 * row['overhead']:+.1f} %",
            size(row["after_forward_bytes"]),
            size(row["peak_bytes"]),
            same(row),
        )
        print("| " + " | ".join(cells) + " |")


def print_paths(rows):
    print("| paths | configuration | how many | peak over the start of backward | gradients |")
    print("|---|---|---|---|---|")
    for row in rows:
        over = f"{row['peak_over_start_bytes'] / MIB:.2f} MiB"
        print(f"| {row['case']} | {row['config']} | {row['n']} | {over} | {same(row)} |")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    rows = json.loads(Path(sys.argv[1]).read_text())
    print_models([row for row in rows if "overhead" in row])
    print()
    print_paths([row for row in rows if "n" in row])


if __name__ == "__main__":
    main()
