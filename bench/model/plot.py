"""Draws what `./dev bench model` measured: python -m bench.model.plot FILE... PICTURE

One panel a model: tokens a second over the tokens of a step, with all on the GPU and within each budget of GPU memory."""

import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.tables import budget, gb, load

COLORS = {0: "#9a9a9a"}  # of the resident runs; the budgets', from the largest on:
BUDGET_COLORS = ("#1f5f8b", "#3aa17e", "#b5651d")


def label(budget_bytes):
    return f"ebb, within {gb(budget_bytes)}" if budget_bytes else "resident, blocks recomputed"


def draw(axes, rows, colors):
    for budget_bytes, color in colors.items():
        points = sorted((row["batch"] * row["sequence"], row["tokens_per_s"]) for row in rows if budget(row) == budget_bytes)
        if points:
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=5, label=label(budget_bytes))
    axes.set_xscale("log", base=2)
    ticks = sorted({row["batch"] * row["sequence"] for row in rows})
    axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    axes.set_ylim(0, 1.1 * max(row["tokens_per_s"] for row in rows))
    axes.set_xlabel("tokens a step")
    axes.set_title(f"{rows[0]['parameters'] / 1e9:.2f} billion parameters", fontsize=10)
    axes.grid(color="#e8e8e8", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    *paths, picture = sys.argv[1:]
    rows = load(paths)
    budgets = sorted({budget(row) for row in rows} - {0}, reverse=True)
    if len(budgets) > len(BUDGET_COLORS):
        sys.exit(f"plot: error: {len(budgets)} budgets, and {len(BUDGET_COLORS)} colors")
    colors = COLORS | dict(zip(budgets, BUDGET_COLORS, strict=False))
    shapes = sorted({row["parameters"] for row in rows})
    figure, panels = plt.subplots(1, len(shapes), figsize=(4.6 * len(shapes), 3.8), dpi=130, squeeze=False)
    for axes, parameters in zip(panels[0], shapes, strict=True):
        draw(axes, [row for row in rows if row["parameters"] == parameters], colors)
    panels[0][0].set_ylabel("tokens a second")
    figure.suptitle(f"Llama shapes in bfloat16 with AdamW, {rows[0]['device'].split('(')[-1].rstrip(')')}", fontsize=11)
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    main()
