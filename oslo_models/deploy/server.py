"""The former location of `oslo_models.server.app`. Its public names can still be imported from here."""

from oslo_models.server.app import Service, application

__all__ = ["Service", "application"]
