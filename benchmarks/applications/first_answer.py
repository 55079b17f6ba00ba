"""An application as people write it: it loads a model and answers once. ``deploy-start`` measures it.

Prints the seconds since its process was started, imports included, and the answer, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main(cls: str, checkpoint: str, deployed: bool) -> None:
    if deployed:
        import oslo_models

        load = getattr(oslo_models, cls).from_pretrained_with_parallel
        model = load(checkpoint, tensor_parallel_size=2, deploy=True)
    else:
        import transformers

        model = getattr(transformers, cls).from_pretrained(checkpoint)
    import torch

    ids = torch.arange(3, 11).unsqueeze(0)
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    print(json.dumps({"seconds": seconds, "answer": answer.flatten().tolist()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "deployed")
