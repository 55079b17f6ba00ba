"""With ``share_loss`` and ``share_logits`` every stage knows the outputs of a micro-batch inside the loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oslo_models import GPT2LMHeadModel
from oslo_models.cache_argument import generation_name

from support import pipelines, zoo
from support.float64 import lifted_casts
from support.pipelines import LM, Batch, Case, gather_from_all_ranks, gradient_differences, model_on_stages
from support.pool import Pool
from support.reference import TOLERANCE, differences, full_gradients, full_parameters, reference_model


def check_training(given: Case, logits: dict[int, Tensor], tp: int, pp: int, share: str) -> None:
    """Run two batches before the optimizer step; read the outputs before the backward of each micro-batch."""
    model = model_on_stages(given.name, given.config, given.weights, tp, pp, **{share: True}).train()
    lines = []
    for step, (batch,) in enumerate(given.batches):
        losses = []
        with lifted_casts():
            for row, output in enumerate(model(**batch)):
                losses.append(output.loss.item())
                assert output.loss.requires_grad
                if share == "share_logits":
                    assert model.stage.is_last or not output.logits.requires_grad
                    lines += differences(f"logits {step}, {row}", output.logits, logits[step][row : row + 1], TOLERANCE)
                elif not model.stage.is_last:
                    assert output.logits is None and output.get(generation_name()) is None
                (output.loss / 2).backward()
        lines += differences("sum of losses", torch.tensor(losses).sum().double(), given.loss[step], 1e-6)
        assert gather_from_all_ranks(losses) == [losses] * (tp * pp), "ranks read other losses"
        assert len({round(loss, 9) for loss in losses}) > 1 and not any(map(math.isnan, losses))
    lines += gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)


def reference(variant: str, seed: int) -> tuple[Case, dict[int, Tensor]]:
    """Return the losses and logits of two batches on one process, and the gradients of the mean loss."""
    name, config = LM[variant], pipelines.config(variant)
    batches = [pipelines.batch(name, config, seed + step) for step in range(2)]
    model, losses, logits = reference_model(name, config, seed), [], {}
    weights = full_parameters(model)
    for step, batch in enumerate(batches):
        with lifted_casts():
            output = model(**batch)
            (output.loss / 2).backward()
        losses.append(output.loss.detach())
        logits[step] = output.logits.detach()
    return Case(name, config, [[batch] for batch in batches], weights, losses, full_gradients(model)), logits


@pytest.mark.parametrize("share", ["share_loss", "share_logits"])
@pytest.mark.parametrize(("variant", "tp", "pp"), [("gpt2", 1, 2), ("gpt2", 1, 3), ("gpt2", 2, 2), ("t5", 1, 3)])
def test_losses_and_logits_are_known_in_the_body_of_the_loop(
    pool: Pool, variant: str, tp: int, pp: int, share: str, seed: int
) -> None:
    given, logits = reference(variant, seed)
    pool.run(tp * pp, check_training, given, logits, tp, pp, share)


def check_evaluation(name: str, config: Any, weights: dict[str, Tensor], batch: Batch, expected: Any, pp: int) -> None:
    model = model_on_stages(name, config, weights, 1, pp, micro_batch_size=2, share_logits=True).eval()
    labels = {key for key in batch if "label" in key or "positions" in key}
    lines, unlabelled = [], {key: value for key, value in batch.items() if key not in labels}
    for given in (batch, unlabelled):
        with torch.no_grad(), lifted_casts():
            for number, output in enumerate(model(**given)):
                assert not (output.loss is not None) or math.isfinite(output.loss.item())
                assert (output.loss is None) == (given is unlabelled)
                for key, whole in expected.items():
                    rows = whole[2 * number : 2 * number + 2]
                    lines += differences(f"{key} of {number}", output[key], rows, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("kind", ["ForQuestionAnswering", "ForSequenceClassification"])
def test_logits_of_every_name_are_known_in_evaluation(pool: Pool, kind: str, seed: int) -> None:
    """Also without labels, and with two kinds of logits."""
    name, config = f"Bert{kind}", pipelines.config("bert")
    model, batch = reference_model(name, config, seed).eval(), pipelines.batch(name, config, seed)
    with torch.no_grad(), lifted_casts():
        outputs = model(**batch)
    logits = {key: value for key, value in outputs.items() if "logits" in key}
    assert set(logits) == ({"start_logits", "end_logits"} if kind == "ForQuestionAnswering" else {"logits"})
    pool.run(3, check_evaluation, name, config, full_parameters(model), batch, logits, 3)


def check_leaving(given: Case, pp: int) -> None:
    """Leave an evaluation early, after different numbers of micro-batches on the stages."""
    model = pipelines.case_on_stages(given, 1, pp, share_logits=True).eval()
    (batch,) = given.batches[0]
    for at in range(pipelines.ROWS):
        with torch.no_grad():
            for number, _ in enumerate(model(**batch)):
                if number == at:
                    break
            if at < pipelines.ROWS - 1:
                with pytest.raises(RuntimeError, match="was left before its end"):
                    model(**batch)
            with lifted_casts():
                losses = [output.loss.item() for output in model(**batch)]
        assert not differences("loss", torch.tensor(losses).sum().double(), given.loss[0], 1e-6)
        assert not any(param.grad is not None for param in model.parameters())


def test_evaluation_may_be_left_early(pool: Pool, seed: int) -> None:
    pool.run(3, check_leaving, pipelines.lm_case("gpt2", seed), 3)


def test_sharing_options_are_checked() -> None:
    config = zoo.config("gpt2")
    for name in ("share_loss", "share_logits"):
        with pytest.raises(ValueError, match=f"{name} must be True or False, got 'yes'"):
            GPT2LMHeadModel.from_config_with_parallel(config, **{name: "yes"})
    with pytest.raises(ValueError, match="share_logits=True needs the logits that gather_logits=False leaves out"):
        GPT2LMHeadModel.from_config_with_parallel(config, share_logits=True, gather_logits=False)
