"""Prints the tables of docs/benchmarks.md from result files:

  python bench/tables.py limits FOLDER      what the machine can do and what ebb reaches of it: link.json, pin.json and
                                            overhead.json are of the programs with these names, w1_bfloat16.json of step
  python bench/tables.py plan FILE          what `./dev bench plan` measured
  python bench/tables.py fits FILE          what `./dev bench fits` found
  python bench/tables.py published FILE     what `./dev bench published` measured
"""

import json
import sys
from pathlib import Path

KIB = 1 << 10
MIB = 1 << 20
GB = 1e9
NS_PER_US = 1e3


def load(path):
    return json.loads(Path(path).read_text())


def print_table(columns, lines):
    print(f"| {' | '.join(columns)} |")
    print("|" + "---|" * len(columns))
    for line in lines:
        print(f"| {' | '.join(line)} |")


def pick(rows, **wanted):
    """The one row that has these values."""
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        sys.exit(f"tables: error: {len(found)} rows have {wanted}")
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
            f"bfloat16 step, {name}: {moved / GB:.2f} GB",
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


def overhead_ns(rows, what=("ns_per_save", "ns_per_copy")):
    """Nanoseconds by the rows' names; of rows that were repeated, the medians."""
    found = {}
    for row in rows:
        aggregate = row.get("aggregate_name")
        ns = next((row[key] for key in what if key in row), None)
        if ns is not None and aggregate in (None, "median"):
            name = row["run_name"].split("/iterations")[0].split("/repeats")[0].split("/manual_time")[0]
            if aggregate or name not in found:
                found[name] = ns
    return found


def times(ns, name, alive):
    """None where the machine had no such rows."""
    names = [f"{name}/{count}" for count in alive]
    if any(each not in ns for each in names):
        return None
    return ", ".join(f"{ns[each] / NS_PER_US:.2f}" for each in names) + f"; {ns[f'{name}_cold/100'] / NS_PER_US:.2f} us"


def overhead_lines(ns):
    many, few = (100, 10_000, 1_000_000), (100,)
    parts = (
        ("passed through: a parameter", "parameter_save", "idle_default_hook_parameter_save", many),
        ("passed through: a small tensor", "small_save", "idle_default_hook_save", many),
        ("moved, over a tier that does nothing", "null_tier_save", "plain_save", many),
        ("restored, over a tier that does nothing", "null_tier_unpack", "plain_unpack", many),
        ("of 16 B moved to pinned memory", "pinned_tier_16B_save", "plain_save", few),
        ("of 16 B restored from there", "pinned_tier_16B_unpack", "plain_unpack", few),
        ("of 1 MiB moved to pinned memory", "pinned_tier_1MiB_save", "plain_save", few),
        ("of 1 MiB restored from there", "pinned_tier_1MiB_unpack", "plain_unpack", few),
    )
    alive = {many: "100, 10,000 and 1,000,000", few: "100"}
    for what, ours, other, counts in parts:
        if (with_ebb := times(ns, ours, counts)) and (without := times(ns, other, counts)):
            yield (
                f"host time of a save {what}, with {alive[counts]} alive; 100 out of cold caches",
                f"{without} by {'a default hook that only keeps it' if 'idle' in other else 'plain autograd'}",
                with_ebb,
            )


def copy_line(ns):
    names = [f"{name}/{size}" for name in ("raw_copy", "pinned_tier_copy") for size in (16, MIB)]
    if all(name in ns for name in names):
        small, large, ours_small, ours_large = (f"{ns[name] / NS_PER_US:.2f}" for name in names)
        yield (
            "host time of a copy out, of 16 B and 1 MiB, without saves",
            f"{small} and {large} us by CUDA's calls",
            f"{ours_small} and {ours_large} us by the tier",
        )


def live_graphs_lines(rows):
    graphs = (0, 1_000, 100_000)
    for what in ("save", "unpack", "step"):
        ns = overhead_ns(rows, (f"ns_per_{what}",))
        names = [[f"live_graphs_{with_}/{count}" for count in graphs] for with_ in ("plain", "null_tier")]
        if all(each in ns for row in names for each in row):
            plain, ours = (", ".join(f"{ns[each] / NS_PER_US:.2f}" for each in row) for row in names)
            yield (
                f"host time of a {'tiny step' if what == 'step' else what} beside 0, 1,000 and 100,000 live graphs",
                f"{plain} us by plain autograd",
                f"{ours} us",
            )


def no_room_line(ns):
    names = [f"no_room_{why}" for why in ("capacity_pinned_tier", "system_pinned_tier", "file_limit_disk_tier")]
    if all(name in ns for name in ("kept_by_policy_pinned_tier", *names)):
        yield (
            "host time of a save that finds no room: capacity, pinned memory, spill file",
            f"{ns['kept_by_policy_pinned_tier'] / NS_PER_US:.2f} us if the policy keeps it",
            ", ".join(f"{ns[name] / NS_PER_US:.2f}" for name in names) + " us",
        )


def print_limits(folder):
    folder = Path(folder)
    link = load(folder / "link.json")
    overhead_rows = load(folder / "overhead.json")["benchmarks"]
    overhead = overhead_ns(overhead_rows)
    step = pick(load(folder / "w1_bfloat16.json"), config="offload")
    lines = (
        link_line(link, "copies of 64 MiB, one direction at a time: out and in", 64 * MIB, False),
        link_line(link, "copies of 64 MiB, both at once: out and in", 64 * MIB, True),
        link_line(link, "copies of 64 KiB, one direction at a time: out and in", 64 * KIB, False),
        *step_lines(step, link),
        pin_line(load(folder / "pin.json")),
        *overhead_lines(overhead),
        *copy_line(overhead),
        *live_graphs_lines(overhead_rows),
        *no_room_line(overhead),
    )
    print_table(("what", "the machine, or the usual way", "ebb"), lines)


def verdict(equal):
    return {True: "equal", False: "DIFFERENT", None: "not compared"}[equal]


def plan_line(row):
    moved, recomputed = row["offloaded_bytes"], row["recomputed_bytes"]
    kept = row["planned_bytes"] - moved - recomputed
    return (
        row["dtype"],
        f"{row['budget_bytes'] / GB:.2f}",
        f"{row['after_forward_bytes'] / GB:.2f}",
        f"{max(row['peak_bytes'], row['largest_peak_bytes']) / GB:.2f}",
        f"{row['ms_median']:.1f}",
        f"{100 * row['overhead']:+.1f} %",
        f"{row['predicted_ms']:.1f} ms",
        f"{kept / GB:.1f}, {moved / GB:.1f}, {recomputed / GB:.1f}",
        verdict(row["gradients_equal"]),
    )


def print_plan(path):
    rows = [row for row in load(path) if "predicted_ms" in row]
    if not rows:
        sys.exit(f"tables: error: no row of {path} followed a plan")
    columns = (
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
    print_table(columns, map(plan_line, rows))


def print_fits(path):
    names = {"layers": "layers (batch 8)", "batch": "batch (9 layers)", "sequence": "sequence (9 layers, batch 1)"}
    rows = load(path)
    found = {(row["cap_bytes"], row["dimension"], row["config"]): row for row in rows}
    configs = list(dict.fromkeys(row["config"] for row in rows))

    def cell(row):
        if row is None:
            return ""
        return f"{row['largest']} ({row['step_ms']:.0f} ms)" if row["largest"] > 0 else "-"

    lines = (
        (f"{cap / GB:.0f} GB", names[dimension], *(cell(found.get((cap, dimension, config))) for config in configs))
        for cap, dimension in dict.fromkeys((row["cap_bytes"], row["dimension"]) for row in rows)
    )
    print_table(("at most", "largest", *configs), lines)


def size(number):
    return f"{number / GB:.2f} GB" if number >= 1e8 else f"{number / MIB:.2f} MiB"


def model_line(row):
    return (
        row["case"],
        row["config"],
        f"{row['ms_median']:.1f}",
        f"{100 * row['overhead']:+.1f} %",
        size(row["after_forward_bytes"]),
        size(row["peak_bytes"]),
        verdict(row["gradients_equal"]),
    )


def paths_line(row):
    over = f"{row['peak_over_start_bytes'] / MIB:.2f} MiB"
    return row["case"], row["config"], str(row["n"]), over, verdict(row["gradients_equal"])


def print_published(path):
    rows = load(path)
    columns = ("model", "configuration", "ms/step", "over none", "after forward", "peak", "gradients")
    print_table(columns, (model_line(row) for row in rows if "overhead" in row))
    print()
    columns = ("paths", "configuration", "how many", "peak over the start of backward", "gradients")
    print_table(columns, (paths_line(row) for row in rows if "n" in row))


TABLES = {"limits": print_limits, "plan": print_plan, "fits": print_fits, "published": print_published}


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in TABLES:
        sys.exit(__doc__)
    TABLES[sys.argv[1]](sys.argv[2])


if __name__ == "__main__":
    main()
