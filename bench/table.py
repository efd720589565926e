"""Prints README's table of step times from what `./dev bench step` wrote: python table.py w1.json..."""

import json
import sys

GB = 1e9


def row(result):
    overhead = 100 * (result["ratio_of_medians"] - 1)
    return " | ".join(
        [
            result["dtype"],
            result["config"],
            f"{result['ms_median']:.1f}",
            f"{overhead:+.1f} %",
            f"{result['after_forward_bytes'] / GB:.2f}",
            f"{result['peak_bytes'] / GB:.2f}",
            f"{result['offloaded_bytes'] / GB:.2f}",
            "equal" if result["gradients_equal"] else "DIFFERENT",
        ]
    )


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print("| dtype | configuration | ms/step | over none | after forward GB | peak GB | moved GB | gradients |")
    print("|---|---|---|---|---|---|---|---|")
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            for result in json.load(file):
                print(f"| {row(result)} |")


if __name__ == "__main__":
    main()
