"""Compares installed packages with the contracts, at the first use of a feature that relies on them."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pkgutil import resolve_name
from typing import Any

from oslo_models.contracts.fingerprint import Function, combined, fingerprint
from oslo_models.contracts.listing import CONTRACTS, LAYERS, Contract, LayerContract
from oslo_models.contracts.recorded import RECORDED
from oslo_models.contracts.sources import functions_of, globals_of, installed_version


class ContractError(ImportError):
    """An installed package differs from the checked releases."""


EAGER = "eager_attention_forward"
"""Name of the eager attention function. Layers that select an attention function fall back to it."""
_BY_NAME = {contract.original: contract for contract in CONTRACTS}


def path_of(layer: str) -> str:
    """Return the dotted name of the forward of a transformers layer, such as ``llama.LlamaRMSNorm``."""
    model, name = layer.split(".")
    return f"transformers.models.{model}.modeling_{model}.{name}.forward"


def selection_of(forward: Function) -> str:
    """Return the fingerprint of the statements that select the attention function of a layer."""
    found = [
        each
        for each in ast.walk(forward)
        if isinstance(each, ast.stmt) and each is not forward and _reads(each, "_attn_implementation")
    ]
    return combined(found)


def _reads(statement: ast.stmt, attribute: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == attribute for node in ast.walk(statement))


# Layers ---------------------------------------------------------------------------------------------------------------


def changed_layer(kinds: tuple[str, ...], layer: str, forward: Callable[..., Any]) -> str | None:
    """Describe the changes of the installed release in a layer that fused modules replace, or return ``None``.

    Args:
        kinds: the kinds of the layer in `LAYERS`.
        layer: the name of the layer, ``model.Class``.
        forward: the layer's forward in this process.
    """
    return _changed_layer(kinds, layer, forward, globals_of(forward)) if kinds else None


@cache
def _changed_layer(
    kinds: tuple[str, ...], layer: str, forward: Callable[..., Any], called: tuple[Any, ...]
) -> str | None:
    name = f"{layer.partition('.')[2]}.forward"
    for kind in kinds:
        contract, functions = LAYERS[kind], functions_of(forward)
        if not functions:
            return f"the source of {name} cannot be read"
        if contract.selects:
            eager = inspect.unwrap(forward).__globals__.get(EAGER)
            used = functions_of(eager) if inspect.isfunction(eager) else []
            is_known = bool(used) and _is_known(contract, " selects", selection_of(functions[0]))
        else:
            used, is_known = functions[1:], _is_known(contract, "", fingerprint(functions[0]))
        changed = [each.name for each in used if fingerprint(each) not in RECORDED.get(helper_key(each.name), ())]
        if changed or not is_known:
            return f"transformers {installed_version('transformers')} changed {name if not is_known else changed[0]}"
    return None


def _is_known(contract: LayerContract, suffix: str, found: str) -> bool:
    return any(found in RECORDED.get(f"{path_of(original)}{suffix}", ()) for original in contract.originals)


def helper_key(name: str) -> str:
    """Return the fingerprint key of a function that layers call, in the file of any model."""
    return f"transformers.models {name}"


# Everything else ------------------------------------------------------------------------------------------------------


def broken(original: str) -> str | None:
    """Describe the changes of the installed release in a function of `CONTRACTS`, or return ``None``."""
    contract = _BY_NAME[original]
    try:
        found = resolve_name(original)
    except (ImportError, AttributeError):
        return _told(contract, "has no")
    function = inspect.unwrap(getattr(found, "__func__", found))
    return _broken(contract, function) if inspect.isfunction(function) else None


@cache
def _broken(contract: Contract, function: Callable[..., Any]) -> str | None:
    if contract.parameters:
        names = [each for each in inspect.signature(function).parameters if each in contract.parameters]
        if tuple(names) != contract.parameters:
            return _told(contract, "changed the parameters of")
    if contract.is_copied:
        functions = functions_of(function)
        if not functions or not _is_recorded(contract.original, functions):
            return _told(contract, "changed")
    return None


def _is_recorded(original: str, functions: Iterable[Function]) -> bool:
    """Return whether a function and its callees are from checked releases."""
    first, *called = functions
    names = [original, *(f"{original} {each.name}" for each in called)]
    return all(fingerprint(f) in RECORDED.get(name, ()) for f, name in zip((first, *called), names, strict=True))


def _told(contract: Contract, verb: str) -> str:
    package, _, _ = contract.original.partition(".")
    short = ".".join(contract.original.split(".")[-2:])
    return f"{package} {installed_version(package)} {verb} {short}"


def holds(original: str, without: str) -> bool:
    """Return whether a function of `CONTRACTS` is as recorded. If not, warn once.

    Args:
        without: the caller's fallback, for the text of the warning.
    """
    changed = broken(original)
    if changed is not None:
        _warn(f"{changed}, so {without}")
    return changed is None


@cache
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def require(*users: str) -> None:
    """Raise an error if an installed package differs from the contracts of some modules of this library.

    Args:
        users: modules below ``oslo_models``, or packages of them.

    Raises:
        ContractError: names the changes.
    """
    if message := _required(users):
        raise ContractError(message)


@cache
def _required(users: tuple[str, ...]) -> str | None:
    found = [broken(each.original) for each in CONTRACTS if _is_used(each, users)]
    changed = [each for each in found if each is not None]
    if not changed:
        return None
    return (
        f"{'; '.join(changed)}: oslo_models.{users[0]} relies on it as it was. Install a version that this release of "
        "oslo_models was checked against (python -m oslo_models.contracts lists them), or a newer oslo_models"
    )


def _is_used(contract: Contract, users: Iterable[str]) -> bool:
    return any(f"{used}.".startswith(f"{user}.") for used in contract.used_by for user in users)


def sorted_versions(numbers: Iterable[str]) -> list[str]:
    """Return versions in ascending order."""
    return sorted(numbers, key=lambda number: [int(part) for part in number.split(".") if part.isdigit()])
