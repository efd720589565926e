"""Prints README's table of what the machine can do and what ebb reaches of it, from the files of one folder:
python bench/limits.py bench/results/h200

link.json, pin.json and overhead.json are of the programs with these names, w1_bfloat16.json of `step`."""

import json
import sys
from pathlib import Path

KIB = 1 << 10
MIB = 1 << 20
NS_PER_US = 1e3


def pick(rows, **wanted):
    """The one row that has these values."""
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        sys.exit(f"limits: error: {len(found)} rows have {wanted}")
    return found[0]


def each_way(rows, copy_bytes, both_directions):
    for direction in ("device_to_host", "host_to_device"):
        row = pick(
            rows, measure="pinned_tier", direction=direction, copy_bytes=copy_bytes, both_directions=both_directions
        )
        yield row["gb_per_s_median"], row["raw_gb_per_s_median"], row["over_raw_median"]


def link_line(rows, what, copy_bytes, both_directions):
    ebb, raw, ratio = zip(*each_way(rows, copy_bytes, both_directions))

    def both(values, digits):
        return " and ".join(f"{value:.{digits}f}" for value in values)

    return what, f"{both(raw, 1)} GB/s", f"{both(ebb, 1)} GB/s, {both(ratio, 2)} times as fast"


def step_lines(step, rows):
    rate = {
        direction: pick(
            rows, measure="link", memory="pinned", direction=direction, copy_bytes=64 * MIB, both_directions=False
        )["gb_per_s_median"]
        for direction in ("device_to_host", "host_to_device")
    }
    forward = step["forward_ms_median"]
    parts = (
        ("forward", step["offloaded_bytes"], rate["device_to_host"], forward),
        ("backward", step["fetched_bytes"], rate["host_to_device"], step["ms_median"] - forward),
    )
    for name, moved, gb_per_s, ms in parts:
        least = moved / gb_per_s / 1e6
        yield (
            f"bfloat16 step, {name}: {moved / 1e9:.2f} GB",
            f"{least:.1f} ms",
            f"{ms:.1f} ms, {ms / least:.3f} times as long",
        )


def pin_line(rows):
    def rate(method, slab_bytes):
        return pick(rows, measure="pin", method=method, slab_bytes=slab_bytes)["gib_per_s_median"]

    sizes = (64 * MIB, 256 * MIB)
    return (
        "page-locked memory, in slabs of 64 and 256 MiB",
        " and ".join(f"{rate('cudaHostAlloc', size):.1f}" for size in sizes) + " GiB/s by cudaHostAlloc",
        " and ".join(f"{rate('host_slabs', size):.1f}" for size in sizes) + " GiB/s",
    )


def overhead_lines(rows):
    ns = {row["name"].split("/iterations")[0].split("/manual_time")[0]: row["ns_per_save"] for row in rows}
    parts = (
        ("passed through: a parameter", "parameter_save", "plain_parameter_save"),
        ("passed through: a small tensor", "small_save", "idle_hook_save"),
        ("moved", "offloaded_save", "plain_save"),
        ("restored", "offloaded_unpack", "plain_unpack"),
    )

    def times(name):
        alive = ", ".join(f"{ns[f'{name}/{count}'] / NS_PER_US:.2f}" for count in (100, 10_000, 1_000_000))
        return f"{alive}; {ns[f'{name}_cold/100'] / NS_PER_US:.2f} us"

    for name, ours, plain in parts:
        yield (
            f"host time of a save {name}, with 100, 10,000 and 1,000,000 alive; 100 out of cold caches",
            f"{times(plain)} by {'a hook that only keeps it' if plain.startswith('idle') else 'plain autograd'}",
            times(ours),
        )


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])

    def load(name):
        return json.loads((folder / name).read_text())

    link = load("link.json")
    step = pick(load("w1_bfloat16.json"), config="offload")
    lines = [
        link_line(link, "copies of 64 MiB, one direction at a time: out and in", 64 * MIB, False),
        link_line(link, "copies of 64 MiB, both at once: out and in", 64 * MIB, True),
        link_line(link, "copies of 64 KiB, one direction at a time: out and in", 64 * KIB, False),
        *step_lines(step, link),
        pin_line(load("pin.json")),
        *overhead_lines(load("overhead.json")["benchmarks"]),
    ]
    print("| what | the machine, or the usual way | ebb |")
    print("|---|---|---|")
    for line in lines:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
