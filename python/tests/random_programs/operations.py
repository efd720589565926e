"""What a line may be: {0} and {1} are operands, e and f vectors that require gradients, m has modules with buffers."""

import dataclasses

from random_programs.program import SIZE


@dataclasses.dataclass(frozen=True)
class Operation:
    text: str
    operands: int
    writes: bool = False


# Values stay near one, so that a wrong gradient is not hidden by an infinite one.
ONE = [
    "{0}.sin()",
    "{0}.cos()",
    "{0}.tanh()",
    "{0}.sigmoid()",
    "{0}.tanh().exp()",
    "{0}.square().sin()",
    "{0}.abs().add(1).sqrt()",
    "{0}.abs().add(1).log()",
    "1 / ({0} * {0} + 1)",
    "{0} * 2",
    "{0} + 1",
    "-{0}",
    "{0}.clamp(-1, 1)",
    "F.silu({0})",
    "F.silu({0} + 1)",
    "run.rounded(F.silu, {0})",
    "F.gelu({0})",
    'F.gelu({0}, approximate="tanh")',
    "F.relu({0})",
    "F.leaky_relu({0}, 0.1)",
    "F.elu({0})",
    "F.hardswish({0})",
    "F.softplus({0})",
    "F.glu(torch.cat([{0}, {0}.sin()], 1))",
    "F.softmax({0}, -1)",
    "F.log_softmax({0}, 0)",
    "F.layer_norm({0}, {0}.shape[1:], run.e, run.f)",
    "F.layer_norm({0}, {0}.shape[1:])",
    "F.rms_norm({0}, {0}.shape[1:], run.e)",
    "F.rms_norm({0}, {0}.shape[1:])",
    "F.group_norm({0}, 2, run.e, run.f)",
    "run.norm({0})",
    "run.last_norm({0})",
    "F.dropout({0}, 0.3)",
    "F.alpha_dropout({0}, 0.2, True)",
    "F.rrelu({0}, training=True)",
    "F.linear({0}, run.w, run.e)",
    "F.linear({0}, run.w)",
    "F.normalize({0}, dim=1)",
    "{0}.t()",
    "{0}.t().contiguous()",
    "{0}.reshape(-1).view({0}.shape)",
    "{0}.roll(1, 0)",
    "{0}[::2].repeat(2, 1)",
    "torch.cat({0}.chunk(2), 1).reshape({0}.shape)",
    "torch.stack({0}.unbind(1))",
    "{0}[run.index]",
    "{0}.index_select(1, run.index)",
    "F.embedding(run.index, {0})",
    "{0}.sum(0) + {0}",
    "{0}.mean(-1, keepdim=True) * {0}",
    "{0}.max(-1, keepdim=True).values + {0}",
    "{0}.cumsum(0) * 0.1",
    "{0}.std(0) * {0}",
    "{0}.detach()",
    "{0}.bfloat16().float()",
    "{0}.double().sin().float()",
    "Scaled.apply({0})",
    "SavesOutput.apply({0})",
    "SavesView.apply({0})",
    "RunsBackward.apply({0})",
]
TWO = [
    "{0} * {1}",
    "{0} + {1}",
    "{0} - {1}",
    "{0} / ({1} * {1} + 1.5)",
    "{0} / ({1}.abs() + 3)",
    "{0} @ {1} * 0.3",
    "{0} @ {1}.t() * 0.3",
    "run.rounded(torch.mul, {0}, {1})",
    "run.rounded(torch.mm, {0}, {1}) * 0.3",
    "torch.addmm({0}, {1}, run.w) * 0.5",
    "torch.where({0} > 0, {0}, {1})",
    "torch.maximum({0}, {1})",
    "torch.lerp({0}, {1}, 0.3)",
    "torch.hypot({0}, {1} + 2)",
    "torch.atan2({0}, {1}.square() + 1)",
    "F.silu({0}) * {1}",
    "F.linear({0}, {1}, run.e) * 0.5",
    "F.scaled_dot_product_attention({0}[None, None], {1}[None, None], {0}[None, None])[0, 0]",
    "F.softmax({0} @ {1}.t(), -1) @ {1}",
    "torch.bmm({0}[None], {1}[None])[0] * 0.3",
    "F.bilinear({0}, {1}, run.cube, run.e) * 0.1",
    "SavesTwo.apply({0}, {1})",
]
IN_PLACE = [
    Operation("{0}.mul_(0.5)", 1, True),
    Operation("{0}.add_(1)", 1, True),
    Operation("{0}.tanh_()", 1, True),
    Operation("F.silu({0}, inplace=True)", 1, True),
    Operation("F.relu({0}, inplace=True)", 1, True),
    Operation("{0}.add_({1})", 2, True),
    Operation("{0}.mul_({1})", 2, True),
    Operation("run.write_row({0}, {1})", 2, True),
]
OPERATIONS = [Operation(each, 1) for each in ONE] + [Operation(each, 2) for each in TWO] * 2

# Blocks whose {0} is a name under which calls are counted, and {1} a small number.
FOREIGN_HOOKS = [
    'run.counting("{0}")',
    'run.counting("{0}")',
    'run.once("{0}")',
    'run.once("{0}")',
    'run.converting("{0}")',
    'run.rounding("{0}")',
    'run.computing("{0}")',
    "save_on_cpu()",
    'run.refusing_pack("{0}", {1})',
    'run.refusing_unpack("{0}", {1})',
    'run.stopping_unpack("{0}", {1})',
]
GUARDS = ["run.inner_guard()", "run.other_guard()", "run.no_offload()", "run.no_offload()"]
MODES = [
    "torch.no_grad()",
    "torch.enable_grad()",
    'torch.autocast("cpu", torch.bfloat16)',
    'torch.autocast("cpu", torch.bfloat16)',
    "set_checkpoint_early_stop(False)",
]
# {{0}} becomes the function and its operands.
REGIONS = [
    "checkpoint({0}, use_reentrant=False)",
    "checkpoint({0}, use_reentrant=False)",
    "checkpoint({0}, use_reentrant=False)",
    "checkpoint({0}, use_reentrant=False, early_stop=False)",
    "checkpoint({0}, use_reentrant=False, preserve_rng_state=False)",
    'checkpoint({0}, use_reentrant=False, determinism_check="none")',
    "checkpoint({0}, use_reentrant=False, context_fn=run.contexts)",
    "checkpoint({0}, use_reentrant=False, context_fn=run.selective)",
    "checkpoint({0}, use_reentrant=True)",
    "checkpoint({0}, use_reentrant=True)",
    "checkpoint({0}, use_reentrant=True, preserve_rng_state=False)",
    "run.checkpoint({0})",
    "run.checkpoint({0}, early_stop=True)",
    "run.checkpoint({0}, is_asked_for=False)",
    "run.call({0})",
]
# Statements in a function, with a name and a small number.
ERRORS = ['run.refuse("{0}", {1})', 'run.stop("{0}", {1})']
HOOKS = ['run.hook({{0}}, "{0}")', 'run.hook_that_runs_backward({{0}}, "{0}")']

BACKWARDS: list[list[str]] = [
    ["loss.backward()"],
    ["loss.backward()"],
    ["loss.backward()"],
    ["loss.backward(retain_graph=True)", "loss.backward()"],
    ["loss.backward(retain_graph=True)", "other.backward()"],
    ["(loss + other).backward()"],
    ["loss.backward(inputs=[a, c])"],
    ['run.note("gradients", *torch.autograd.grad(loss, [a], allow_unused=True))'],
    [
        'run.note("first", *torch.autograd.grad(loss, [a, b], retain_graph=True, allow_unused=True))',
        "loss.backward()",
    ],
    [
        "first = torch.autograd.grad(loss, [a, b], create_graph=True, allow_unused=True)",
        "run.penalty(first).backward()",
    ],
    [
        "first = torch.autograd.grad(loss, [c], create_graph=True, allow_unused=True)",
        "(loss + run.penalty(first)).backward()",
    ],
    ["with run.guard(): loss.backward()"],
    [
        "with run.guard(): first = torch.autograd.grad(loss, [a, c], create_graph=True, allow_unused=True)",
        "run.penalty(first).backward()",
    ],
    ["pass"],
]
assert SIZE % 2 == 0
