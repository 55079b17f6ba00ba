"""The losses of micro-batches add up to the loss of the batch, for every treatment of labels before a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_models.pipeline.micro_batch_loss import GlobalMeanLoss, asks_for_loss

from support import pipelines, zoo
from support.pool import Pool

ROWS, LENGTH, CLASSES = 6, 5, 7


def batch_of(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (ROWS, LENGTH), generator=draw)
    labels[torch.rand(labels.shape, generator=draw) < 0.4] = -100
    labels[0, 0], labels[1] = 3, -100  # a shift changes the count; a row without labels
    return {
        "logits": torch.randn(ROWS, LENGTH, CLASSES, generator=draw, dtype=torch.float64),
        "labels": labels,
        "mask": torch.randint(2, (ROWS, LENGTH), generator=draw).bool(),
        "row_labels": torch.randint(CLASSES, (ROWS,), generator=draw),
        "numbers": torch.randn(ROWS, 2, generator=draw, dtype=torch.float64),
        "start_positions": torch.tensor([1, *torch.randint(3 * LENGTH, (ROWS - 1,), generator=draw).tolist()]),
    }


def shifted(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """As transformers' `ForCausalLMLoss`."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1).to(logits.device))


def shifted_with_sizes(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """As BLOOM did: the sizes of a view name the rows of the micro-batch."""
    rows, length = labels.shape
    size = rows * (length - 1)
    return F.cross_entropy(logits[:, :-1].reshape(size, CLASSES), labels[:, 1:].reshape(size))


def of_what_the_mask_covers(logits: Tensor, labels: Tensor, mask: Tensor, **_: Tensor) -> Tensor:
    """As ELECTRA."""
    return F.cross_entropy(logits[mask], labels[mask])


def changed_in_place(logits: Tensor, labels: Tensor, mask: Tensor, **_: Tensor) -> Tensor:
    labels = labels.clone()
    labels[mask] = -100
    labels.masked_fill_(labels == 2, -100)
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def rows_before_tokens(logits: Tensor, labels: Tensor, row_labels: Tensor, **_: Tensor) -> Tensor:
    """As GPT-2 with two heads."""
    return F.cross_entropy(logits[:, 0], row_labels) + shifted(logits, labels)


def tokens_before_rows(logits: Tensor, labels: Tensor, row_labels: Tensor, **_: Tensor) -> Tensor:
    """As OpenAI GPT with two heads."""
    return shifted(logits, labels) + 2 * F.cross_entropy(logits[:, 0], row_labels)


def regression(logits: Tensor, numbers: Tensor, **_: Tensor) -> Tensor:
    return F.mse_loss(logits[:, 0, :2].squeeze(), numbers.squeeze())


def of_positions(logits: Tensor, start_positions: Tensor, **_: Tensor) -> Tensor:
    """As question answering: positions outside the sequence are ignored."""
    outside = logits.shape[1]
    return F.cross_entropy(logits[..., 0], start_positions.clamp(0, outside), ignore_index=outside)


def of_soft_labels(logits: Tensor, numbers: Tensor, **_: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, 0, :2], numbers.softmax(-1))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "loss",
    [
        *(shifted, shifted_with_sizes, of_what_the_mask_covers, changed_in_place, rows_before_tokens),
        *(tokens_before_rows, regression, of_positions, of_soft_labels),
    ],
)
def test_micro_batch_losses_add_up(loss: Callable[..., Tensor], size: int, seed: int) -> None:
    batch = batch_of(seed)
    shares = GlobalMeanLoss(batch, "Model")
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, ROWS, size):
        micro = {name: x[start : start + size].clone() for name, x in batch.items()}
        with shares.for_micro_batch(micro):
            total += loss(**micro)
    torch.testing.assert_close(total, loss(**batch), rtol=0, atol=1e-12)


def test_targets_that_are_not_labels_are_refused(seed: int) -> None:
    batch = batch_of(seed)
    micro = {name: x[:2].clone() for name, x in batch.items()}
    shares = GlobalMeanLoss(batch, "ContrastiveModel")
    with (
        shares.for_micro_batch(micro),
        pytest.raises(ValueError, match="ContrastiveModel computes cross_entropy of targets"),
    ):
        F.cross_entropy(micro["logits"][:, 0], torch.arange(2))
    with shares.for_micro_batch(micro), pytest.raises(ValueError, match=r"call model\.set_micro_batch_size"):
        F.cross_entropy(micro["logits"][:, 0], torch.randn(2, CLASSES).argmax(-1))  # of hidden states


@pytest.mark.parametrize(
    ("batch", "asks"),
    [
        ({"labels": torch.ones(1)}, True),
        ({"labels": None}, False),
        ({"next_sentence_label": torch.ones(1)}, True),
        ({"end_positions": torch.ones(1)}, True),
        ({"return_loss": True}, True),
        ({"return_loss": False}, False),
        ({"input_ids": torch.ones(1)}, False),
    ],
)
def test_arguments_that_ask_for_a_loss(batch: dict[str, Any], asks: bool) -> None:
    assert asks_for_loss(batch, ("return_loss",)) is asks


SEVERAL_LOSSES = {
    "BertForPreTraining": "bert",
    "BigBirdForPreTraining": "big_bird",
    "GPT2DoubleHeadsModel": "gpt2",
    "ErnieForPreTraining": "ernie",
    "FNetForPreTraining": "fnet",
    "MegatronBertForPreTraining": "megatron-bert",
    "MobileBertForPreTraining": "mobilebert",
    "OpenAIGPTDoubleHeadsModel": "openai-gpt",
    # and one class that shifts its labels despite its name
    "BertGenerationDecoder": "bert-generation",
}


def check_loop(case: pipelines.Case) -> None:
    model = pipelines.model_on_stages(case.name, case.config, case.weights, 1, 2)
    loss = pipelines.run_micro_batches(model, case.batches[0][0])
    assert abs(loss.item() - case.loss[0].item()) < 1e-10
    assert not (lines := pipelines.gradient_differences(model, case.gradients)), "\n".join(lines)


@pytest.mark.parametrize("name", SEVERAL_LOSSES)
def test_a_model_with_several_losses(pool: Pool, name: str, seed: int) -> None:
    case = pipelines.case(name, zoo.config(SEVERAL_LOSSES[name]), seed)
    pool.run(2, check_loop, case)


def test_all_classes_with_two_kinds_of_labels_are_among_them() -> None:
    """Classes with token labels, row labels and pipeline stages compute several losses."""
    from oslo_models import registry

    found = {
        name
        for model_type in registry.ARCHITECTURES
        for name, cls in registry.model_classes(model_type).items()
        if len([key for key in zoo.parameters_of_forward(name) if "label" in key and key != "router_labels"]) > 1
        and not cls.plan(zoo.config_of(name, zoo.config(model_type))).pipeline.single_stage_reason  # type: ignore[attr-defined]
    }
    assert found <= SEVERAL_LOSSES.keys(), found
