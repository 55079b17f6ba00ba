"""Fingerprints: what changes them, and that every supported Python gives the same ones."""

from __future__ import annotations

import ast
import textwrap

import pytest

from oslo_models.contracts.fingerprint import fingerprint, parameters
from oslo_models.contracts.sources import functions_of

ORIGINAL = '''
def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, **kwargs) -> Tensor:
    """Scale."""
    # a comment
    first: Tensor = x[..., 1:]
    if mask is None:
        return f"{first!r:>{scale}}"
    return [each * 0.5 for each in first]
'''


def of(source: str) -> str:
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    return fingerprint(function)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", ""),
        ('"""Scale."""', '"""Another text."""'),
        ("x: Tensor, mask: Tensor | None = None", "x, mask: Any = None"),
        (" -> Tensor", ""),
        ("first: Tensor =", "first ="),
        ("first", "beginning"),
        ("each", "one"),
        ("mask is None", "(mask\n    is None)"),
        ("def forward", "@deprecate_kwarg('past', '5.40.0', new_name='cache')\ndef forward"),
    ],
)
def test_changes_without_effect(old: str, new: str) -> None:
    assert of(ORIGINAL.replace(old, new)) == of(ORIGINAL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mask: Tensor | None", "hidden: Tensor | None"),
        ("= 1.0", "= 2.0"),
        ("0.5", "0.25"),
        ("is None", "is not None"),
        ("x[..., 1:]", "x[..., :1]"),
        ("each * 0.5", "each + 0.5"),
        (", *, scale", ", scale"),
        ("!r", "!s"),
        ("in first", "in mask"),
        ("def forward", "@torch.no_grad()\ndef forward"),
    ],
)
def test_changes_with_an_effect(old: str, new: str) -> None:
    assert of(ORIGINAL.replace(old, new)) != of(ORIGINAL)


def test_fingerprint_is_the_same_in_every_python() -> None:
    """Written down once; each Python that runs this test compares its own."""
    assert of(ORIGINAL) == "dc63467995275a4b"


def test_parameters() -> None:
    function = ast.parse(textwrap.dedent(ORIGINAL)).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert parameters(function) == ("self", "x", "mask", "scale", "**kwargs")


def test_functions_that_a_function_calls() -> None:
    from transformers.models.llama import modeling_llama as llama

    found = [each.name for each in functions_of(llama.LlamaAttention.forward)]
    assert found[0] == "forward"
    assert {"apply_rotary_pos_emb", "rotate_half", "repeat_kv", "eager_attention_forward"} <= {*found}
