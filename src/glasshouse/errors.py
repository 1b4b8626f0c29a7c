"""The errors a user can mend: each is one sentence that names what is wrong, its value, and what to do."""


class GlasshouseError(ValueError):
    """The base of them all; a command prints its sentence instead of a traceback."""


class ConfigError(GlasshouseError):
    """A setting has an unknown name, a wrong type or a value that makes no model."""


class InputError(GlasshouseError):
    """A call was given ids, lengths or masks that do not fit the model or each other."""


class StoreError(GlasshouseError):
    """A folder on disk is missing, damaged, or of a format this version does not read."""
