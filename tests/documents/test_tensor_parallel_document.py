"""The document of tensor_parallel (MIT) runs as printed, with the replacements of `documents.ADAPTED` and `DEVICES`."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from support import ROOT
from support.documents import ADAPTED, run_block
from support.float64 import lifted_casts

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

DISPATCH = """
import accelerate
import transformers

import tensor_parallel as tp

# Initialize a weightless tensor_parallel model from MyModel
with accelerate.init_empty_weights():
    model = tp.TensorParallel(
        MyModel(),
        device_ids=[0, 1] # and prepare it to be put on GPUs 0 and 1
    )

# Load partial state_dict for MyModel
state_dict = torch.load("my_model_part_1_of_5.bin")

# Convert it into a tensor_parallel state_dict
tensor_parallel_state_dict = tp.convert_state_dict(
    state_dict,
    tensor_parallel_config=model.tensor_parallel_config,
    world_size=len(model.devices),
)

# Dispatch the partial state_dict (load_state_dict doesn't work with meta so here I use accelerate)
device_map = tp.infer_sharded_device_map(model)
for param_name, param in state_dict.items():
    module_name = param_name
    while len(module_name) > 0 and module_name not in device_map:
        module_name = ".".join(module_name.split(".")[:-1])
    param_device = device_map[module_name]
    accelerate.utils.set_module_tensor_to_device(model, param_name, param_device, value=param)
"""

DEVICES = {
    "device_ids=[0, 1]": 'device_ids=["cpu", "cpu"]',
    "in state_dict.items()": "in tensor_parallel_state_dict.items()",  # converted just above
    "import tensor_parallel as tp": "import oslo_models as tp",
    "facebook/opt-13b": "gpt2",
    '["cuda:0", "cuda:1"]': '["cpu", "cpu"]',
    '.to("cuda:0")': "",
    '("gpt2"),\n)': '("gpt2"), ["cpu", "cpu"]\n)',  # by default all GPUs
    'torch.save(model.state_dict(), "/tmp/")': 'torch.save(model.state_dict(), "state.pt")',  # that was a directory
    '"/tmp/"': '"saved"',
}


def test_tensor_parallel_document_runs_as_printed(hub: Any, monkeypatch: Any, capsys: Any) -> None:
    for original, adapted in DEVICES.items():
        monkeypatch.setitem(ADAPTED, original, adapted)
    model = hub().eval()
    made = run_block(USE)
    inputs = made["inputs"]
    assert torch.equal(made["outputs"], model.generate(inputs, num_beams=5))
    printed = capsys.readouterr().out  # DeepSpeed, if accelerate imports it now, says so first
    assert "\nA cat sat" in "\n" + printed
    model(input_ids=inputs, labels=inputs).loss.backward()
    other = made["model"]
    assert isinstance(other, hf.GPT2LMHeadModel) and len([*other.parameters()]) == 2 * len([*model.parameters()])
    torch.testing.assert_close(other.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    other = run_block(SAVING)["model"]
    saved = hf.AutoModelForCausalLM.from_pretrained("saved")
    for state in (saved.state_dict(), torch.load("state.pt"), other.state_dict()):
        assert list(state) == list(model.state_dict())
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_tensor_parallel_dispatch_block_runs(hub: Any, monkeypatch: Any) -> None:
    """Load weights one after another; tied weights stay tied."""
    for printed, adapted in DEVICES.items():
        monkeypatch.setitem(ADAPTED, printed, adapted)
    model = hub().eval()
    torch.save(model.state_dict(), "my_model_part_1_of_5.bin")
    other = run_block(DISPATCH, torch=torch, MyModel=lambda: hf.GPT2LMHeadModel(model.config).double())["model"].eval()
    other.tie_weights()
    inputs = torch.tensor([[5, 6, 7]])
    assert torch.equal(other.generate(inputs, pad_token_id=0), model.generate(inputs, pad_token_id=0))
    assert all(part.lm_head.weight is part.transformer.wte.weight for part in other.parts)


def test_notebook_guide_runs(hub: Any) -> None:
    """The example of our documentation matches training on one process."""
    example = (ROOT / "docs/guides/notebook.md").read_text().split("```python\n")[1].split("```")[0]
    example = example.replace('["cuda:0", "cuda:1"]', '["cpu", "cpu"]').replace("/path/to/merged", "merged")
    model, lines = hub().eval(), example.splitlines()
    loader = [{"input_ids": torch.randint(3, 200, (2, 5))} for _ in range(2)]
    whole = [line for line in lines if "oslo_models" not in line and "generate" not in line and "save" not in line]
    plain = "\n".join(whole).replace("model.clip_grad_norm_(", "torch.nn.utils.clip_grad_norm_(model.parameters(), ")
    with lifted_casts():
        model = run_block(plain, torch=torch, loader=loader)["model"]
        run_block(example, torch=torch, loader=loader)
    saved = hf.AutoModelForCausalLM.from_pretrained("merged").state_dict()
    assert all(torch.allclose(saved[name], tensor, rtol=0, atol=1e-8) for name, tensor in model.state_dict().items())
