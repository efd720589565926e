"""ebb moves what autograd saves out of device memory, and has it back before backward needs it.

    import ebb

    offloader = ebb.Offloader(device_budget="24GB")    # before the loop
    for batch in loader:
        with offloader:                                # what autograd saves from here on may leave the device
            hidden = body(batch.x)
            with ebb.no_offload():                     # what backward wants at once stays
                loss = loss_fn(head(hidden), batch.y)
        loss.backward()

or, without touching the loop, `offloader = ebb.wrap(model, device_budget="24GB")`. Gradients are those of plain
autograd, bit for bit. On a GPU, saves go to pinned host memory; without one, to a file.

    Offloader      owns the memory, the policy and the statistics; `with offloader:` is a guard
    no_offload     a guard inside of which saves stay
    wrap           guards each forward pass of a model
    unwrap         ends that
    checkpoint     saves a function's inputs only, and runs the function again in backward
    recomputable   lets a plan do so, where it does not see what a function does
    AdamW          an optimizer whose states live where their parameters do, as are Adam and SGD
    save           writes a checkpoint one tensor at a time
    policies       what leaves the device; or any function of a Candidate
    plot           draws what an offloader has held on the device
"""

import torch as _torch  # noqa: F401  (loads LibTorch, which the extension module needs)

from ebb import policies
from ebb._backward import wrap_backward as _wrap_backward
from ebb._checkpoint import checkpoint, recomputable
from ebb._core import Candidate, Count, Decision, EndOfRegion, Level, PlanReport, Policy, Prediction, Recompute
from ebb._core import Stats, StepCost, TimelineSample
from ebb._higher_order import let_higher_order_operators_pass as _let_higher_order_operators_pass
from ebb._managed import let_legacy_methods_pass as _let_legacy_methods_pass
from ebb._managed import refuse_to_share_memory as _refuse_to_share_memory
from ebb._mutation import wrap_mutation as _wrap_mutation
from ebb._offloader import Offloader, no_offload
from ebb._optimizer import SGD, Adam, AdamW, Optimizer
from ebb._plot import plot
from ebb._profiler import wrap_profiler as _wrap_profiler
from ebb._save import save
from ebb._state_dict import wrap_state_dicts as _wrap_state_dicts
from ebb._wrap import unwrap, wrap

_wrap_backward()
_wrap_profiler()
_wrap_mutation()
_let_higher_order_operators_pass()
_let_legacy_methods_pass()
_refuse_to_share_memory()
_wrap_state_dicts()

__version__ = "0.1.0"
__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Candidate",
    "Count",
    "Decision",
    "EndOfRegion",
    "Level",
    "Offloader",
    "Optimizer",
    "PlanReport",
    "Policy",
    "Prediction",
    "Recompute",
    "Stats",
    "StepCost",
    "TimelineSample",
    "checkpoint",
    "no_offload",
    "plot",
    "policies",
    "recomputable",
    "save",
    "unwrap",
    "wrap",
]
