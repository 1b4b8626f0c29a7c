"""The page: a model looked into in a browser, served from this machine to this machine."""

from glasshouse.page.looking import Look, checked, look
from glasshouse.page.server import Server
from glasshouse.page.subject import Subject
from glasshouse.page.trace import Traces

__all__ = ["Look", "Server", "Subject", "Traces", "checked", "look"]
