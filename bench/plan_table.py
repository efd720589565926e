"""Prints README's table of what `./dev bench plan` measured: python bench/plan_table.py plan.json"""

import json
import sys
from pathlib import Path

GB = 1e9
COLUMNS = (
    "dtype",
    "budget GB",
    "after forward GB",
    "peak GB",
    "ms/step",
    "over none",
    "predicted",
    "kept, moved, recomputed GB",
    "gradients",
)


def line(row, saved_bytes):
    moved, recomputed = row["offloaded_bytes"], row["recomputed_bytes"]
    cells = (
        row["dtype"],
        f"{row['budget_bytes'] / GB:.2f}",
        f"{row['after_forward_bytes'] / GB:.2f}",
        f"{max(row['peak_bytes'], row['largest_peak_bytes']) / GB:.2f}",
        f"{row['ms_median']:.1f}",
        f"{100 * row['overhead']:+.1f} %",
        f"{row['predicted_ms']:.1f} ms",
        f"{(saved_bytes - moved - recomputed) / GB:.1f}, {moved / GB:.1f}, {recomputed / GB:.1f}",
        {True: "equal", False: "DIFFERENT", None: "not compared"}[row["gradients_equal"]],
    )
    return "| " + " | ".join(cells) + " |"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    rows = [row for row in json.loads(Path(sys.argv[1]).read_text()) if "predicted_ms" in row]
    if not rows:
        sys.exit(f"plan_table: error: no row of {sys.argv[1]} followed a plan")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for row in rows:
        print(line(row, row["planned_bytes"]))


if __name__ == "__main__":
    main()
