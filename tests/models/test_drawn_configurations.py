"""Classes of every model type with randomly drawn configurations match transformers on six meshes; see `draws`.

`make test` runs one class of each model type on one mesh, chosen by the commit; `make test-zoo` runs every class on
every mesh, with two draws for each class.
"""

from __future__ import annotations

import random
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from oslo_models import registry

from support import draws, pipelines, zoo
from support.generation import GREEDY, Tokens, depend_on_rounding, generate_tokens, token_differences
from support.pipelines import loop_differences
from support.pool import Pool
from support.reference import Step, reference_model, saved_step, step_differences

Mesh = tuple[int, int, list[int] | None]
MESHES: tuple[Mesh, ...] = (
    *((2, 1, None), (3, 1, None), (1, 2, None)),
    *((2, 2, None), (3, 1, [2, 1, 1]), (2, 2, [1, 3])),
)
"""``(tensor_parallel_size, pipeline_parallel_size, tensor_parallel_shares)``"""


def check_mesh(step: Step, tokens: Tokens, options: dict[str, Any], folder: Path, mesh: Mesh) -> None:
    """Check outputs or loss, every gradient and greedy tokens; or the plan's refusal."""
    cls: Any = registry.find(step.name)
    tp, pp, shares = mesh
    options = {**options, "tensor_parallel_shares": shares}
    plan = cls.plan(step.config)
    limit = 1 if plan.single_rank_reason else plan.max_ranks() or tp
    if tp > limit or (pp > 1 and plan.pipeline.single_stage_reason):
        with pytest.raises(ValueError, match=r"parallel_size=\d is more than"):
            cls.from_pretrained_with_parallel(folder, tp, pp, **options)
        return
    # batch normalisation uses micro-batch statistics, so only a micro-batch of the whole batch matches one process
    mixes_rows = getattr(step.config, "conv_pos_batch_norm", False)
    size = 2 if cls.loss_is_mean and not mixes_rows else pipelines.ROWS
    model = cls.from_pretrained_with_parallel(folder, tp, pp, size, gather_logits=True, **options).train()
    lines = token_differences(model, step.batch, tokens, GREEDY)  # before a step changes statistics
    model.train()
    for module in model.modules():
        if hasattr(module, "expert_capacity"):  # the routers of NLLB-MoE keep the capacity of the last evaluation
            module.expert_capacity = step.config.expert_capacity
    torch.manual_seed(0)  # Wav2Vec2 samples its targets
    lines += step_differences(model, step) if pp == 1 else loop_differences(model, step)
    assert not lines, "\n".join(lines)


WITHOUT_TOKENS = ("DoubleHeadsModel", "ForCTC", "ToSpeech", "M4TModel", "M4Tv2Model")
"""Ends of the names of classes that do not generate tokens."""


def reference(name: str, drawn: draws.Draw, seed: int, folder: Path) -> tuple[Step, Tokens]:
    """Return the step and tokens of transformers' class; raise where it cannot run the drawn configuration."""
    config = drawn.config
    plan = registry.find(name).plan(config)  # type: ignore[attr-defined]
    batch = (zoo if plan.pipeline.single_stage_reason else pipelines).batch(name, config, seed)
    batch = draws.kind_of_labels(name, config, batch, seed)
    step = saved_step(name, config, seed, batch, folder)
    if not all(value.isfinite().all() for value in (step.value, *step.gradients.values()) if value is not None):
        raise ValueError("gradients are not finite")
    generates = zoo.original(name).can_generate() and not name.endswith(WITHOUT_TOKENS)
    tokens = generate_tokens(reference_model(name, config, seed), batch, GREEDY) if generates else {}
    if depend_on_rounding(name, config, seed, batch, tokens, GREEDY):
        raise ValueError("the chosen blocks of keys depend on rounding")
    return step, tokens


def check_class(pool: Pool, folder: Path, name: str, seed: int, meshes: tuple[Mesh, ...], record: Any) -> None:
    model_type = next(kind for kind in registry.ARCHITECTURES if name in registry.model_classes(kind))
    refused: list[str] = []
    for drawn in draws.draws(name, model_type, seed):
        try:
            step, tokens = reference(name, drawn, seed, folder)
            break
        except Exception as error:  # noqa: BLE001  whatever transformers raises
            refused.append(f"{drawn.text}: {type(error).__name__}: {error}"[:600])
    else:
        pytest.fail("\n".join(["transformers can do none of these:", *refused]))
    record("refused by transformers", refused)
    options = {key: value for key, value in drawn.options.items() if key == "attn_implementation"}
    failures = []
    for mesh in meshes:
        try:
            pool.run(mesh[0] * mesh[1], check_mesh, step, tokens, options, folder, mesh)
        except Exception:  # noqa: BLE001  to see all meshes that fail
            failures.append(f"{mesh}: {traceback.format_exc(limit=0)}")
    assert not failures, "\n".join([drawn.text, *(f"(not by transformers: {line})" for line in refused), *failures])


@pytest.mark.drawn(92)
@pytest.mark.parametrize("name", [name for kind in registry.ARCHITECTURES for name in registry.model_classes(kind)])
def test_every_class_with_a_drawn_configuration_matches_transformers(
    pool: Pool, tmp_path: Path, name: str, seed: int, request: pytest.FixtureRequest, record_property: Any
) -> None:
    """`make test` draws one mesh, `make test-zoo` one configuration for each half of the meshes."""
    parts = [(MESHES[::2], seed), (MESHES[1::2], seed + 1)]
    if request.node.get_closest_marker("zoo") is None:
        parts = [((random.Random(f"{name} {seed}").choice(MESHES),), seed)]
    for meshes, draw in parts:
        check_class(pool, tmp_path / str(draw), name, draw, meshes, record_property)
