"""The chapter "Data Processing" of OSLO's documents runs as printed, with the replacements of `ADAPTED`.

The strings below are the code blocks of OSLO's USAGE document (Apache-2.0). `ADAPTED` lists every replacement in them:
omissions (``...``), misspellings and sizes.
"""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from oslo_models.data import IndexedDataset, InfiniteDataLoader

from support import ROOT
from support.corpora import expected, sources, tokenizer

ADAPTED = {
    "from oslo import": "from oslo_models import",
    '"/path/to/': '"path/to/',
    ", ...\n]": "\n]",
    ", ...]": "]",
    "AutoTokenizer.from_pretrained(...)": 'AutoTokenizer.from_pretrained("tokenizer")',
    "YOUR_OWN_LIST_OF_STRING": "given",
    "max_seq_length=2048": "max_seq_length=16",
    "max_seq_length=test": "max_seq_length=16",
    "tarin2": "train2",
    "dataset: Dataset = ...": "dataset: Dataset = given",
    "sampler: Sampler = ...": "sampler: Sampler = given_sampler",
    "num_replicas=dist.get_world_size()": "num_replicas=2",
    "rank=dist.get_rank()": "rank=1",
    "dataloader: DataLoader = ...": "dataloader: DataLoader = given_loader",
    "# infinitely repeating !\n    pass": "batches.append(data)\n    if len(batches) == 25: break",
}

PREPROCESSOR = """
import os
from transformers import AutoTokenizer
from oslo import DatasetPreprocessor

data_names=[
  "/path/to/wikitext103", "/path/to/lambada", ...
]

# 1. Create tokenizer
os.environ["TOKENIZERS_PARALLELISM"] = "true"
tokenizer = AutoTokenizer.from_pretrained(...)

# 2. Create preprocessor
preprocessor = DatasetPreprocessor(
    tokenizer=tokenizer,
    binarization_impl="mmap",
    eod_token_id=tokenizer.eos_token_id,
    append_eod=True,
)
"""
TEXT = """
# 3-1. Preform preprocessing (.txt)
# save_file_name + '.idx' and '.bin' will be created.
for data_name in data_names:
    preprocessor.preprocess(
        open(data_name + ".txt"),
        save_file_name=data_name,
        log_interval=100,
    )
"""
JSONL = """
# 3-2. Perform preprocessing (.jsonl, Megatron-LM format)
# 1 {"text": "blah blah"}
# 2 {"text": "blah blah"}
# 3 ...
for data_name in data_names:
  preprocessor.preprocess(
        preprocessor.open_jsonl(
            data_name, 
            json_key="text",
        ),
        save_file_name=data_name,
        log_interval=100,
  )
"""  # noqa: W291
STRINGS = """
# 3-3 Perform preprocessing (any other format)
for data_name in data_names:
  preprocessor.preprocess(
        YOUR_OWN_LIST_OF_STRING,
        save_file_name=data_name,
        log_interval=100,
  )
"""
CAUSAL = """
from oslo import DatasetForCausalLM

# Assume that the total number of data is 10,000.
# The 0th to 7,999th samples are used as training data.
train = DatasetForCausalLM(
    data_name="/path/to/wikitext103",
    start_weight=0.0,
    end_weight=0.8,
    split_type="train",
    max_seq_length=2048,
    binarization_impl="mmap",
)

# The 8,000th to 8,999th samples are used as validation data.
valid = DatasetForCausalLM(
    data_name="/path/to/wikitext103",
    start_weight=0.8,
    end_weight=0.9,
    split_type="valid",
    max_seq_length=2048,
    binarization_impl="mmap",
)

# The 9,000th to 9,999th samples are used as test data.
test = DatasetForCausalLM(
    data_name="/path/to/wikitext103",
    start_weight=0.9,
    end_weight=1.0,
    split_type="valid",
    max_seq_length=test,
    binarization_impl="mmap",
)
"""
BLENDER = """
from oslo import DatasetBlender

train_dataset_list = [train1, tarin2, train3, ...]
valid_dataset_list = [valid1, valid2, valid3, ...]
test_dataset_list = [test1, test2, test3, ...]

train_dataset = DatasetBlender(train_dataset_list)
valid_dataset = DatasetBlender(valid_dataset_list)
test_dataset = DatasetBlender(test_dataset_list)
"""
SAMPLER = """
from oslo import DistributedProxySampler
from torch.utils.data import Sampler, Dataset
import torch.distributed as dist

# Prepare your dataset and sampler
dataset: Dataset = ...
sampler: Sampler = ...

sampler = DistributedProxySampler(
    sampler=sampler,
    num_replicas=dist.get_world_size(),
    rank=dist.get_rank()
)
"""
LOADER = """
from torch.utils.data import DataLoader
from oslo import InfiniteDataLoader

# Prepare your dataloader
dataloader: DataLoader = ...

dataloader = InfiniteDataLoader(dataloader)

for data in dataloader:
    # infinitely repeating !
    pass
"""


def paste(block: str, names: dict[str, Any]) -> None:
    for printed, adapted in ADAPTED.items():
        block = block.replace(printed, adapted)
    exec(compile(block, "USAGE.md", "exec"), names)


def test_data_processing_chapter_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the document sets it; the test restores it
    tok = tokenizer()
    tok.save_pretrained("tokenizer")
    lines = [line + "\n" for text in sources() for line in text.splitlines()]
    texts = {name: random.Random(seed + len(name)).sample(lines, 500) for name in ("wikitext103", "lambada")}
    Path("path/to").mkdir(parents=True)
    names: dict[str, Any] = {}
    paste(PREPROCESSOR, names)
    for name, chosen in texts.items():
        Path(f"path/to/{name}.txt").write_text("".join(chosen))
        Path(f"path/to/{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen[:300]))
    for block, given in ((TEXT, slice(500)), (JSONL, slice(300)), (STRINGS, slice(400))):
        names["given"] = texts["lambada"][:400]
        paste(block, names)
        for name, chosen in texts.items():
            right = names["given"] if block == STRINGS else chosen[given]
            found = [document.tolist() for document in IndexedDataset(f"path/to/{name}")]
            assert found == expected(right, tok, tok.eos_token_id)

    paste(TEXT, names)
    paste(CAUSAL, names)
    splits = [names[split] for split in ("train", "valid", "test")]
    documents = IndexedDataset("path/to/wikitext103")
    for split, (start, stop) in zip(splits, ((0, 400), (400, 450), (450, 500)), strict=True):
        tokens = np.concatenate([documents[i] for i in range(start, stop)])
        assert len(split) == (len(tokens) - 1) // 15 and all(len(sample) == 16 for sample in split)
        assert set(np.concatenate(list(split))) <= set(tokens)
    assert not np.array_equal(splits[1][0], splits[2][0])  # OSLO 1 served the validation set for the test set

    for number in (1, 2, 3):
        names |= {f"{split}{number}": names[split] for split in ("train", "valid", "test")}
    paste(BLENDER, names)
    for split in ("train", "valid", "test"):
        blended = names[f"{split}_dataset"]
        assert len(blended) == 3 * len(names[split])
        assert [blended.place(index)[0] for index in range(9)] == [0, 1, 2] * 3

    names |= {"given": names["train_dataset"], "given_sampler": RandomSampler(names["train_dataset"])}
    paste(SAMPLER, names)
    half = list(names["sampler"])
    assert len(half) == -(-len(names["train_dataset"]) // 2) and len(set(half)) == len(half)

    names |= {
        "given_loader": DataLoader(names["dataset"], 4, sampler=list(islice(names["sampler"], 10))),
        "batches": [],
    }
    paste(LOADER, names)
    first = torch.stack([torch.from_numpy(names["dataset"][index]) for index in half[:4]])
    assert [len(batch) for batch in names["batches"]] == [4, 4, 2] * 8 + [4]
    assert torch.equal(names["batches"][0], first) and torch.equal(names["batches"][24], first)


def test_data_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data guide of our documentation works as it says, and a resumed run gets the next sample."""
    import transformers as hf

    from oslo_models import GPT2LMHeadModel
    from oslo_models.cli import main as cli

    guide = (ROOT / "docs/guides/data.md").read_text()
    command, prepare, train, resume = re.findall("^```(?:python)?\n(.*?)^```$", guide, flags=re.S | re.M)
    monkeypatch.chdir(tmp_path)
    lines = [line + "\n" for text in sources() for line in text.splitlines()]
    Path("wiki.txt").write_text("".join(lines))
    Path("web.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    tokenizer().save_pretrained("gpt2")
    assert cli.main(command.split("#")[0].split()[1:]) == 0
    by_command = Path("data/wiki.bin").read_bytes()

    config = hf.GPT2Config(vocab_size=1500, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel.from_config_with_parallel(config, seed=1)
    optimizer = torch.optim.SGD(model.gpu_parameters(), lr=0.1)
    names = {"tokenizer": tokenizer(), "model": model, "optimizer": optimizer, "checkpoint": "step-3"}
    exec(prepare, names)
    assert Path("data/wiki.bin").read_bytes() == by_command
    train = train.replace("1024", "32").replace("range(1000)", "range(3)")
    exec(train.replace("num_workers=2", "num_workers=0"), names)
    assert names["step"] == 2 and model.transformer.wte.weight.grad.abs().sum() > 0
    following = next(names["loader"])
    loader = InfiniteDataLoader(DataLoader(names["train"], 8, sampler=names["sampler"]))
    exec(resume, {**names, "loader": loader})
    assert all(torch.equal(following[key], value) for key, value in next(loader).items())
