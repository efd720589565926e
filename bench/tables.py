"""The tables of README.md and docs/, which are made from the files of bench/results/ alone.

  python -m bench.tables               makes each block from `<!-- table: KIND FILE... -->` to `<!-- end -->` anew
  python -m bench.tables --check       changes nothing, and fails if a block is not what its files say
  python -m bench.tables KIND FILE...  prints that table of any result files

From the repository's root, with any Python. A block's files are relative to bench/results/."""

import json
import re
import statistics
import sys
from pathlib import Path

from bench.peers import results
from bench.programs.rows import PLANNED, best_other, measured

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
BLOCK = re.compile(r"<!-- table: (\S+) (.*?) -->\n.*?<!-- end -->", re.DOTALL)

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
GB = 1e9
NS_PER_US = 1e3
MS_PER_S = 1e3


def load(paths):
    """The rows of all files, but for runs that ran out of memory."""
    rows = []
    for path in paths:
        found = json.loads(Path(path).read_text())
        rows += found if isinstance(found, list) else found.get("rows") or found["benchmarks"]
    return [row for row in rows if row.get("parameters") is None or not row.get("error")]


def pick(rows, **wanted):
    """The one row that has these values."""
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        sys.exit(f"tables: error: {len(found)} rows have {wanted}")
    return found[0]


def gb(bytes_):
    return f"{bytes_ / GB:g} GB"


def percent(fraction):
    return f"{round(100 * fraction, 1) + 0:+.1f} %"  # + 0: not "-0.0 %"


# Steps beside plain autograd's, by `./dev bench peers`, `python` and `plan`.

NAMES = {
    "ebb": "ebb, all moved",
    "ebb_python": "ebb in Python",
    "checkpoint": "checkpoint, every block",
    "torchtune": "torchtune's OffloadActivations",
    "trl": "TRL's OffloadActivations",
}


def name(config):
    base, _, size = config.partition(":")
    moved = ", all moved" if config == "ebb_python" else ""
    return NAMES.get(base, base) + (f", within {size.replace('GB', ' GB')}" if size else moved)


def steps(paths):
    """Per dtype from the most memory to the least. What several files have is as in the first."""
    rows = {}
    for path in paths:
        for row in (row for row in load([path]) if row["peak_bytes"] is not None):
            rows.setdefault((row["dtype"], row["config"]), row)
    groups = list(dict.fromkeys(of for of, _ in rows))
    ordered = sorted(rows.items(), key=lambda item: (groups.index(item[0][0]), -item[1]["peak_bytes"]))
    lines = [
        (
            of,
            name(config),
            f"{row['ms_median']:.1f}",
            percent(row["ratio_of_medians"] - 1),
            f"{row['undrained_after_forward_bytes'] / GB:.2f}",
            f"{row['peak_bytes'] / GB:.2f}",
            row["gradients"],
        )
        for (of, config), row in ordered
    ]
    columns = ("dtype", "configuration", "ms/step", "over none", "after forward GB", "peak GB", "gradients")
    return (columns, lines) if len(groups) > 1 else (columns[1:], [line[1:] for line in lines])


def readme(paths):
    columns, lines = steps(paths)
    wanted = {name(config) for config in ("none", "ebb", "ebb, planned", "checkpoint", "save_on_cpu")}
    keep = [columns.index(column) for column in ("configuration", "ms/step", "peak GB", "gradients")]
    return [columns[i] for i in keep], [[line[i] for i in keep] for line in lines if line[0] in wanted]


def peers(paths):
    return results.COLUMNS, [results.cells(results.Row(**row)) for row in load(paths)]


def goal(config):
    kind, _, value = config.partition(":")
    if kind == "slowdown":
        return f"at most {100 * float(value):g} % more time"
    return value.replace("GB", " GB") or "the least memory"


def plan(paths):
    """Those rows that followed a plan."""

    def line(row):
        moved, recomputed = row["offloaded_bytes"], row["recomputed_bytes"]
        kept = row["planned_bytes"] - moved - recomputed
        return (
            goal(row["config"]),
            f"{row['after_forward_bytes'] / GB:.2f}",
            f"{row['predicted_peak_bytes'] / GB:.2f}, {max(row['peak_bytes'], row['largest_peak_bytes']) / GB:.2f}",
            f"{row['predicted_ms']:.1f}, {row['ms_median']:.1f}",
            percent(row["ms_median"] / row["predicted_ms"] - 1),
            percent(row["overhead"]),
            f"{kept / GB:.1f}, {moved / GB:.1f}, {recomputed / GB:.1f}",
            results.verdict(row["gradients_equal"]),
        )

    columns = ("goal", "after forward GB", "peak GB: predicted, measured", "ms/step: predicted, measured", "off by")
    more = ("over none", "kept, moved, recomputed GB", "gradients")
    return (*columns, *more), [line(row) for row in load(paths) if "predicted_ms" in row]


def commits(paths):
    """W1 by several commits in turn."""
    rows = {}
    for row in load(paths):
        rows.setdefault((row["config"], row["binary"]), []).append(row)
    lines = [
        (
            "moved" if config == "offload" else config.replace("budget:", "within ").replace("GB", " GB"),
            commit,
            ", ".join(f"{row['ms_median']:.1f}" for row in runs),
            ", ".join(f"{row['none_ms_median']:.1f}" for row in runs),
            ", ".join(sorted({f"{row['peak_bytes']:,}" for row in runs})),
        )
        for (config, commit), runs in sorted(rows.items(), key=lambda item: item[0][0])
    ]
    return ("configuration", "commit", "ms/step of each run", "plain autograd beside it", "peak, bytes"), lines


# Whole models, by `./dev bench model` and `python -m bench.peers.training`.

UPDATES = {"backward": "updates in backward", "next_use": "updates at the next use", "step": "updates in step"}
TRAININGS = {
    "ebb": "ebb, updates in backward",
    "ebb_step": "ebb, updates in step",
    "torchao": "torchao's CPUOffloadOptimizer, float32 under autocast",
    "torchao_bfloat16": "torchao's CPUOffloadOptimizer, bfloat16 alone",
    "fsdp2": "FSDP2 with CPUOffloadPolicy",
}


def parameters(row):
    return f"{row['parameters'] / 1e9:.2f} billion"


def tokens(row):
    return f"{row['batch'] * row['sequence']:,}"


def model_of(row):
    """What a run trains, with which others are compared."""
    return row["device"], row["dtype"], row["shape"], row["layers"], row["batch"], row["sequence"]


def configuration(row):
    if row["config"] == "resident":
        return "resident"
    if row["budget_bytes"]:
        parts = [f"a budget of {gb(row['budget_bytes'])}"]
    else:
        parts = [f"managed within {gb(row['managed_bound_bytes'])}"]
    if row["resident_bytes"]:
        parts.append(f"{row['resident_bytes'] / GB:.0f} GB kept on the GPU besides")
    if "states" in row["home"]:
        parts.append(UPDATES[row["update"]] + (" on the CPU" if row["update_on"] == "cpu" else ""))
    else:
        parts.append("gradients and states resident")
    if row["cap_bytes"]:
        parts.append(f"a cap of {gb(row['cap_bytes'])}")
    return ", ".join(parts)


def runs(paths):
    rows = load(paths)
    resident = {model_of(row): row["ms_mean"] for row in rows if row["config"] == "resident"}

    def over(row):
        """With a decimal below ten percent alone: runs on other machines of a kind differ by several percent."""
        if row["config"] == "resident" or model_of(row) not in resident:
            return "–"
        fraction = row["ms_mean"] / resident[model_of(row)] - 1
        return percent(fraction) if abs(fraction) < 0.1 else f"{100 * fraction:+.0f} %"

    lines = [
        (
            parameters(row),
            tokens(row),
            configuration(row),
            f"{row['ms_mean'] / MS_PER_S:.3f}",
            over(row),
            f"{row['peak_bytes'] / GB:.1f}",
            f"{row['taken_bytes'] / GB:.1f}",
            f"{row['pool_bytes'] / GIB:.1f}",
            f"{row['tokens_per_s']:,.0f}",
        )
        for row in rows
    ]
    columns = ("parameters", "tokens a step", "configuration", "s/step", "over resident", "peak GB", "taken GB")
    return (*columns, "host GiB", "tokens/s"), lines


def budget(row):
    """In bytes; 0 where all is on the device."""
    return row["budget_bytes"] if row["config"] == "managed" else 0


def budgets(paths):
    """Shapes and batches, by what the runs may take: the budgets, or no bound."""
    rows = [row for row in load(paths) if row["config"] == "resident" or row["budget_bytes"]]
    cells = {(model_of(row), budget(row)): row for row in rows}
    bounds = sorted({bytes_ for _, bytes_ in cells if bytes_}, reverse=True)
    models = sorted({model_of(row): row for row in rows}.values(), key=lambda row: (row["parameters"], row["batch"]))

    def cell(row):
        if row is None:
            return "–"
        missed = "" if row["config"] == "resident" or row["plan"]["fits"] else " (the plan does not fit)"
        return f"{row['ms_mean'] / MS_PER_S:.3f}, {row['peak_bytes'] / GB:.1f}, {row['tokens_per_s']:,.0f}{missed}"

    lines = [
        (parameters(row), tokens(row), *(cell(cells.get((model_of(row), bytes_))) for bytes_ in (0, *bounds)))
        for row in models
    ]
    return ("parameters", "tokens a step", "resident", *(f"ebb within {gb(bytes_)}" for bytes_ in bounds)), lines


def plans(paths):
    """What plans have predicted, and what was measured."""

    def line(row):
        plan = row["plan"]
        count = len(row["losses"]) - len(row["warm_up_ms"])
        counted = (row["prefetched_bytes"] + row["fetched_late_bytes"]) / count
        holds_all = plan["managed_bytes"] >= row["managed_bytes"]
        return (
            gb(row["budget_bytes"]),
            parameters(row),
            tokens(row),
            "all" if holds_all else f"{plan['managed_bytes'] / GB:.2f} GB",
            f"{plan['predicted_ms']:,.0f}",
            f"{row['ms_mean']:,.0f}",
            percent(row["ms_mean"] / plan["predicted_ms"] - 1),
            f"{row['peak_bytes'] / GB:.2f}",
            f"{plan['managed_in_bytes'] / GB:.1f}, {counted / GB:.1f}",
        )

    columns = ("budget", "parameters", "tokens a step", "bound of managed storages", "predicted ms", "measured ms")
    more = ("off by", "peak GB", "to the device in a step, GB: predicted, counted")
    return (*columns, *more), [line(row) for row in load(paths) if row.get("plan") and row["plan"]["fits"]]


def training(paths):
    lines = [
        (
            TRAININGS.get(row["config"], row["config"]),
            f"{row['s_per_step']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['peak_bytes'] / GB:.2f}",
            f"{row['reserved_bytes'] / GB:.2f}",
            f"{row['host_bytes'] / GB:.1f}",
            f"{row['losses'][-1]:.3f}",
        )
        for row in load(paths)
    ]
    return ("configuration", "s/step", "tokens/s", "peak GB", "taken GB", "host GB", "last loss"), lines


# What fits, and what others have published.


def fits(paths):
    names = {"layers": "layers (batch 8)", "batch": "batch (9 layers)", "sequence": "sequence (9 layers, batch 1)"}
    rows = load(paths)
    found = {(row["cap_bytes"], row["dimension"], row["config"]): row for row in rows}
    configs = list(dict.fromkeys(row["config"] for row in rows))

    def cell(row):
        return f"{row['largest']} ({row['step_ms']:.0f} ms)" if row and row["largest"] > 0 else "–"

    lines = [
        (f"{cap / GB:.0f} GB", names[dimension], *(cell(found.get((cap, dimension, config))) for config in configs))
        for cap, dimension in dict.fromkeys((row["cap_bytes"], row["dimension"]) for row in rows)
    ]
    return ("at most", "largest", *configs), lines


def size(number):
    return f"{number / GB:.2f} GB" if number >= 1e8 else f"{number / MIB:.2f} MiB"


def published(paths):
    lines = [
        (
            row["case"],
            row["config"],
            f"{row['ms_median']:.1f}",
            percent(row["overhead"]),
            size(row["after_forward_bytes"]),
            size(row["peak_bytes"]),
            results.verdict(row["gradients_equal"]),
        )
        for row in load(paths)
        if "overhead" in row
    ]
    return ("model", "configuration", "ms/step", "over none", "after forward", "peak", "gradients"), lines


def published_paths(paths):
    lines = [
        (
            row["case"],
            row["config"],
            str(row["n"]),
            size(row["peak_over_start_bytes"]),
            results.verdict(row["gradients_equal"]),
        )
        for row in load(paths)
        if "n" in row
    ]
    return ("paths", "configuration", "how many", "peak over the start of backward", "gradients"), lines


# What the machine can do.


def limits(paths):
    """Of link.json, pin.json and the program `step`."""
    rows = load(paths)

    def rates(copy_bytes, both_directions, *keys, **wanted):
        wanted |= {"copy_bytes": copy_bytes, "both_directions": both_directions}
        of = [pick(rows, direction=direction, **wanted) for direction in ("device_to_host", "host_to_device")]
        return [[row[key] for row in of] for key in keys]

    def both(values, digits):
        return " and ".join(f"{value:.{digits}f}" for value in values)

    def link_line(what, copy_bytes, both_directions):
        keys = ("gb_per_s_median", "raw_gb_per_s_median", "over_raw_median")
        ebb, raw, ratio = rates(copy_bytes, both_directions, *keys, measure="pinned_tier")
        return what, f"{both(raw, 1)} GB/s", f"{both(ebb, 1)} GB/s, {both(ratio, 2)} times as fast"

    def step_line(what, moved, gb_per_s, ms):
        least = moved / gb_per_s / 1e6
        times = f"{ms:.1f} ms, {ms / least:.3f} times as long"
        return f"bfloat16 step, {what}: {moved / GB:.2f} GB", f"{least:.1f} ms", times

    def pinned(method):
        slabs = (64 * MIB, 256 * MIB)
        of = [pick(rows, measure="pin", method=method, slab_bytes=each)["gib_per_s_median"] for each in slabs]
        return f"{both(of, 1)} GiB/s"

    step = pick(rows, config="offload")
    ((out, back),) = rates(64 * MIB, False, "gb_per_s_median", measure="link", memory="pinned")
    forward = step["forward_ms_median"]
    lines = [
        link_line("copies of 64 MiB, one direction at a time: out and in", 64 * MIB, False),
        link_line("copies of 64 MiB, both at once: out and in", 64 * MIB, True),
        link_line("copies of 64 KiB, one direction at a time: out and in", 64 * KIB, False),
        step_line("forward", step["offloaded_bytes"], out, forward),
        step_line("backward", step["fetched_bytes"], back, step["ms_median"] - forward),
        (
            "page-locked memory, in slabs of 64 and 256 MiB",
            f"{pinned('cudaHostAlloc')} by cudaHostAlloc",
            pinned("host_slabs"),
        ),
    ]
    return ("what", "the machine, or the usual way", "ebb"), lines


def overhead(paths):
    """The rows of `./dev bench overhead` by the names that --benchmark_filter takes, in microseconds."""
    us = {}  # by the row and what is measured, then by how many are alive, or the bytes of a copy
    for row in load(paths):
        base, argument, *_ = [*re.sub(r"/(iterations:\d+|manual_time|repeats:\d+)", "", row["run_name"]).split("/"), ""]
        for key, ns in row.items():
            if key.startswith("ns_per_"):
                what = f"{base.removesuffix('_cold')}: {key.removeprefix('ns_per_')}".removesuffix(": save")
                column = f"{int(argument):,}" if argument else "–"
                us.setdefault(what, {})[f"{column}, cold" if base.endswith("_cold") else column] = ns / NS_PER_US
    columns = list(dict.fromkeys(column for each in us.values() for column in each))
    lines = [
        (what, *(f"{each[column]:.2f}" if column in each else "" for column in columns)) for what, each in us.items()
    ]
    return ("us", *columns), lines


def overhead_commits(paths):
    """The medians of several runs, in microseconds."""
    parts = ("save", "unpack", "end")
    ns = {}
    for row in load(paths):
        base, part = row["name"].rsplit("_", 1)
        value = next(value for key, value in row.items() if key.startswith("ns_per_"))
        ns.setdefault((base, row["binary"]), {}).setdefault(part, []).append(value)
    lines = [
        (base, commit, *(f"{statistics.median(each[part]) / NS_PER_US:.2f}" for part in parts))
        for (base, commit), each in sorted(ns.items(), key=lambda item: item[0][0])
    ]
    return ("row", "commit", *(f"{part} us" for part in parts)), lines


def disk(paths):
    """ebb's rate over that of the better of io_uring and threads without ebb."""
    lines, sizes = [], []
    for path in paths:
        rows = [row for row in load([path]) if row.get("method") == "disk_tier"]
        sizes = sorted({row["block_bytes"] for row in rows})
        for direction, in_flight in dict.fromkeys((row["direction"], row["in_flight"]) for row in rows):
            of = (pick(rows, direction=direction, in_flight=in_flight, block_bytes=each) for each in sizes)
            file = f"`{Path(path).parent.name}/{Path(path).name}`"
            lines.append((file, direction, str(in_flight), *(f"{row['over_raw_median']:.2f}" for row in of)))
    names = (f"{each // MIB} MiB" if each >= MIB else f"{each // KIB} KiB" for each in sizes)
    return ("file", "direction", "copies in flight", *names), lines


def programs(paths):
    """Each plan beside the fastest of what one can do by hand in as much memory."""

    def line(row, rows):
        best = best_other(row, rows)
        beside = ("none", "-") if best is None else (
            f"{best['config']}: {best['ms_median']:.1f} ms, {best['peak_bytes'] / GB:.2f} GB",
            percent(row["ms_median"] / best["ms_median"] - 1),
        )
        return (
            row["program"] + row["config"].removeprefix(PLANNED),
            f"{row['budget_bytes'] / GB:.2f} GB",
            f"{row['ms_median']:.1f}",
            f"{row['peak_bytes'] / GB:.2f}",
            *beside,
            row["gradients"],
        )

    all_rows = measured(load(paths))
    lines = [
        line(row, [each for each in all_rows if each["program"] == row["program"]])
        for row in all_rows
        if row["budget_bytes"] is not None
    ]
    return ("program", "budget", "ms/step", "peak GB", "the fastest by hand in as much", "over it", "gradients"), lines


TABLES = {
    of.__name__: of
    for of in (steps, readme, peers, plan, commits, runs, budgets, plans, training, fits, published, published_paths)
    + (limits, overhead, overhead_commits, disk, programs)
}


def table(kind, paths):
    if kind not in TABLES:
        sys.exit(f"tables: error: no table {kind}; there are {', '.join(TABLES)}")
    columns, lines = TABLES[kind](paths)
    head, *rows = (f"| {' | '.join(line)} |" for line in (columns, *lines))
    return "\n".join((head, "|" + "---|" * len(columns), *rows))


def made_anew(text):
    def block(found):
        kind, files = found.groups()
        made = table(kind, [RESULTS / file for file in files.split()])
        return f"<!-- table: {kind} {files} -->\n{made}\n<!-- end -->"

    made, blocks = BLOCK.subn(block, text)
    if blocks != text.count("<!-- table:") or blocks != text.count("<!-- end -->"):
        sys.exit("tables: error: a block does not begin with its table's name and files, or does not end")
    return made


def main():
    match sys.argv[1:]:
        case [] | ["--check"] as arguments:
            documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
            stale = [path for path in documents if made_anew(path.read_text()) != path.read_text()]
            for path in stale if not arguments else []:
                path.write_text(made_anew(path.read_text()))
            if stale and arguments:
                sys.exit(f"tables: {', '.join(path.name for path in stale)}: run python -m bench.tables")
        case [kind, *paths] if paths:
            print(table(kind, paths))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
