"""The way of one token through the model, step by step, with the numbers that the modules computed themselves."""

from glasshouse.page.steps.walk import Steps, opening, steps

__all__ = ["Steps", "opening", "steps"]
