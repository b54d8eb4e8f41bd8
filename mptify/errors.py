"""The errors that mptify raises for what a user can get wrong. Imports nothing."""


class MptifyError(Exception):
    """Base class of mptify's errors; the text is one sentence that a user can act on."""


class BadConfig(MptifyError, ValueError):
    """A setting, or a combination of settings, is invalid."""


class UnknownModel(MptifyError, LookupError):
    """No registry knows this model name."""


class NothingToConvert(MptifyError):
    """The model has no weight that a ticket could cover."""


class CannotConvert(MptifyError):
    """The model, or one of its layers, cannot be converted."""


class NotKept(MptifyError, AttributeError):
    """The original network has this attribute or method, but its ticket model does not."""


class CannotPickle(MptifyError, TypeError):
    """The model cannot be pickled as a whole."""


class NoTorchScript(MptifyError):
    """`torch.jit.script` of a ticket model."""

    def __init__(self) -> None:
        super().__init__(
            "TorchScript can't compile ticket layers, which compute their weights when they run; "
            "torch.export.export(model, (example,)) can, and mptify export writes ONNX files."
        )


class LeftDense(CannotConvert):
    """With `strict=True`, a conv or linear weight would stay dense."""


class DamagedTicket(MptifyError, ValueError):
    """A ticket file is damaged or invalid."""


class TicketMismatch(MptifyError, ValueError):
    """A ticket and a model do not fit."""


class BadData(MptifyError, ValueError):
    """A search cannot use these images or labels."""


class RunExists(MptifyError):
    """The folder already holds a run."""


class Disagreement(MptifyError):
    """The processes of a search do not hold the same masks."""


class LostProcess(MptifyError):
    """Another process of the search has ended, and this one cannot continue without it."""


def shown(value: object) -> str:
    """A value for an error message: itself if short, else its type."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def first_line(error: BaseException) -> str:
    """The first line of a library's error, as a part of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
