"""The document of tensor_parallel (MIT) does what it says, run as `documents.ADAPTED` and `DEVICES` tell."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from conftest import ROOT
from documents import ADAPTED, paste
from float64 import lifted_casts

USE = """
import transformers
import tensor_parallel as tp
tokenizer = transformers.AutoTokenizer.from_pretrained("facebook/opt-13b")
model = transformers.AutoModelForCausalLM.from_pretrained("facebook/opt-13b")  # use opt-125m for testing

model = tp.tensor_parallel(model, ["cuda:0", "cuda:1"])  # <- each GPU has half the weights

inputs = tokenizer("A cat sat", return_tensors="pt")["input_ids"].to("cuda:0")
outputs = model.generate(inputs, num_beams=5)
print(tokenizer.decode(outputs[0])) # A cat sat on my lap for a few minutes ...

model(input_ids=inputs, labels=inputs).loss.backward()  # training works as usual
"""

SAVING = """
import torch
import transformers
import tensor_parallel as tp

model = tp.tensor_parallel(
    transformers.AutoModelForCausalLM.from_pretrained("facebook/opt-13b"),
)

# A whole lot of trainig...

with tp.save_tensor_parallel(model):
    torch.save(model.state_dict(), "/tmp/")
    # or
    model.save_pretrained("/tmp/")
"""

DEVICES = {
    "import tensor_parallel as tp": "import oslo_models as tp",
    "facebook/opt-13b": "gpt2",
    '["cuda:0", "cuda:1"]': '["cpu", "cpu"]',
    '.to("cuda:0")': "",
    '("gpt2"),\n)': '("gpt2"), ["cpu", "cpu"]\n)',  # by default all GPUs
    'torch.save(model.state_dict(), "/tmp/")': 'torch.save(model.state_dict(), "state.pt")',  # that was a directory
    '"/tmp/"': '"saved"',
}


def test_document(hub: Any, monkeypatch: Any, capsys: Any) -> None:
    for printed, adapted in DEVICES.items():
        monkeypatch.setitem(ADAPTED, printed, adapted)
    model = hub().eval()
    made = paste(USE)
    inputs = made["inputs"]
    assert torch.equal(made["outputs"], model.generate(inputs, num_beams=5))
    assert capsys.readouterr().out.startswith("A cat sat")
    model(input_ids=inputs, labels=inputs).loss.backward()
    other = made["model"]
    assert isinstance(other, hf.GPT2LMHeadModel) and len([*other.parameters()]) == 2 * len([*model.parameters()])
    torch.testing.assert_close(other.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    other = paste(SAVING)["model"]
    saved = hf.AutoModelForCausalLM.from_pretrained("saved")
    for state in (saved.state_dict(), torch.load("state.pt"), other.state_dict()):
        assert list(state) == list(model.state_dict())
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_readme(hub: Any) -> None:
    """The example of the README trains as one process does."""
    chapter = (ROOT / "README.md").read_text().split("\n### In a notebook\n")[1]
    example = chapter.split("```python\n")[1].split("```")[0]
    example = example.replace('["cuda:0", "cuda:1"]', '["cpu", "cpu"]').replace("/path/to/merged", "merged")
    model, lines = hub().eval(), example.splitlines()
    loader = [{"input_ids": torch.randint(3, 200, (2, 5))} for _ in range(2)]
    whole = [line for line in lines if "oslo_models" not in line and "generate" not in line and "save" not in line]
    plain = "\n".join(whole).replace("model.clip_grad_norm_(", "torch.nn.utils.clip_grad_norm_(model.parameters(), ")
    with lifted_casts():
        model = paste(plain, torch=torch, loader=loader)["model"]
        paste(example, torch=torch, loader=loader)
    saved = hf.AutoModelForCausalLM.from_pretrained("merged").state_dict()
    assert all(torch.allclose(saved[name], tensor, rtol=0, atol=1e-8) for name, tensor in model.state_dict().items())
