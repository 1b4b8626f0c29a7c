"""The page: a model looked into in a browser, served from this machine to this machine."""

from glasshouse.page.viewer import Look, validate_state, look
from glasshouse.page.server import Server
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache

__all__ = ["Look", "Server", "ModelLoader", "TraceCache", "validate_state", "look"]
