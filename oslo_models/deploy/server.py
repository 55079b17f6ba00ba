"""The former place of `oslo_models.server.app`; what is public there can still be imported from here."""

from oslo_models.server.app import Service, application

__all__ = ["Service", "application"]
