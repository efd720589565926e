"""What a user of the benchmark may set."""

import argparse
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from .configurations import (
    CHECKPOINT_SOME,
    CONFIGURATIONS,
    EBB_PYTHON,
    EBB_PYTHON_WITHIN,
)
from .model import SHAPES, Shape

# tf32: float32 tensors, of which matrix products read ten bits of the mantissa.
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
EBB = "ebb"
PLANNED = "planned"
PLANNED_WITHIN = f"{PLANNED}:"  # and a size
CHECKPOINT_WITHIN = "checkpoint_within:"  # and a size
CPP_CONFIGS = ("none", "offload", "lean")  # by the C++ program's names
CONFIGS = ("none", EBB, *(name for name in CONFIGURATIONS if name not in ("none", EBB_PYTHON)), PLANNED)
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Options:
    shape: str = "w1"
    layers: int | None = None  # the shape's unless given
    dtypes: tuple[str, ...] = tuple(DTYPES)
    configs: tuple[str, ...] = CONFIGS
    cpp_configs: tuple[str, ...] = CPP_CONFIGS
    device: str = "auto"
    warm_up: int = 3
    pairs: int = 10
    check: bool = True
    step: Path = REPOSITORY / "bazel-bin/bench/step/step"  # the C++ program
    out: Path | None = None

    def chosen_shape(self) -> Shape:
        shape = SHAPES[self.shape]
        return replace(shape, layers=self.layers) if self.layers else shape


UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("kMGT" if suffix == "B" else "KMGT", 1)
}


def parse_bytes(text: str) -> int:
    """As the C++ programs read sizes: a number and perhaps a unit, such as 24GB or 512MiB."""
    match = re.fullmatch(r"([0-9.]+) ?([A-Za-z]*)", text)
    if match is None or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 24GB or 512MiB")
    return round(float(match[1]) * UNITS[match[2]])


def config(text: str) -> str:
    """One of CONFIGS, or one that goes on with a number or a size."""
    if text in (*CONFIGS, EBB_PYTHON):
        return text
    sizes = (CHECKPOINT_WITHIN, PLANNED_WITHIN, EBB_PYTHON_WITHIN)
    for prefix, parse in ((CHECKPOINT_SOME, int), *((prefix, parse_bytes) for prefix in sizes)):
        if text.startswith(prefix):
            parse(text.removeprefix(prefix))
            return text
    parametrized = ", ".join((f"{CHECKPOINT_SOME}BLOCKS", *(f"{prefix}SIZE" for prefix in sizes)))
    raise argparse.ArgumentTypeError(f"{text} is none of {', '.join((*CONFIGS, EBB_PYTHON))}, {parametrized}")


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def full_device_name(name: str) -> str:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if name == "cuda" else name


def parse_options(description: str) -> Options:
    parser = argparse.ArgumentParser(
        prog="peers", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(**{field.name: field.default for field in fields(Options)})
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--layers", type=positive, help="instead of the shape's own number")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES)
    parser.add_argument(
        "--configs",
        nargs="+",
        type=config,
        metavar="CONFIG",
        help=f"measured in this order; of {', '.join(CONFIGS)} (the default), {CHECKPOINT_SOME}BLOCKS (so many), "
        f"{CHECKPOINT_WITHIN}SIZE (as few as the peak allows), {PLANNED_WITHIN}SIZE (ebb, with such a budget), "
        f"{EBB_PYTHON} (ebb's Python package), {EBB_PYTHON_WITHIN}SIZE (ebb in Python, with such a budget)",
    )
    parser.add_argument(
        "--cpp-configs", nargs="+", choices=CPP_CONFIGS, help=f"of the C++ program, where {EBB} is measured"
    )
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--warm-up", type=positive, help="steps of each before timing")
    parser.add_argument("--pairs", type=positive, help="timed steps of each")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, help="compare the peers' gradients bit by bit"
    )
    parser.add_argument("--step", type=Path, help="the C++ program (default: bazel-bin/bench/step/step)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here as JSON")
    options = Options(**vars(parser.parse_args()))
    return replace(options, device=full_device_name(options.device))
