"""Draws what `./dev bench peers` and `./dev bench plan` measured: python -m bench.peers.plot peers.json... plan.json FOLDER

FOLDER/bars.png has the time of a step and the most device memory in it of each configuration, FOLDER/pareto.png the one
against the other: what lies further left and further down is better in both."""

import json
import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .results import verdict

GB = 1e9
EBB_COLOR = "#1f5f8b"
OTHER_COLOR = "#9a9a9a"
PLANNED = "ebb, within "


def color(row):
    return EBB_COLOR if row["config"].startswith("ebb") else OTHER_COLOR


def peak_gb(row):
    return row["peak_bytes"] / GB


def label(row):
    return f"{row['config']}: gradients DIFFERENT" if row["gradients"] == "DIFFERENT" else row["config"]


def plan_rows(results):
    """Those of `./dev bench plan` that followed a plan."""
    for row in results:
        if "predicted_ms" in row:
            size = f"{row['budget_bytes'] / GB:.1f} GB"
            yield row | {
                "config": f"{PLANNED}{size}",
                "gradients": verdict(row["gradients_equal"]),
            }


def is_planned(row):
    return row["config"].startswith(PLANNED)


def load(paths):
    """The rows that were measured, by dtype, and the GPU's name. What several files have is as in the first."""
    rows, gpu = {}, ""
    for path in paths:
        results = json.loads(Path(path).read_text())
        if isinstance(results, list):
            for row in plan_rows(results):
                rows.setdefault(row["dtype"], {})[row["config"]] = row
            continue
        gpu = results["machine"].get("gpu", results["machine"]["device"])
        for row in results["rows"]:
            if row["error"] is None and row["undrained_after_forward_bytes"] is not None:
                rows.setdefault(row["dtype"], {}).setdefault(row["config"], row)
    return {dtype: list(measured.values()) for dtype, measured in rows.items()}, gpu


def draw_bars(axes, rows, values, title):
    names = [label(row) for row in rows]
    bars = axes.barh(names, values, color=[color(row) for row in rows])
    axes.bar_label(bars, fmt="%.4g", padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def draw_all_bars(rows, gpu, path):
    rows = {dtype: [row for row in measured if not is_planned(row)] for dtype, measured in rows.items()}
    figure, axes = plt.subplots(len(rows), 2, figsize=(10, 2.8 * len(rows)), dpi=150, squeeze=False, sharey="row")
    for (left, right), (dtype, measured) in zip(axes, rows.items()):
        draw_bars(left, measured, [row["ms_median"] for row in measured], f"{dtype}: ms a step")
        left.invert_yaxis()  # which the right one shares
        draw_bars(right, measured, [peak_gb(row) for row in measured], f"{dtype}: most GB in a step")
    figure.suptitle(gpu, fontsize=10)
    figure.tight_layout()
    figure.savefig(path)


def draw_pareto(axes, rows, title):
    points = [row for row in rows if row["config"] != "none in C++"]
    planned = sorted((row for row in points if is_planned(row)), key=peak_gb)
    if planned:
        axes.plot(
            [peak_gb(row) for row in planned],
            [row["ms_median"] for row in planned],
            color=EBB_COLOR,
            marker="o",
            markersize=5,
            zorder=3,
        )
        first = planned[0]
        axes.annotate(
            "ebb, planned\nfor a budget",
            (peak_gb(first), first["ms_median"]),
            xytext=(-4, -12),
            ha="center",
            va="top",
            textcoords="offset points",
            fontsize=8,
        )
    close = 0.025 * max(row["ms_median"] for row in points)
    last = {"left": -math.inf, "right": -math.inf}
    for row in sorted(points, key=lambda row: row["ms_median"]):
        if is_planned(row):
            continue
        x, y = peak_gb(row), row["ms_median"]
        axes.scatter(x, y, color=color(row), s=36, zorder=3)
        # The others' names on the right: they are often neighbours.
        right, side = (-6, "right") if row["config"].startswith("ebb") else (6, "left")
        up = 13 if y - last[side] < close else 4
        last[side] = y
        axes.annotate(label(row), (x, y), xytext=(right, up), ha=side, textcoords="offset points", fontsize=8)
    axes.set_xlabel("most GB on the GPU in a step")
    axes.set_ylabel("ms a step")
    axes.set_title(title, fontsize=10)
    room = 1.3  # for the names
    axes.set_xlim(0, room * max(peak_gb(row) for row in points))
    axes.set_ylim(0, room * max(row["ms_median"] for row in points))
    axes.grid(color="#e0e0e0", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw_all_pareto(rows, gpu, path):
    figure, axes = plt.subplots(1, len(rows), figsize=(5.5 * len(rows), 4.2), dpi=150, squeeze=False)
    for each, (dtype, measured) in zip(axes[0], rows.items()):
        draw_pareto(each, measured, f"{dtype}, {gpu}")
    figure.tight_layout()
    figure.savefig(path)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    *paths, folder = sys.argv[1:]
    rows, gpu = load(paths)
    if not rows:
        sys.exit(f"plot: error: nothing was measured in {' '.join(paths)}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    draw_all_bars(rows, gpu, Path(folder) / "bars.png")
    draw_all_pareto(rows, gpu, Path(folder) / "pareto.png")


if __name__ == "__main__":
    main()
