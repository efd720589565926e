"""Prints README's table of what `./dev bench fits` found: python bench/fits_table.py fits.json"""

import json
import sys
from pathlib import Path

GB = 1e9
DIMENSIONS = {"layers": "layers (batch 8)", "batch": "batch (9 layers)", "sequence": "sequence (9 layers, batch 1)"}


def cell(row):
    if row["largest"] == 0:
        return "-"
    return f"{row['largest']} ({row['step_ms']:.0f} ms)"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    rows = json.loads(Path(sys.argv[1]).read_text())
    found = {(row["cap_bytes"], row["dimension"], row["config"]): row for row in rows}
    configs = list(dict.fromkeys(row["config"] for row in rows))
    print("| at most | largest | " + " | ".join(configs) + " |")
    print("|" + "---|" * (len(configs) + 2))
    for cap, dimension in dict.fromkeys((row["cap_bytes"], row["dimension"]) for row in rows):
        cells = [cell(found[cap, dimension, each]) if (cap, dimension, each) in found else "" for each in configs]
        print(f"| {cap / GB:.0f} GB | {DIMENSIONS[dimension]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
