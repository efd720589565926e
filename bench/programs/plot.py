"""Draws what `./dev bench plan --programs` measured: python -m bench.programs.plot FILE... PICTURE

One panel a program: the time of a step over plain autograd's, and the most device memory in a step. What lies further
left and further down is better in both. The line is of plans for some budgets, and the points are what one can do by
hand."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from bench.peers.plot import EBB_COLOR, OTHER_COLOR, peak_gb
from matplotlib.axes import Axes

from .rows import PLANNED, Row, measured

PANELS_IN_A_ROW = 3
LINE_POINTS = 10  # between two names


def annotate(axes: Axes, points: list[tuple[float, float, str, str]]) -> None:
    """Names (x, y, name, color) on the right of their points, the lowest first, moved up where names would cover each
    other."""
    points_of = axes.figure.dpi / 72
    lowest = 0.0
    for x, y, text, color in sorted(points, key=lambda point: point[1]):
        at = axes.transData.transform((x, y))[1] / points_of
        up = max(at, lowest) - at
        lowest = at + up + LINE_POINTS
        axes.annotate(
            text,
            (x, y),
            xytext=(12, up),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=color,
            arrowprops={"arrowstyle": "-", "color": "#c0c0c0", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )


def draw(axes: Axes, rows: list[Row], title: str) -> None:
    plain = next(row["ms_median"] for row in rows if row["config"] in ("none", "none, last"))
    plans = sorted((row for row in rows if row["config"] == PLANNED), key=peak_gb)
    others = [row for row in rows if row["budget_bytes"] is None and row["config"] != "none, last"]
    axes.plot(
        [peak_gb(row) for row in plans],
        [row["ms_median"] / plain for row in plans],
        color=EBB_COLOR,
        marker="o",
        markersize=4,
        zorder=3,
        label="ebb, by a budget alone",
    )
    points = [(peak_gb(row), row["ms_median"] / plain) for row in others]
    axes.scatter([x for x, _ in points], [y for _, y in points], color=OTHER_COLOR, s=30, zorder=2)
    most = max(row["ms_median"] / plain for row in rows)
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 1.25, 1.5, 2, 3, 4, 6], labels=["1", "1.25", "1.5", "2", "3", "4", "6"])
    axes.set_ylim(0.95, 1.2 * most)  # after the ticks, which would widen it
    axes.set_xlim(0, 1.5 * max(map(peak_gb, rows)))  # with room for the names
    axes.set_title(title, fontsize=10)
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    annotate(axes, [(*point, row["config"], "#505050") for point, row in zip(points, others, strict=True)])


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    *paths, picture = sys.argv[1:]
    files = [json.loads(Path(path).read_text()) for path in paths]
    programs: dict[str, list[Row]] = {}
    for row in measured([row for file in files for row in file["rows"]]):
        programs.setdefault(row["program"], []).append(row)
    lines = -(-len(programs) // PANELS_IN_A_ROW)
    figure, panels = plt.subplots(
        lines, PANELS_IN_A_ROW, figsize=(5 * PANELS_IN_A_ROW, 3.8 * lines), dpi=130, squeeze=False
    )
    for axes, (name, rows) in zip(panels.flat, programs.items(), strict=False):
        draw(axes, rows, name)
    for axes in panels.flat[len(programs) :]:
        axes.set_visible(False)
    for line in panels:
        line[0].set_ylabel("time of a step, over plain autograd")
    for axes in panels.flat[max(0, len(programs) - PANELS_IN_A_ROW) : len(programs)]:
        axes.set_xlabel("most GB on the GPU in a step")
    panels[0][0].legend(fontsize=8, frameon=False, loc="upper right")
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    main()
