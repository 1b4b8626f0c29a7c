"""The version of the package, which its build reads as well."""

__version__ = "0.1.0.dev0"
