"""Correctness on this machine: the tests marked ``gpu``, and each way to run a model, on its device."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.rehearse import ranks
from benchmarks.rehearse.bench import Bench
from benchmarks.rehearse.cases import ROOT
from benchmarks.rehearse.ranks import EXACT, KINDS, batch, plain, step

OURS = "oslo_models"


def ceilings(bench: Bench) -> None:
    """The reference rates of the machine."""
    bench.ready()
    found = bench.timer.ceilings()
    bench.row("torch", "copy", found.copy / 1e9, "GB/s")
    bench.row("torch", "product in bfloat16", found.product / 1e12, "TFLOP/s")


def pytest_file(bench: Bench, path: str) -> None:
    """A row for each failing test, and one row for all passing tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", path]
        done = subprocess.run(
            [*command, f"--junitxml={report}", f"--basetemp={folder}/tests"], cwd=ROOT, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if not report.exists():
            bench.fail("pytest", done.stdout + done.stderr)
            return
        counts = {"passed": 0, "failed": 0, "skipped": 0}
        for test in ET.parse(report).iter("testcase"):
            trouble = next((each for each in test if each.tag in ("failure", "error")), None)
            if trouble is not None:
                bench.fail("pytest", trouble.text or "", test.get("name", ""))
            skipped = test.find("skipped") is not None
            counts["failed" if trouble is not None else "skipped" if skipped else "passed"] += 1
    if not sum(counts.values()) or done.returncode not in (0, 1):  # collection ended with an error, say
        bench.fail("pytest", done.stdout + done.stderr)
    elif not bench.dry and not counts["passed"]:
        bench.fail("pytest", f"no test passed: {counts}\n{done.stdout}")
    for name, count in counts.items():
        bench.row("pytest", name, count, "tests")


def imports(bench: Bench) -> None:
    """Every architecture of the zoo, with this version of transformers."""
    from oslo_models import registry

    for name in registry.ARCHITECTURES:
        with bench.attempt(OURS, name):
            for cls in registry.names(name):
                registry.find(cls)
    bench.row(OURS, "architectures", len(registry.ARCHITECTURES), "")


def single_rank(bench: Bench) -> None:
    """A process group of one rank, with NCCL on a GPU, started without a backend name."""
    with tempfile.NamedTemporaryFile() as store:
        where = {"init_method": f"file://{store.name}", "rank": 0, "world_size": 1}
        dist.init_process_group(**where, **({"backend": "gloo"} if bench.dry else {}))
        try:
            with bench.attempt("torch", "collectives"):
                x, y = torch.arange(3.0, device=bench.device), torch.empty(3, device=bench.device)
                dist.all_reduce(x)
                dist.all_gather_into_tensor(y, x)
                bench.check("collectives", y.tolist(), [0.0, 1.0, 2.0])
            for kind in KINDS:
                with bench.attempt(OURS, kind):
                    for name, error in ranks.compare(kind, 1, bench.device).items():
                        _report(bench, f"{kind}: {name}", error)
        finally:
            dist.destroy_process_group()


def two_ranks(bench: Bench) -> None:
    """Tensor parallelism of two processes that share the device, through gloo: NCCL refuses two ranks on one GPU."""
    for name, error in ranks.launch(bench.device, ranks.compare_kinds).items():
        _report(bench, name, error)


def sequence_parallel(bench: Bench) -> None:
    """The same with tokens divided over the ranks between the layers."""
    with bench.attempt(OURS):
        for name, error in ranks.launch(bench.device, ranks.compare_sequence_parallel).items():
            _report(bench, name, error)


def split_files(bench: Bench) -> None:
    """Split checkpoints of two ranks, with the states of the optimizer."""
    with bench.attempt(OURS):
        for name, error in ranks.launch(bench.device, ranks.resume_from_split_files).items():
            _report(bench, name, error)


def symmetric_memory(bench: Bench) -> None:
    """All-reduces of two processes on one device, through shared memory, also from CUDA graphs."""
    with bench.attempt(OURS):
        for name, error in ranks.launch(bench.device, ranks.sum_in_shared_memory).items():
            _report(bench, name, error)


def _report(bench: Bench, name: str, error: float) -> None:
    if error <= EXACT:
        bench.row(OURS, name, error, "error")
    else:
        bench.fail(OURS, f"off by {error:.1e} from transformers", name)


def from_pretrained(bench: Bench) -> None:
    """From transformers' checkpoint to ours and back."""
    from oslo_models import registry

    for kind in KINDS:
        with bench.attempt(OURS, kind), tempfile.TemporaryDirectory() as folder:
            model, cls = plain(kind, bench.device), registry.find(KINDS[kind])
            model.save_pretrained(f"{folder}/theirs")
            ours = cls.from_pretrained_with_parallel(f"{folder}/theirs", dtype=torch.float64)
            bench.check(f"{kind}: device", ours.device.type, bench.device.type)
            ids = batch(bench.device)
            bench.check(f"{kind}: logits", ours(input_ids=ids).logits, model(input_ids=ids).logits, EXACT)
            ours.save_pretrained_with_parallel(f"{folder}/ours", save_with_merging=True)
            again = type(model).from_pretrained(f"{folder}/ours", dtype=torch.float64)
            for name, weight in model.state_dict().items():
                if not torch.equal(weight.cpu(), again.state_dict()[name].cpu()):
                    bench.fail(OURS, f"{name} is another one after loading and saving", kind)


def deployed(bench: Bench) -> None:
    """A worker process holds the model."""
    from oslo_models import registry

    with bench.attempt(OURS), tempfile.TemporaryDirectory() as folder:
        model, ids = plain("llama", bench.device), batch(bench.device)
        model.save_pretrained(folder)
        expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        load = registry.find(KINDS["llama"]).from_pretrained_with_parallel
        with load(folder, dtype=torch.float64, deploy=True) as proxy:
            found = proxy.generate(ids.cpu(), max_new_tokens=6, do_sample=False, pad_token_id=0)
            bench.check("tokens", found.tolist(), expected.tolist())


def parallelized(bench: Bench) -> None:
    """parallelformers' function."""
    from oslo_models.compat.parallelformers import parallelize

    with bench.attempt(OURS):
        model, ids = plain("gpt2", torch.device("cpu")), batch(torch.device("cpu"))
        expected = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        parallelize(model, num_gpus=1, fp16=False)
        try:
            found = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
            bench.check("tokens", found.tolist(), expected.tolist())
        finally:
            model.cpu()  # ends the workers


def threads(bench: Bench) -> None:
    """tensor_parallel's function: two ranks as threads, on one device.

    Autograd has one thread per GPU. So ranks on the same GPU cannot run their backward passes at the same time.
    """
    import oslo_models
    from oslo_models.compat.tensor_parallel import api

    for kind in KINDS:
        # users may not name a GPU twice, since it would hold two shards
        with bench.attempt(OURS, kind), mock.patch.object(api, "devices_of_ranks", list):
            model, ids = plain(kind, bench.device), batch(bench.device)
            parallel = oslo_models.tensor_parallel(plain(kind, torch.device("cpu")), [bench.device, bench.device])
            with torch.no_grad():
                losses = [each(input_ids=ids, labels=ids).loss for each in (parallel, model)]
            bench.check(f"{kind}: loss", *losses, EXACT)
            tokens = [
                each.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for each in (parallel, model)
            ]
            bench.check(f"{kind}: tokens", *[each.tolist() for each in tokens])


def _ours(bench: Bench, kind: str, dtype: torch.dtype, **sizes: Any) -> Any:
    from oslo_models import registry

    config = plain(kind, torch.device("cpu"), **sizes).config
    return registry.find(KINDS[kind]).from_config_with_parallel(config, dtype=dtype, seed=0)


def _fused_like_unfused(bench: Bench, kind: str, dtype: torch.dtype, tolerance: float, **sizes: Any) -> None:
    with bench.attempt(OURS, kind):
        model, ids = _ours(bench, kind, dtype, **sizes), batch(bench.device)
        results = []
        for change in (model.unfuse, model.fuse):
            change()
            loss, gradients = step(model, ids)
            results.append([loss.float(), *(gradient.float() for gradient in gradients.values())])
            model.zero_grad()
        norms = [torch.stack([x.norm() for x in result[1:]]) for result in results]
        bench.check(f"{kind}: loss", results[1][0], results[0][0], tolerance)
        bench.check(f"{kind}: norms of gradients", norms[1], norms[0], tolerance)


def half_precision(bench: Bench) -> None:
    for kind in KINDS:
        for dtype, tolerance in ((torch.float16, 0.02), (torch.bfloat16, 0.05)):
            _fused_like_unfused(bench, kind, dtype, tolerance)


def odd_sizes(bench: Bench) -> None:
    """GPT-2's vocabulary, and widths that are no multiple of a vector load."""
    vocab = bench.pick(50257, 131)
    _fused_like_unfused(bench, "gpt2", torch.float32, 1e-3, vocab_size=vocab, n_embd=57, n_head=3)
    _fused_like_unfused(bench, "llama", torch.float32, 1e-3, vocab_size=vocab, hidden_size=72, intermediate_size=91)


def autocast(bench: Bench) -> None:
    """Fused models compute in autocast's dtype, like torch's layers; in float16 with a gradient scaler."""
    for kind in KINDS:
        for dtype in (torch.bfloat16, torch.float16):
            with bench.attempt(OURS, f"{kind} {dtype}"):
                model, ids = _ours(bench, kind, torch.float32), batch(bench.device)
                scaler = torch.amp.GradScaler(bench.device.type, enabled=dtype == torch.float16 and not bench.dry)
                logits, losses = [], []
                for change in (model.unfuse, model.fuse):
                    change()
                    with torch.autocast(bench.device.type, dtype):
                        with torch.no_grad():
                            logits.append(model(input_ids=ids).logits)
                        loss = model(input_ids=ids, labels=ids).loss
                    scaler.scale(loss).backward()
                    losses.append(loss.float())
                    model.zero_grad()
                bench.check(f"{kind} {dtype}: type", logits[1].dtype, logits[0].dtype)
                bench.check(f"{kind} {dtype}: logits", logits[1].float(), logits[0].float(), 0.05)
                bench.check(f"{kind} {dtype}: loss", losses[1], losses[0], 0.02)


def strided(bench: Bench) -> None:
    """Operations give the same results on views as on copies."""
    from oslo_kernels import gated, gelu, norm, rotary, softmax

    x, y = (torch.randn(6, 40, 24, device=bench.device).transpose(0, 1)[:, ::2] for _ in range(2))
    w = torch.randn(48, device=bench.device)[::2]
    scores = torch.randn(2, 7, 3, 11, device=bench.device).transpose(1, 2)
    q, table = torch.randn(2, 7, 3, 8, device=bench.device).transpose(1, 2), torch.randn(1, 7, 8, device=bench.device)
    runs = {
        "norm": (lambda x, y, w: norm.add_norm(x, y, w, w, 1e-5, True)[0], (x, y, w)),
        "gelu": (lambda x, w: gelu.bias_gelu(x, w, "tanh"), (x, w)),
        "swiglu": (gated.gated, (x, y)),
        "softmax": (lambda s: softmax.masked_softmax(s, None, 0.3, True), (scores,)),
        "rotary": (lambda q: rotary.rotary(q, q[:, :1], table, table)[0], (q,)),
    }
    for name, (run, tensors) in runs.items():
        with bench.attempt(OURS, name):
            bench.check(name, run(*tensors), run(*(t.contiguous() for t in tensors)), 1e-6)


def compiled(bench: Bench) -> None:
    """A fused model under torch.compile."""
    for kind in KINDS:
        with bench.attempt(OURS, kind):
            model, ids = _ours(bench, kind, torch.float32), batch(bench.device)
            expected = step(model, ids)[0]
            model.zero_grad()
            run = bench.compiled(model.fuse())
            bench.check(f"{kind}: loss", run(input_ids=ids, labels=ids).loss, expected, 1e-3)


def fused_decoding(bench: Bench) -> None:
    """Greedy tokens of several models, batches and lengths in one process, within the recompile limit."""
    for number in range(bench.pick(5, 1)):
        for kind in KINDS:
            with bench.attempt(OURS, f"{kind} {number}"):
                model = _ours(bench, kind, torch.float32, vocab_size=101 + number).eval()
                for rows, length, beams in ((1, 5, 1), (1, 9, 1), (3, 5, 1), (2, 6, 3)):
                    ids = batch(bench.device)[:rows, :length]
                    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
                    tokens = [change().generate(ids, **options).tolist() for change in (model.fuse, model.unfuse)]
                    bench.check(f"{kind} {number}: {rows} x {length}, {beams} beams", *tokens)
