"""The one family of errors that mptify raises for what a user can get wrong. Imports nothing."""


class MptifyError(Exception):
    """Base of every error that mptify raises on purpose: its text is one sentence a user can act on."""


class BadConfig(MptifyError, ValueError):
    """A setting, or a combination of settings, that means nothing."""


class UnknownModel(MptifyError, LookupError):
    """No registry knows this model name."""


class NothingToConvert(MptifyError):
    """The model has no weight that a ticket could cover."""


class CannotConvert(MptifyError):
    """The model, or one of its layers, is of a kind that a ticket can't stand in for."""


class NotKept(MptifyError, AttributeError):
    """Something that the original network offers and its ticket can't."""


class CannotPickle(MptifyError, TypeError):
    """A model that can't be pickled whole."""


class NoTorchScript(MptifyError):
    """`torch.jit.script` of a ticket model."""

    def __init__(self) -> None:
        super().__init__(
            "TorchScript can't compile ticket layers, which compute their weights when they run; "
            "torch.export.export(model, (example,)) can, and mptify export writes ONNX files."
        )


class LeftDense(CannotConvert):
    """`strict=True`, and at least one conv or linear weight would have stayed dense."""


class DamagedTicket(MptifyError, ValueError):
    """A ticket file that is not what its writer wrote, or that no writer of ours would write."""


class TicketMismatch(MptifyError, ValueError):
    """A ticket and a model that don't belong together."""


class BadData(MptifyError, ValueError):
    """Images or labels that a search can't use."""


class RunExists(MptifyError):
    """A folder that holds a run already."""


class Disagreement(MptifyError):
    """Processes that search one ticket together don't hold the same masks."""


class LostProcess(MptifyError):
    """One of the processes that search a ticket together has ended, and the others can't go on without it."""


def shown(value: object) -> str:
    """A value in an error: as it is written if that is short, else what kind of thing it is."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def first_line(error: BaseException) -> str:
    """Of what some library said, as a part of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
