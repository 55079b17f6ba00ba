"""Contracts with other packages: the code that this library relies on, and checks that it is unchanged."""

from oslo_models.contracts.checks import ContractError, broken, changed_layer, holds, require

__all__ = ["ContractError", "broken", "changed_layer", "holds", "require"]
