"""The table of models names the options of configurations that change tp, pp or ep."""

from __future__ import annotations

import ast
import contextlib
import random
import re
from functools import partial
from typing import Any

import pytest
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

from oslo_models import registry
from oslo_models.cli.option_effects import HEADS
from oslo_models.cli.support_table import BEGIN, END
from oslo_models.config.arguments import Arguments

from support import ROOT, zoo
from support.draws import DEPTHS, variants

pytestmark = pytest.mark.skipif(registry.INSTALLED < (5, 24), reason="the table is of the newest release")

PAGE = (ROOT / "docs/models.md").read_text()
TABLE = PAGE.partition(BEGIN)[2].partition(END)[0]
ROWS = {line.split("`")[1]: line for line in TABLE.splitlines() if line.startswith("| `")}
KINDS = sorted({"shared", *ALLOWED_LAYER_TYPES})
SIZES: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "experts": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
}


def refusals(cls: Any, config: Any) -> set[str]:
    """Return what the constructor refuses of two ranks, two stages and two groups of experts."""
    found = set()
    for kind, sizes in SIZES.items():
        if kind == "experts" and "ranks" in found:
            continue
        try:
            Arguments(**sizes).check_config(cls, config)
        except ValueError:
            found.add(kind)
    if "stages" not in found and (continued := sum(map(len, cls.plan(config).pipeline.continued_blocks.values()))):
        found.add(f"as many stages as blocks, less {continued}")
    return found


def other_value(value: Any, draw: random.Random) -> Any:
    """Return another value of an option, or the same if there is none."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice([each for each in (0, 1, 2, 3, value + 1) if each != value])
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return [value[0], *[draw.choice(KINDS)] * (len(value) - 1)]
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return [*value[:-1], 1]
    return value


@pytest.mark.parametrize("model_type", registry.ARCHITECTURES)
def test_options_that_make_the_constructor_refuse_sizes_are_in_the_table(model_type: str, seed: int) -> None:
    draw, classes = random.Random(f"{model_type} {seed}"), registry.model_classes(model_type)
    for variant in variants(model_type):
        start = zoo.config(variant)
        for name, value in sorted(vars(start).items()):
            if name.startswith("_") or name in {*HEADS, *DEPTHS, "model_type"}:
                continue
            other = other_value(value, draw)
            try:
                changed = zoo.config(variant, **{name: other})
                pairs = [(each, refusals(cls, start) ^ refusals(cls, changed)) for each, cls in classes.items()]
            except Exception:  # noqa: BLE001  no model has this value
                continue
            for each, differ in pairs:
                named = re.search(rf"`{name}(=[^`]*)?`|{name}=", ROWS[model_type])
                assert named or not differ, (each, variant, name, other, differ)


def test_options_of_the_table_make_the_constructor_refuse_sizes() -> None:
    """In one of the configurations of a type, each option of its row changes what the constructor refuses."""
    checked = 0
    for model_type, row in ROWS.items():
        limits = [name for names in re.findall(r"Limits \w+: ([^.]*)\.", row) for name in re.findall(r"`(\w+)`", names)]
        classes = registry.model_classes(model_type).values()
        default = next(iter(classes)).config_class
        stated = re.findall(r" with `(\w+)=([^`]*)`", row)
        for name, text in [*stated, *((name, "") for name in limits)]:
            seen: list[set[str]] = []
            for make in (*(partial(zoo.config, variant) for variant in variants(model_type)), default):
                start = make()
                value = getattr(start, name, None)
                values = [ast.literal_eval(text)] if text else [1, 4]
                if not text and isinstance(value, list):
                    values = [[*value[:-1], 1], [value[0], *["shared"] * (len(value) - 1)]]
                for each in values:
                    with contextlib.suppress(Exception):
                        changed = make(**{name: each})
                        seen += [refusals(cls, start) ^ refusals(cls, changed) for cls in classes]
            assert any(seen), (model_type, name, text, seen)
            checked += 1
    assert checked > 20


def test_the_table_names_options_of_lists_and_nested_configurations() -> None:
    assert "Limits ranks: `num_attention_heads_per_layer`." in ROWS["laguna"]
    assert "Limits stages: `index_topk_freq`, `indexer_types`." in ROWS["glm_moe_dsa"]
    assert "Limits ranks: `ffn_config.ffn_hidden_size`." in ROWS["dbrx"]
    assert "use_prompt" not in ROWS["mvp"]
