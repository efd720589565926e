"""ebb.plot."""

import os
from typing import Any

from ebb import _core
from ebb._offloader import Offloader


def plot(offloader: Offloader, path: str | os.PathLike[str]) -> None:
    """Draws what the offloader has held on the device over time since its timeline was last taken, and takes that.

    Needs matplotlib (ImportError without), and an offloader that was made with record_timeline=True and has run
    (ValueError otherwise). The ending of `path` says which format is written: .png, .svg or .pdf. Matplotlib adds
    .png to a path without an ending.
    """
    if not isinstance(offloader, Offloader):
        raise TypeError(f"ebb: plot() got {offloader!r}, and takes an Offloader and a path")
    samples = offloader.timeline()
    if not samples:
        raise ValueError("ebb: plot() found no sample: nothing was saved under the offloader's guard since the last one")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=150)
    FigureCanvasAgg(figure)
    _draw(figure.add_subplot(), samples)
    figure.tight_layout()
    figure.savefig(path)


def _draw(axes: Any, samples: list[_core.TimelineSample]) -> None:
    peak = max(sample.saved_on_device for sample in samples)
    unit, size = ("GiB", 2**30) if peak >= 10 * 2**30 else ("MiB", 2**20)
    times = [sample.ms for sample in samples]
    held = [sample.saved_on_device / size for sample in samples]
    axes.fill_between(times, held, step="post", color="#1f5f8b", alpha=0.25, linewidth=0)
    axes.step(times, held, where="post", color="#1f5f8b", linewidth=1.5, label=f"peak {peak / size:.1f} {unit}")
    begin = None
    for sample in samples:
        if sample.backward and begin is None:
            begin = sample.ms
        elif not sample.backward and begin is not None:
            axes.axvspan(begin, sample.ms, color="black", alpha=0.06, linewidth=0)
            begin = None
    if begin is not None:
        axes.axvspan(begin, times[-1], color="black", alpha=0.06, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ms (backward shaded)")
    axes.set_ylabel(f"saved activations on the device ({unit})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
