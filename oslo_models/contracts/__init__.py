"""What this library relies on in other packages although it may change without notice, and checks of it."""

from oslo_models.contracts.checks import ContractError, broken, changed_layer, holds, require

__all__ = ["ContractError", "broken", "changed_layer", "holds", "require"]
