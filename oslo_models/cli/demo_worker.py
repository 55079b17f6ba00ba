"""One process of ``oslo-models demo``: trains, saves, loads again, compares and generates some Python."""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from oslo_models import GPT2LMHeadModel
from oslo_models.cli.demo import HEADS, TOLERANCE, add_arguments
from oslo_models.distributed.object_exchange import gather_objects

BATCH, LENGTH, LEARNING_RATE = 4, 128, 1e-3
TEXT_LIMIT = 3_000_000
"""Characters of source text to read."""
PROMPT = "def "


def main() -> None:
    """Run the whole demo on every rank. Only rank 0 prints."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args()
    hf.utils.logging.disable_progress_bar()
    tokenizer = hf.ByT5Tokenizer(extra_ids=0)  # one token per byte, so it needs no files
    train, held_out = read_text(tokenizer)
    demo = Demo(args, len(tokenizer))
    demo.introduce(len(train), len(held_out))
    before = demo.evaluate(held_out)
    losses = demo.train(train)
    after = demo.evaluate(held_out)
    demo.say(f"held-out loss {before:.3f} -> {after:.3f} nats per byte (guessing: {math.log(256):.3f})\n")
    demo.show_memory()
    difference = demo.save_and_compare(held_out[None, :LENGTH])
    demo.generate(tokenizer)
    if demo.rank == 0:
        demo.draw(losses, before, after)
        summary = {"losses": losses, "held_out": [before, after], "largest_difference": difference}
        (args.output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def read_text(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return token ids of the standard library's top-level modules, in alphabetical order. Every twentieth is held out.

    Returns:
        The tokens of the training text and of the held-out text.

    Raises:
        OSError: this Python has no sources of its standard library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[int], list[int]] = ([], [])
    for number, file in enumerate(sorted(folder.glob("*.py")), 1):
        parts[number % 20 == 0].extend(tokenizer(file.read_text(encoding="utf-8", errors="replace")).input_ids)
        if sum(map(len, parts)) > TEXT_LIMIT:
            break
    if min(map(len, parts)) <= LENGTH:
        raise OSError(f"there is too little to train on: {folder} holds no sources of Python's standard library")
    return torch.tensor(parts[0]), torch.tensor(parts[1])


class Demo:
    """The model, and the steps of the demo."""

    def __init__(self, args: argparse.Namespace, vocab_size: int) -> None:
        self.args, self.size = args, args.tensor_parallel_size
        special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
        sizes = {"vocab_size": vocab_size, "n_embd": 256, "n_layer": 4, "n_head": HEADS, "n_positions": 2 * LENGTH}
        no_dropout = {
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }  # no token is seen twice at the default steps
        config = hf.GPT2Config(**sizes, **special, **no_dropout)
        self.model = GPT2LMHeadModel.from_config_with_parallel(config, tensor_parallel_size=self.size, seed=args.seed)
        self.rank, self.device = self.model.mesh.world.rank, self.model.mesh.device
        self.optimizer = torch.optim.AdamW(self.model.gpu_parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))

    def say(self, *lines: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def introduce(self, train: int, held_out: int) -> None:
        """Print the sizes of the model and the text."""
        config, device = self.model.config, "GPU" if self.device.type == "cuda" else "CPU process"
        self.say(
            f"model: GPT-2, {config.n_layer} layers of size {config.n_embd}, {config.n_head} heads, one token per byte",
            f"text:  Python's standard library, {train / 1e6:.2f} MB to train on, {held_out / 1e6:.2f} MB held out",
            f"ranks: {self.size}, each a {device} that holds a part of every layer\n",
        )

    @torch.no_grad()
    def evaluate(self, ids: Tensor) -> float:
        """Return the mean loss per byte over 64 evenly spaced windows."""
        self.model.eval()
        starts = torch.linspace(0, len(ids) - LENGTH, 64).long().tolist()
        windows = torch.stack([ids[start : start + LENGTH] for start in starts]).to(self.device)
        losses = [self.model(input_ids=part, labels=part, use_cache=False).loss for part in windows.split(16)]
        return torch.stack(losses).mean().item()

    def train(self, ids: Tensor) -> list[float]:
        """Train with an ordinary loop for transformers. Every rank sees the same batches. Return the losses."""
        steps, warm_up = self.args.steps, 50
        generator = torch.Generator().manual_seed(self.args.seed)

        def rate(step: int) -> float:
            return min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.model.train()
        losses: list[float] = []
        with tqdm(range(steps), "training", disable=self.rank > 0, unit="step", dynamic_ncols=True) as bar:
            for _ in bar:
                starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=generator).tolist()
                batch = torch.stack([ids[start : start + LENGTH] for start in starts]).to(self.device)
                loss = self.model(input_ids=batch, labels=batch).loss
                loss.backward()
                self.model.clip_grad_norm_(1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                schedule.step()
                losses.append(loss.item())
                bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        return losses

    def show_memory(self) -> None:
        """Print a table of the parameters and memory of each rank."""
        state = [value for entry in self.optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
        weights = list(self.model.gpu_parameters())
        size = sum(param.numel() for param in weights)
        weight_bytes = sum(tensor.nbytes for tensor in weights)
        memory = 2 * weight_bytes + sum(tensor.nbytes for tensor in state)  # a gradient is as large as its parameter
        rows = gather_objects(self.model.mesh.world, (size, memory))
        total = sum(math.prod(self.model.layouts[name].shape) for name, _ in self.model.named_parameters())
        self.say(f"{'':12}{'parameters':>12}{'weights, gradients, AdamW':>28}{'of the total':>15}")
        for rank, (size, memory) in enumerate(rows):
            self.say(f"rank {rank:<7}{size:12,}{memory / 1e6:25.1f} MB{size / total:15.1%}")
        self.say(f"{'full model':12}{total:12,}{total * 16 / 1e6:25.1f} MB\n")

    @torch.no_grad()
    def save_and_compare(self, ids: Tensor) -> float:
        """Save split and merged checkpoints, load both, and return the largest difference from the original logits."""
        ids = ids.to(self.device)
        split, merged = self.args.output / "split", self.args.output / "merged"
        self.model.eval()
        mine = self.model(input_ids=ids).logits
        self.model.save_pretrained_with_parallel(split)
        self.model.save_pretrained_with_parallel(merged, save_with_merging=True)
        again = GPT2LMHeadModel.from_pretrained_with_parallel(split, tensor_parallel_size=self.size)
        differences = {f"{split.name}/  one file per rank, loaded again": again(input_ids=ids).logits}
        if self.rank == 0:
            plain = hf.AutoModelForCausalLM.from_pretrained(merged).to(self.device)
            differences[f"{merged.name}/ one model, loaded by transformers"] = plain(input_ids=ids).logits
        largest = 0.0
        self.say(f"saved in {self.args.output}:")
        for name, logits in differences.items():
            difference = (logits - mine).abs().max().item()
            largest = max(largest, difference)
            self.say(f"  {name:45} logits differ by at most {difference:.1e}")
        if not largest <= TOLERANCE:
            self.say(f"FAILED: that is more than {TOLERANCE:.0e}")
        return largest

    def generate(self, tokenizer: Any) -> None:
        """Generate some Python with transformers' own ``generate``."""
        ids = tokenizer(PROMPT, add_special_tokens=False, return_tensors="pt").to(self.device)
        torch.manual_seed(self.args.seed)
        out = self.model.generate(**ids, max_new_tokens=200, do_sample=True, temperature=0.9)
        text = tokenizer.decode(out[0], skip_special_tokens=True).rstrip()
        self.say(f"\nit writes, after {PROMPT!r} (more --steps, better Python):", text, "")

    def draw(self, losses: list[float], before: float, after: float) -> None:
        """Save the loss curve as an image, if matplotlib is installed."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            self.say("for a picture of the loss curve: pip install matplotlib")
            return
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(losses, linewidth=1, label="training batch")
        axes.plot([0, len(losses)], [before, after], "o", label="held out")
        axes.set(xlabel="step", ylabel="loss, nats per byte", title=f"GPT-2, tensor parallel over {self.size}")
        axes.legend()
        figure.savefig(self.args.output / "loss.png", dpi=150)
        self.say(f"loss curve: {self.args.output / 'loss.png'}")


if __name__ == "__main__":
    main()
