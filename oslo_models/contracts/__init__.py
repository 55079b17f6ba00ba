"""Contracts with other packages: lists the foreign code that this library relies on, and checks it for changes."""

from oslo_models.contracts.checks import ContractError, broken, changed_layer, holds, require

__all__ = ["ContractError", "broken", "changed_layer", "holds", "require"]
