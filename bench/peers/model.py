"""The model and the loss of the C++ benchmark (llama.cc, llama_block.cc, step_workload.cc), operation for operation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON = 1e-5
INIT_DEVIATION = 0.02
WEIGHT_SEED = 1
TOKEN_SEED = 2


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of its input, as in step_shape.cc."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    rope_theta: float
    batch: int
    sequence: int


SHAPES = {
    "w1": Shape(128256, 4096, 9, 32, 8, 14336, 500000.0, 8, 1024),
    "small": Shape(32000, 1024, 16, 16, 8, 3584, 500000.0, 8, 1024),
    "tiny": Shape(256, 256, 4, 8, 4, 704, 1e4, 4, 256),
}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, NORM_EPSILON)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rope_angles(sequence: int, head_dim: int, theta: float) -> Tensor:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / float(head_dim)
    half = torch.outer(torch.arange(sequence, dtype=torch.float32), torch.pow(theta, exponent).reciprocal())
    return torch.cat((half, half), -1)


class Block(nn.Module):
    def __init__(self, shape: Shape, weight: Callable[..., nn.Parameter]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.dim // shape.heads
        dim, kv_dim = shape.dim, shape.kv_heads * self.head_dim
        # The order in which weights are drawn.
        self.attention_norm = weight(dim)
        self.wq, self.wk, self.wv, self.wo = (
            weight(dim, dim),
            weight(kv_dim, dim),
            weight(kv_dim, dim),
            weight(dim, dim),
        )
        self.ffn_norm = weight(dim)
        self.w1, self.w3, self.w2 = weight(shape.ffn, dim), weight(shape.ffn, dim), weight(dim, shape.ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x + self.attention(norm(x, self.attention_norm), cos, sin)
        return h + self.swiglu(norm(h, self.ffn_norm))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = rope(F.linear(x, self.wq).view(batch, seq, self.heads, self.head_dim), cos, sin).transpose(1, 2)
        k = rope(F.linear(x, self.wk).view(batch, seq, self.kv_heads, self.head_dim), cos, sin).transpose(1, 2)
        v = F.linear(x, self.wv).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        grouped = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
        if not grouped and self.heads != self.kv_heads:
            k = k.repeat_interleave(self.heads // self.kv_heads, 1)
            v = v.repeat_interleave(self.heads // self.kv_heads, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return F.linear(mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim), self.wo)

    def swiglu(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.w1)) * F.linear(x, self.w3), self.w2)


class Llama(nn.Module):
    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

        def weight(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(sizes, dtype=dtype, device=device))

        self.embedding = weight(shape.vocab, shape.dim)
        self.norm = weight(shape.dim)
        self.head = weight(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape, weight) for _ in range(shape.layers))
        angles = rope_angles(shape.sequence, shape.dim // shape.heads, shape.rope_theta)
        self.register_buffer("cos", angles.cos().to(device, dtype))
        self.register_buffer("sin", angles.sin().to(device, dtype))
        self.initialize(torch.Generator(device).manual_seed(WEIGHT_SEED))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, INIT_DEVIATION, generator=generator)


class Workload:
    """A model, its tokens, and the parts that every configuration's step is made of."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.model = Llama(shape, dtype, device)
        self.parameters = list(self.model.parameters())
        self.blocks = list(self.model.blocks)  # what call_block may be given
        generator = torch.Generator().manual_seed(TOKEN_SEED)
        self.tokens = torch.randint(0, shape.vocab, (shape.batch, shape.sequence), generator=generator).to(device)

    def hidden(self, call_block: Callable[..., Tensor] | None = None) -> Tensor:
        cos, sin = self.model.cos.unsqueeze(1), self.model.sin.unsqueeze(1)
        x = F.embedding(self.tokens, self.model.embedding)
        for block in self.model.blocks:
            x = block(x, cos, sin) if call_block is None else call_block(block, x, cos, sin)
        return norm(x, self.model.norm)

    def loss(self, hidden: Tensor, after_head: Callable[[], None]) -> Tensor:
        """`after_head` is called right after the head's linear, where the forward pass holds the most."""
        logits = F.linear(hidden, self.model.head)
        after_head()
        return torch.logsumexp(logits.float(), -1).mean()

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, self.parameters)
