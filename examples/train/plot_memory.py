"""Draws what autograd's saves hold on the device over one step: python plot_memory.py report.json memory.png"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

UNITS = {"MiB": 2**20, "GiB": 2**30}
PLAIN_COLOR = "#9a9a9a"
EBB_COLOR = "#1f5f8b"


def turn_ms(timeline):
    """Where backward begins: the first sample taken inside autograd's engine."""
    return next((point["ms"] for point in timeline if point["backward"]), timeline[-1]["ms"])


def unit_for(peak_bytes):
    return "GiB" if peak_bytes >= 10 * UNITS["GiB"] else "MiB"


def phases(timeline):
    """A step's samples with time replaced by phase: forward is 0 to 1, backward 1 to 2.

    The two runs take different times, and so do the parts of one; what is to be compared is the place in the step.
    """
    start, end, turn = timeline[0]["ms"], timeline[-1]["ms"], turn_ms(timeline)
    xs, ys = [], []
    for point in timeline:
        if point["ms"] < turn:
            xs.append((point["ms"] - start) / max(turn - start, 1e-9))
        else:
            xs.append(1 + (point["ms"] - turn) / max(end - turn, 1e-9))
        ys.append(point["saved_on_device"])
    return xs, ys


def amount(peak_bytes, unit):
    return f"{peak_bytes / UNITS[unit]:.{1 if unit == 'GiB' else 0}f} {unit}"


def draw_run(axes, timeline, unit, name, color):
    xs, ys = phases(timeline)
    peak_bytes = max(ys)  # in the step that is drawn
    ys = [y / UNITS[unit] for y in ys]
    axes.fill_between(xs, ys, step="post", color=color, alpha=0.25, linewidth=0)
    axes.step(xs, ys, where="post", color=color, linewidth=1.5, label=f"{name}: peak {amount(peak_bytes, unit)}")


def draw(report, path):
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150)
    plain_peak = report.get("plain_peak_saved_bytes_on_device") or 0
    unit = unit_for(max(plain_peak, report["peak_saved_bytes_on_device"]))
    if report.get("plain_timeline"):
        draw_run(axes, report["plain_timeline"], unit, "without ebb", PLAIN_COLOR)
    if report["timeline"]:
        name = "with ebb" if report["config"]["offload"] else "without ebb"
        draw_run(axes, report["timeline"], unit, name, EBB_COLOR)
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlim(0, 2)
    axes.set_ylim(bottom=0)
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(f"saved activations on the device ({unit})")
    axes.set_title(title(report), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    figure.tight_layout()
    figure.savefig(path)


def title(report):
    config = report["config"]
    return (
        f"One training step on {report['device']}: {config['parameters'] / 1e6:.0f} M parameters, "
        f"{config['layers']} layers, batch {config['batch']} x {config['seq']}, {report['dtype']}"
    )


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        report = json.load(file)
    draw(report, sys.argv[2])


if __name__ == "__main__":
    main()
