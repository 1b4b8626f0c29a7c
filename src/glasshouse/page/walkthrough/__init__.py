"""The way of one token through the model, step by step, with the numbers that the modules computed themselves."""

from glasshouse.page.walkthrough.handler import Walkthrough, initial_requests, walkthrough

__all__ = ["Walkthrough", "initial_requests", "walkthrough"]
