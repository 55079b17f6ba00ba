"""``deploy=True``: worker processes hold the model, and a plain Python script calls it as if it were here."""

from oslo_models.deploy.engine import EngineError
from oslo_models.deploy.model import Deployment, deploy

__all__ = ["Deployment", "EngineError", "deploy"]
