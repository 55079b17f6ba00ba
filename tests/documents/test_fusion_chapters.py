"""The chapters "Kernel Fusion" and "Selective Kernel Fusion" of OSLO's USAGE document (Apache-2.0), run as printed.

Only the package name differs, and arguments replace the ``...`` of a call.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support import zoo
from support.fake_timings import faster_at
from support.pool import Pool

FUSION = """
model = model.fuse()
"""

NGRAMS = """
model.generate(..., fused_no_repeat_ngram_blocking=True)
"""

SELECTIVE = """
from oslo import GPT2MLP, GPT2Attention

# MLP only fusion
model.fuse([GPT2MLP])

# Attention only fusion
model.fuse([GPT2Attention])

# MLP + Attention fusion
model.fuse([GPT2MLP, GPT2Attention])
"""


def check_chapters(tp: int, pp: int) -> dict[str, Any]:
    """Run the blocks one after the other; return the generated tokens and the fused modules after each."""
    import oslo_models

    model = oslo_models.GPT2LMHeadModel.from_config_with_parallel(zoo.config("gpt2", n_layer=4), tp, pp, seed=1).eval()
    ids = torch.tensor([[5, 6, 5, 6, 5]])
    arguments = {"inputs": ids, "no_repeat_ngram_size": 2, "max_new_tokens": 8, "do_sample": False}
    names: dict[str, Any] = {"model": model, "arguments": arguments}
    found: dict[str, Any] = {"before": model.generate(**arguments)}
    with faster_at():
        exec(FUSION, names)
    found["fused"] = [row.inside for row in names["model"].fusion_report() if row.fused]
    printed = NGRAMS.replace("...", "**arguments").replace("model.generate", "out = model.generate")
    exec(printed, names)
    found["after"] = names["out"]
    for block in SELECTIVE.split("\n\n")[1:]:
        model.unfuse()
        with faster_at():
            exec("from oslo_models import GPT2MLP, GPT2Attention\n" + block, names)
        found[block.strip().splitlines()[0]] = [row.inside for row in model.fusion_report() if row.fused]
    return found


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_kernel_fusion_chapters_run_as_printed(pool: Pool, tp: int, pp: int) -> None:
    for rank, found in enumerate(pool.run(tp * pp, check_chapters, tp, pp)):
        assert torch.equal(found["before"], found["after"])
        last = rank >= (pp - 1) * tp
        layers = {"GPT2Attention", "GPT2MLP"}
        blocks = {"GPT2Block"}  # fused where they are measured to be faster
        assert set(found["fused"]) - blocks == layers | ({"GPT2LMHeadModel"} if last else set())
        assert set(found["# MLP only fusion"]) == {"GPT2MLP"}
        assert set(found["# Attention only fusion"]) == {"GPT2Attention"}
        assert set(found["# MLP + Attention fusion"]) == layers
