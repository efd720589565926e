"""Draws what `./dev bench python` measured of several shapes: python -m bench.peers.plot_shapes FILE... PICTURE

One panel a shape: the time of a step over plain autograd's beside it, and the most device memory in a step. What lies
further left and further down is better in both. Files of one shape share its panel; what several of them have is as in
the first."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .configurations import EBB_PYTHON, EBB_PYTHON_REGIONS, EBB_PYTHON_WITHIN, TRANSFORMERS_OFFLOAD
from .plot import EBB_COLOR, OTHER_COLOR, peak_gb

# Rows of a plan: one line each.
PLANS = {EBB_PYTHON_WITHIN: ("ebb, planned", EBB_COLOR), EBB_PYTHON_REGIONS: ("ebb, planned, with regions", "#3aa17e")}
NAMES = {
    EBB_PYTHON: "ebb, all moved",
    TRANSFORMERS_OFFLOAD: "transformers' offload",
    "checkpoint": "checkpoint, every block",
    "trl": "TRL's OffloadActivations",
    "torchtune": "torchtune's OffloadActivations",
    "none": "plain autograd",
}
TITLES = {"hf_llama": "Llama, 9 layers of the 8B shape", "hf_gpt2": "GPT-2 medium", "hf_vit": "ViT-Large"}
LINE_POINTS = 10  # between two names

Rows = dict[str, dict[str, Any]]


def load(paths: list[str]) -> tuple[dict[str, Rows], str]:
    """The rows that were measured, by shape and configuration, and the GPU's name."""
    shapes: dict[str, Rows] = {}
    gpu = ""
    for path in paths:
        results = json.loads(Path(path).read_text())
        gpu = results["machine"].get("gpu", results["machine"]["device"])
        rows = shapes.setdefault(results["shape"]["name"], {})
        for row in results["rows"]:
            if row["error"] is None and row["peak_bytes"] is not None:
                rows.setdefault(row["config"], row)
    return shapes, gpu


def plan_of(config: str) -> str | None:
    return next((prefix for prefix in PLANS if config.startswith(prefix)), None)


def name(row: dict[str, Any]) -> str:
    known = NAMES.get(row["config"], row["config"])
    return f"{known}: gradients DIFFERENT" if row["gradients"] == "DIFFERENT" else known


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


def draw(axes: Axes, rows: Rows, title: str) -> None:
    names = []
    for prefix, (plan, color) in PLANS.items():
        planned = sorted((row for row in rows.values() if plan_of(row["config"]) == prefix), key=peak_gb)
        if planned:
            axes.plot(
                [peak_gb(row) for row in planned],
                [row["ratio_of_medians"] for row in planned],
                color=color,
                marker="o",
                markersize=5,
                zorder=3,
                label=plan,
            )
    for row in rows.values():
        if plan_of(row["config"]) is None:
            color = EBB_COLOR if row["config"] == EBB_PYTHON else OTHER_COLOR
            axes.scatter(peak_gb(row), row["ratio_of_medians"], color=color, s=36, zorder=2)
            names.append((peak_gb(row), row["ratio_of_medians"], name(row), color if color == EBB_COLOR else "#505050"))
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.93, 1.2 * max(row["ratio_of_medians"] for row in rows.values()))
    axes.set_yticks([1, 1.25, 1.5, 2, 3, 4, 6, 8], labels=["1", "1.25", "1.5", "2", "3", "4", "6", "8"])
    axes.set_xlim(0, 1.45 * max(peak_gb(row) for row in rows.values()))  # with room for the names
    axes.set_xlabel("most GB on the GPU in a step")
    axes.set_title(title, fontsize=10)
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    annotate(axes, names)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    *paths, picture = sys.argv[1:]
    shapes, gpu = load(paths)
    figure, axes = plt.subplots(1, len(shapes), figsize=(5.2 * len(shapes), 4.4), dpi=130, squeeze=False, sharey=False)
    for each, (shape, rows) in zip(axes[0], shapes.items(), strict=True):
        draw(each, rows, f"{TITLES.get(shape, shape)}, bfloat16, {gpu}")
    axes[0][0].set_ylabel("time of a step, over plain autograd")
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    main()
