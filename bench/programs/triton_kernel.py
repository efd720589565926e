"""silu(gate) * up in Triton. A module of its own, because Triton reads a kernel's source and needs a GPU."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def swiglu(gate, up, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    x = tl.load(gate + at, mask=here).to(tl.float32)
    y = x * tl.sigmoid(x) * tl.load(up + at, mask=here).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=here)


def launch(gate: Tensor, up: Tensor, out: Tensor) -> None:
    swiglu[(triton.cdiv(gate.numel(), BLOCK),)](gate, up, out, gate.numel(), BLOCK=BLOCK)
