"""Models of transformers', from a config, with their own body and a head beside it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model import TOKEN_SEED, WEIGHT_SEED

STEP_SEED = 3  # of dropout, the same in every step


@dataclass(frozen=True)
class HuggingFaceShape:
    """The sizes of a model and of its input."""

    family: str  # llama, gpt2 or vit
    layers: int
    dim: int
    heads: int
    ffn: int
    batch: int
    classes: int  # the vocabulary of llama and gpt2
    kv_heads: int = 0  # llama's
    sequence: int = 0  # llama's and gpt2's
    image: int = 0  # vit's, in pixels a side; patches have 16


HUGGING_FACE_SHAPES = {
    # w1 of model.py
    "hf_llama": HuggingFaceShape("llama", 9, 4096, 32, 14336, 8, 128256, kv_heads=8, sequence=1024),
    # GPT-2 medium, with its dropout of 0.1
    "hf_gpt2": HuggingFaceShape("gpt2", 24, 1024, 16, 4096, 16, 50257, sequence=1024),
    # ViT-L/16
    "hf_vit": HuggingFaceShape("vit", 24, 1024, 16, 4096, 128, 1000, image=224),
    "hf_llama_tiny": HuggingFaceShape("llama", 2, 64, 4, 128, 2, 128, kv_heads=2, sequence=64),
    "hf_gpt2_tiny": HuggingFaceShape("gpt2", 2, 64, 4, 256, 2, 128, sequence=64),
    "hf_vit_tiny": HuggingFaceShape("vit", 2, 64, 4, 256, 2, 10, image=32),
}


def make_body(shape: HuggingFaceShape) -> tuple[nn.Module, nn.ModuleList]:
    """The model without its head, and its repeated blocks."""
    transformers = importlib.import_module("transformers")
    sizes: dict[str, Any] = {"hidden_size": shape.dim, "num_hidden_layers": shape.layers}
    sizes |= {"num_attention_heads": shape.heads, "intermediate_size": shape.ffn}
    if shape.family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=shape.classes,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.sequence,
            use_cache=False,
            **sizes,
        )
        body = transformers.LlamaModel(config)
        return body, body.layers
    if shape.family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=shape.classes,
            n_positions=shape.sequence,
            n_embd=shape.dim,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.ffn,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        body = transformers.GPT2Model(config)
        return body, body.h
    body = transformers.ViTModel(transformers.ViTConfig(image_size=shape.image, **sizes), add_pooling_layer=False)
    blocks = next(each for each in body.modules() if isinstance(each, nn.ModuleList) and len(each) == shape.layers)
    return body, blocks


class HuggingFaceWorkload:
    """As model.Workload."""

    def __init__(self, shape: HuggingFaceShape, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(WEIGHT_SEED)
        with torch.device(device):  # or the processor would draw billions of weights
            self.body, self._layers = make_body(shape)
            head = nn.Linear(shape.dim, shape.classes, bias=False)
        self.model = nn.ModuleDict({"body": self.body, "head": head}).to(dtype).train()
        self.parameters = list(self.model.parameters())
        self.blocks = [layer.forward for layer in self._layers]
        generator = torch.Generator().manual_seed(TOKEN_SEED)
        if shape.image:
            pixels = torch.randn(shape.batch, 3, shape.image, shape.image, generator=generator)
            self.tokens = pixels.to(device, dtype)
            sizes: tuple[int, ...] = (shape.batch,)
        else:
            sizes = (shape.batch, shape.sequence)
            self.tokens = torch.randint(0, shape.classes, sizes, generator=generator).to(device)
        self._labels = torch.randint(0, shape.classes, sizes, generator=generator).to(device)
        self._is_image = bool(shape.image)

    def hidden(self, call_block: Callable[..., Any] | None = None) -> Tensor:
        torch.manual_seed(STEP_SEED)
        for layer, forward in zip(self._layers, self.blocks, strict=True):
            layer.forward = forward if call_block is None else partial(call_block, forward)
        hidden = self.body(self.tokens).last_hidden_state
        return hidden[:, 0] if self._is_image else hidden

    def loss(self, hidden: Tensor, after_head: Callable[[], None]) -> Tensor:
        logits = self.model["head"](hidden)
        after_head()
        return F.cross_entropy(logits.float().flatten(0, -2), self._labels.flatten())

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
