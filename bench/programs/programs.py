"""Training programs as their users write them: nothing in them knows of ebb, or of checkpointing."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 1


@dataclass
class Program:
    """A model and its step. `loss()` is the forward pass; `optimizer`, whose rate is 0, has a step's work to do all the
    same and leaves the weights as they are."""

    model: nn.Module
    blocks: list[nn.Module]  # what one would checkpoint by hand
    inputs: dict[str, Any]
    loss_of: Callable[[Any], Tensor] = lambda output: output.loss
    optimizer: torch.optim.Optimizer | None = None
    precision: AbstractContextManager[Any] = field(default_factory=nullcontext)
    offloader: Any = None  # of the configuration that is entered
    lengths: list[int] = field(default_factory=list)  # to which the inputs are cut, step by step; empty: they are not
    steps: int = 0

    def loss(self) -> Tensor:
        torch.manual_seed(SEED)  # of dropout
        inputs = self.inputs
        if self.lengths:
            length = self.lengths[self.steps % len(self.lengths)]
            inputs = {name: each[:, :length].contiguous() for name, each in inputs.items()}
        self.steps += 1
        with self.precision:
            return self.loss_of(self.model(**inputs))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=parameters[0].is_cuda)


def transformers() -> Any:
    return importlib.import_module("transformers")


def made(model: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(SEED)
    with device:  # or the processor would draw billions of weights
        return model().to(dtype).train()


def tokens(classes: int, batch: int, length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, classes, (batch, length), generator=generator).to(device)


def language_model(
    model: nn.Module, blocks: Any, classes: int, batch: int, length: int, device: torch.device, **more: Any
) -> Program:
    text = tokens(classes, batch, length, device)
    return Program(model, list(blocks), {"input_ids": text, "labels": text}, **more)


def llama(tiny: bool, device: torch.device, layers: int, dim: int, ffn: int, batch: int) -> Program:
    sizes = (64, 128, 512, 6, 2, 64) if tiny else (dim, ffn, 128256, layers, batch, 1024)
    dim, ffn, classes, layers, batch, length = sizes
    config = transformers().LlamaConfig(
        hidden_size=dim,
        intermediate_size=ffn,
        vocab_size=classes,
        num_hidden_layers=layers,
        num_attention_heads=dim // 64 if dim < 4096 else 32,
        num_key_value_heads=1 if tiny else 8,
        use_cache=False,
    )
    model = made(lambda: transformers().LlamaForCausalLM(config), device)
    return language_model(model, model.model.layers, classes, batch, length, device)


def w1(tiny: bool, device: torch.device) -> Program:
    """Nine layers of Llama-3-8B, forward and backward."""
    return llama(tiny, device, layers=9, dim=4096, ffn=14336, batch=8)


def llama_1b(tiny: bool, device: torch.device, compiled: bool = False) -> Program:
    """1.5 billion parameters, with AdamW."""
    program = llama(tiny, device, layers=16, dim=2048, ffn=8192, batch=16)
    program.optimizer = adamw(program.model)
    for block in program.blocks:
        if compiled:
            block.compile(backend="aot_eager" if tiny else "inductor")
    return program


def llama_1b_compiled(tiny: bool, device: torch.device) -> Program:
    """The same, each block compiled."""
    return llama_1b(tiny, device, compiled=True)


def lengths(tiny: bool, device: torch.device) -> Program:
    """Llama of 1.5 billion parameters, on batches of random length, as dynamic padding makes them."""
    program = llama(tiny, device, layers=16, dim=2048, ffn=8192, batch=16)
    longest = program.inputs["input_ids"].shape[1]
    generator = torch.Generator().manual_seed(SEED)
    program.lengths = torch.randint(longest // 2, longest + 1, (64,), generator=generator).tolist()
    return program


def lora(tiny: bool, device: torch.device) -> Program:
    """A frozen Llama-3-8B under LoRA of rank 16, with AdamW."""
    program = llama(tiny, device, layers=32, dim=4096, ffn=14336, batch=8)
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=16, target_modules="all-linear")
    program.model = peft.get_peft_model(program.model, config, autocast_adapter_dtype=False)
    program.optimizer = adamw(program.model)
    return program


def gpt2(tiny: bool, device: torch.device) -> Program:
    """GPT-2 medium with its dropout."""
    dim, layers, heads, classes, batch, length = (64, 6, 2, 512, 2, 64) if tiny else (1024, 24, 16, 50257, 16, 1024)
    config = transformers().GPT2Config(
        n_embd=dim, n_layer=layers, n_head=heads, vocab_size=classes, use_cache=False, bos_token_id=None, eos_token_id=None
    )
    model = made(lambda: transformers().GPT2LMHeadModel(config), device)
    return language_model(model, model.transformer.h, classes, batch, length, device)


def t5(tiny: bool, device: torch.device) -> Program:
    """T5 large's shape, 512 tokens to 512."""
    dim, layers, batch, length, classes = (64, 6, 2, 32, 512) if tiny else (1024, 24, 16, 512, 32128)
    config = transformers().T5Config(
        d_model=dim,
        d_kv=64,
        d_ff=4 * dim,
        num_layers=layers,
        num_heads=dim // 64,
        vocab_size=classes,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = made(lambda: transformers().T5ForConditionalGeneration(config), device)
    return language_model(model, [*model.encoder.block, *model.decoder.block], classes, batch, length, device)


def mixtral(tiny: bool, device: torch.device) -> Program:
    """Eight layers of Mixtral's kind: two of eight experts a token."""
    dim, ffn, layers, batch, length = (64, 128, 6, 2, 32) if tiny else (2048, 7168, 8, 8, 1024)
    config = transformers().MixtralConfig(
        hidden_size=dim,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=dim // 64,
        num_key_value_heads=1 if tiny else 8,
        vocab_size=512 if tiny else 32000,
        use_cache=False,
    )
    model = made(lambda: transformers().MixtralForCausalLM(config), device)
    return language_model(model, model.model.layers, config.vocab_size, batch, length, device)


def image_program(
    model: nn.Module, blocks: Any, tiny: bool, device: torch.device, batch: int, side: int, **more: Any
) -> Program:
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(2 if tiny else batch, 3, side, side, generator=generator).to(device)
    labels = torch.zeros(images.shape[0], dtype=torch.long, device=device)
    parameter = next(model.parameters())
    inputs = {"x": images.to(parameter.dtype)}
    return Program(model, list(blocks), inputs, lambda output: F.cross_entropy(output.float(), labels), **more)


def vit(tiny: bool, device: torch.device) -> Program:
    """ViT-L/16 of timm's."""
    timm = importlib.import_module("timm")
    name, side = ("vit_tiny_patch16_224", 224) if tiny else ("vit_large_patch16_224", 224)
    model = made(lambda: timm.create_model(name), device)
    return image_program(model, model.blocks, tiny, device, 128, side)


def resnet50(tiny: bool, device: torch.device) -> Program:
    """ResNet-50 of timm's with batch norm: float32 weights under autocast."""
    timm = importlib.import_module("timm")
    model = made(lambda: timm.create_model("resnet18" if tiny else "resnet50"), device, torch.float32)
    blocks = [block for layer in (model.layer1, model.layer2, model.layer3, model.layer4) for block in layer]
    precision = torch.autocast(device.type, torch.bfloat16)
    return image_program(model, blocks, tiny, device, 256, 64 if tiny else 224, precision=precision)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int, condition: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.GroupNorm(32, channels), nn.GroupNorm(32, out)
        self.first, self.second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.condition = nn.Linear(condition, out)
        self.through = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        y = self.first(F.silu(self.first_norm(x))) + self.condition(F.silu(condition))[:, :, None, None]
        return self.through(x) + self.second(F.silu(self.second_norm(y)))


class AttentionBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(32, channels), nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, channels // 64, 64, height * width).transpose(-1, -2)
        y = F.scaled_dot_product_attention(qkv[:, 0], qkv[:, 1], qkv[:, 2])
        return x + self.out(y.transpose(-1, -2).reshape(x.shape))


class UNet(nn.Module):
    """Of diffusion's kind: conditioned residual blocks, attention in the lower resolutions, skips by concatenation."""

    def __init__(self, width: int, levels: int = 4) -> None:
        super().__init__()
        channels = [width * min(level + 1, 4) for level in range(levels)]
        self.condition = nn.Linear(width, width)
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        before = width
        for level, each in enumerate(channels):
            self.down.append(ResidualBlock(before, each, width))
            self.down.append(AttentionBlock(each) if level > 1 else ResidualBlock(each, each, width))
            before = each
        for level, each in reversed(list(enumerate(channels))):
            self.up.append(ResidualBlock(before + each, each, width))
            self.up.append(AttentionBlock(each) if level > 1 else ResidualBlock(each, each, width))
            before = each
        self.end = nn.Conv2d(before, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        condition = self.condition(x.new_ones(x.shape[0], self.condition.in_features))
        x, skips = self.begin(x), []
        for i, block in enumerate(self.down):
            x = block(x, condition)
            if i % 2:
                skips.append(x)
                x = F.avg_pool2d(x, 2)
        for i, block in enumerate(self.up):
            if i % 2 == 0:
                x = torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1)
            x = block(x, condition)
        return self.end(x)


def unet(tiny: bool, device: torch.device) -> Program:
    """A U-Net of diffusion's kind."""
    model = made(lambda: UNet(64 if tiny else 256), device)
    program = image_program(model, [*model.down, *model.up], tiny, device, 32, 32 if tiny else 128)
    program.loss_of = lambda output: output.float().square().mean()
    return program


def swiglu_kernel(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, by a kernel of the program's own. On a CPU without an operation, too: in NumPy's memory."""
    out = torch.empty_like(gate)
    if gate.is_cuda:
        from .triton_kernel import launch

        launch(gate, up, out)
    else:
        out.view(torch.int16).numpy()[:] = (F.silu(gate) * up).view(torch.int16).numpy()
    return out


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return swiglu_kernel(gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)


class SwiGLUMLP(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down(SwiGLU.apply(self.gate(x), self.up(x)))


def kernel(tiny: bool, device: torch.device) -> Program:
    """W1 with a Triton kernel in each block."""
    program = w1(tiny, device)
    for block in program.blocks:
        block.mlp = SwiGLUMLP(block.mlp)
    return program


PROGRAMS: dict[str, Callable[[bool, torch.device], Program]] = {
    each.__name__: each
    for each in (w1, lora, llama_1b, llama_1b_compiled, lengths, gpt2, vit, resnet50, unet, t5, mixtral, kernel)
}
