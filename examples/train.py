"""Trains a tiny GPT with ebb and without, from the same seed, and prints both losses and the peaks of saved tensors.

    python examples/train.py                        # ./dev python does it in a virtual environment of its own
    python examples/train.py --device-budget 100MB  # or --steps, --layers, --width, --batch, --context
    python examples/train.py --manage 4MB           # weights, gradients and states live at home, with 4 MB on the device
"""

import argparse
import sys
import time

import torch
from torch import nn

import ebb

TEXT = "the quick brown fox jumps over the lazy dog. " * 200


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, letters: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def body(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.letters(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def train(arguments: argparse.Namespace, steps: int, offloader: ebb.Offloader, manage: bool) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    letters = sorted(set(TEXT))
    tokens = torch.tensor([letters.index(letter) for letter in TEXT], device=device)
    model = Gpt(len(letters), arguments.width, arguments.layers, arguments.context).to(device)
    if manage:
        # Tensors of 64 KiB and more: the weights of a model as small as this one. The default is 1 MiB.
        offloader.manage(model, device_bytes=arguments.manage, minimum_bytes="64KiB")
        optimizer = ebb.AdamW(model.parameters(), lr=3e-3, update_in=arguments.update_in)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)  # ebb.AdamW has the bits of foreach=False
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(tokens) - arguments.context - 1, (arguments.batch,)).tolist()
        rows = torch.stack([tokens[start : start + arguments.context + 1] for start in starts])
        optimizer.zero_grad()
        with offloader:  # what autograd saves from here on may leave the device
            hidden = model.body(rows[:, :-1])
            with ebb.no_offload():  # what backward wants at once stays
                logits = model.head(hidden)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if manage:
        stats = offloader.stats()
        print(f"{stats.managed.tensors} tensors of {stats.managed.bytes / 1e6:.1f} MB were managed, ", end="")
        print(f"of which at most {stats.managed_on_device.peak_bytes / 1e6:.1f} MB at a time were on the device")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--device-budget", default=None, help="such as 24GB")
    parser.add_argument("--manage", default=None, metavar="BYTES", help="bound of weights, gradients and states, such as 4MB")
    parser.add_argument("--update-in", default="step", choices=["step", "backward", "next_use"], help="with --manage")
    parser.add_argument("--picture", default=None, metavar="PATH", help="draw the saved tensors over time")
    arguments = parser.parse_args()

    without_ebb = ebb.Offloader(enabled=False)
    train(arguments, 1, without_ebb, manage=False)  # whoever runs first waits for what torch sets up
    start = time.monotonic()
    plain = train(arguments, arguments.steps, without_ebb, manage=False)
    middle = time.monotonic()
    offloader = ebb.Offloader(device_budget=arguments.device_budget, record_timeline=True)
    ours = train(arguments, arguments.steps, offloader, manage=arguments.manage is not None)
    end = time.monotonic()
    for step, (without, with_ebb) in enumerate(zip(plain, ours, strict=True), start=1):
        print(f"step {step}  loss {without:.4f} without ebb, {with_ebb:.4f} with")
    print(f"{(middle - start) / arguments.steps * 1e3:.0f} ms a step without ebb, ", end="")
    print(f"{(end - middle) / arguments.steps * 1e3:.0f} with. {offloader.summary()}")
    if arguments.device_budget:
        print(offloader.explain())
    if arguments.picture:
        ebb.plot(offloader, arguments.picture)
    print("the losses are equal" if plain == ours else "THE LOSSES DIFFER")
    sys.exit(plain != ours)


if __name__ == "__main__":
    main()
