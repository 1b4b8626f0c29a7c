"""An OpenAI-compatible server for the models of this package."""

from glasshouse.serve.api import Limits
from glasshouse.serve.served_model import ServedModel, assign, assign_rules, load_models
from glasshouse.serve.server import Server
from glasshouse.web import Log

__all__ = ["Limits", "Log", "ServedModel", "Server", "assign", "assign_rules", "load_models"]
