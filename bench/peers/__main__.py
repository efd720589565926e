"""Question: what does a training step cost in time, what does the GPU hold, and are its gradients right, with ebb and
with what a user would pick instead, for one model with the same weights and tokens, in eager mode?

From the repository's root: python -m bench.peers --out peers.json. third_party/peers-requirements.txt has the packages;
one that is missing costs its row only.

Steps of plain autograd and of a configuration alternate in one process, so that drift of the machine's clocks meets
both alike; beside ebb, plain autograd is in C++ too. Times are the host's, between device synchronisations, in default
mode. "Over none" is the ratio of medians, and none over none is the noise. "After forward" is what the GPU holds right
after the head's linear, logits included, when it has nothing left to do; sources that a package keeps for longer are in
it. ebb lets go of what has been copied at its next call; "copies awaited" is what is held after such a call.
The norm is over all gradients of a step in default mode, and "off by" is relative to plain autograd's in Python. Bit by
bit, gradients are compared in deterministic mode, because plain autograd on a GPU does not agree with itself otherwise.
The output head and the loss are outside of what offloads.

"ebb_python" is ebb's Python package; what begins with "ebb," is C++.

"ebb, planned" is within a byte budget: the least peak of the packages measured before it. "ebb, within" has a budget
that was given, "checkpoint K of N" checkpoints the first blocks, no more of them than the memory that was given asks
for. "checkpoint_cheap" keeps what matmuls and attention give, "checkpoint_all_but_attention" the latter only, and
"checkpoint_torchtitan" attention and every second matmul, as torchtitan's selective checkpointing does.

"float32" multiplies matrices in full precision, which is LibTorch's default and keeps the tensor cores out of it; "tf32"
is float32 with set_float32_matmul_precision("high"): they read ten bits of each mantissa, and compute is much faster.

Each measurement has a process of its own, so that nothing of one, pinned memory included, is left for the next. The
exit status is 1 if ebb could not be measured, or if its gradients are not plain autograd's."""

import sys
from dataclasses import asdict, replace

from . import measure
from .configurations import CHECKPOINT_SOME
from .cpp import measure_cpp, measure_planned
from .options import CHECKPOINT_WITHIN, EBB, PLANNED, PLANNED_WITHIN, Options, parse_bytes, parse_options
from .process import NotMeasured, in_new_process
from .results import GB, NOT_CHECKED, Results, Row, verdict

# Sums without a fixed order move the norm by far less, a wrong gradient by more.
NORM_TOLERANCE = 1e-3


def measure_python(options: Options, dtype: str, config: str, name: str | None = None) -> Row:
    """`name`: the row's, if it is another."""
    name = name or config
    try:
        row = Row(name, dtype, **in_new_process(measure.measure, options, dtype, config))
    except NotMeasured as reason:
        return Row(name, dtype, error=str(reason))
    if not options.check:
        return row
    try:
        return replace(row, gradients=verdict(in_new_process(measure.gradients_equal, options, dtype, config)))
    except NotMeasured as reason:
        return replace(row, gradients=str(reason))


def measure_checkpoint_within(options: Options, dtype: str, budget: int) -> Row:
    within = f"within {budget / GB:g} GB"
    try:
        blocks = in_new_process(measure.blocks_to_checkpoint, options, dtype, budget)
    except NotMeasured as reason:
        return Row(f"checkpoint {within}", dtype, error=str(reason))
    name = f"checkpoint {blocks} of {options.chosen_shape().layers}, {within}"
    return measure_python(options, dtype, f"{CHECKPOINT_SOME}{blocks}", name)


def is_wrong(row: Row) -> bool:
    # False for a norm that is no number.
    is_near = (row.norm_difference or 0) <= NORM_TOLERANCE
    return row.error is not None or row.gradients not in (verdict(True), NOT_CHECKED) or not is_near


def peer_peaks(rows: list[Row], dtype: str) -> list[int]:
    """Of what is not ebb's."""
    others = (row for row in rows if row.dtype == dtype and not row.config.startswith((EBB, "none")))
    return [row.peak_bytes for row in others if row.peak_bytes is not None]


def main() -> int:
    options = parse_options(__doc__)
    try:
        machine = in_new_process(measure.describe_machine, options)
    except NotMeasured as reason:
        sys.exit(f"peers: error: {options.device}: {reason}")
    about = {
        "machine": machine,
        "shape": {"name": options.shape, **asdict(options.chosen_shape())},
        "pairs": options.pairs,
        "warm_up": options.warm_up,
    }
    results = Results(options.out, about)
    for dtype in options.dtypes:
        none_norm: float | None = None
        for config in options.configs:
            if config == EBB:
                rows = measure_cpp(options, dtype, none_norm)
            elif config == PLANNED or config.startswith(PLANNED_WITHIN):
                budget = None if config == PLANNED else parse_bytes(config.removeprefix(PLANNED_WITHIN))
                rows = measure_planned(options, dtype, none_norm, budget, peer_peaks(results.rows, dtype))
            elif config.startswith(CHECKPOINT_WITHIN):
                rows = [measure_checkpoint_within(options, dtype, parse_bytes(config.removeprefix(CHECKPOINT_WITHIN)))]
            else:
                rows = [measure_python(options, dtype, config)]
                none_norm = rows[0].none_gradient_norm or none_norm
            for row in rows:
                results.add(row)
    wrong = [row for row in results.rows if row.config.startswith(EBB) and is_wrong(row)]
    for row in wrong:
        print(f"peers: error: {row.config} in {row.dtype}: {row.error or 'its gradients are wrong'}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
