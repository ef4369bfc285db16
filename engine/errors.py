"""What the engine refuses. ``code`` is what the wire carries; the message may be shown to the caller."""


class EngineError(Exception):
    """A refusal that concerns one request or one adapter, never the engine."""

    code = "internal"


class Busy(EngineError):
    """The waiting queue is full (requests or tokens): try another replica, or later."""

    code = "busy"


class TooLong(EngineError):
    """The prompt can never fit: context window or block pool."""

    code = "too_long"


class InvalidRequest(EngineError):
    """A request that the gateway should have refused: token ids, counts, a request id in use."""

    code = "invalid"


class InvalidAdapter(EngineError):
    """Weights that don't fit the model or a slot; raised by the runner's ``load_slot``."""

    code = "invalid_adapter"


class InvalidGrammar(EngineError):
    """A grammar that can't be compiled for this model's vocabulary; the message is the reason."""

    code = "invalid_grammar"
