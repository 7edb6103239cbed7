"""Every error that a user can meet, by what went wrong. Messages name the file, line, field or tensor and the next step."""


class IrminsulError(Exception):
    """Base of all errors raised on purpose by this project; the command line prints it without a traceback."""


class ConfigError(IrminsulError):
    """A configuration value is missing, unknown or contradicts another one."""


class UnsupportedModelError(ConfigError):
    """The configuration describes an architecture that this library does not run."""


class CheckpointError(IrminsulError):
    """A directory is not a loadable checkpoint, or its content does not fit its manifest."""


class ConversionError(IrminsulError):
    """A Hugging Face checkpoint cannot be converted as it stands."""


class TokenizerError(IrminsulError):
    """There is no usable tokenizer, or it does not fit the model."""


class ChatTemplateError(TokenizerError):
    """The chat template is missing or refuses the messages."""


class RequestError(IrminsulError, ValueError):
    """One request is malformed or can never be served; other requests are not affected."""


class CacheError(IrminsulError):
    """The latent cache was asked for something impossible (a bug or a wrong capacity), nothing was overwritten."""


class TraceError(IrminsulError):
    """A trace file, or one line of it, cannot be read."""
