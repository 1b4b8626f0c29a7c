"""Web page for looking inside a model, served locally."""

from glasshouse.page.html_export import plan_page
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.server import Server
from glasshouse.page.trace import TraceCache
from glasshouse.page.viewer import Look, look, validate_state

__all__ = ["Look", "ModelLoader", "Server", "TraceCache", "look", "plan_page", "validate_state"]
