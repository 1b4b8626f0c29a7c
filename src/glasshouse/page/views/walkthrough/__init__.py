"""The forward pass of one token step by step, with the numbers of the modules themselves."""

from glasshouse.page.views.walkthrough.handler import VIEW, Walkthrough, initial_requests, walkthrough

__all__ = ["VIEW", "Walkthrough", "initial_requests", "walkthrough"]
