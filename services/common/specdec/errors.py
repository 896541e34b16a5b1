"""What can be wrong with a request, in domain words. The rpc layer gives each its gRPC status.

RequestError
├── InvalidFieldError      INVALID_ARGUMENT      the caller has to change something
├── WrongModelError        FAILED_PRECONDITION   the sequence began with other weights
└── CapacityError          RESOURCE_EXHAUSTED    no room now; another worker, or later
"""

from __future__ import annotations


class StartupError(Exception):
    """A service that cannot start; its message is meant for the operator and says what to do."""


class RequestError(Exception):
    """A request that cannot be served; its message is meant for the caller."""


class InvalidFieldError(RequestError):
    """A field whose value is not allowed; the message names the field, the value and the limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        super().__init__(f"{field} is {shown}: must be {limit}")
        self.field = field


class WrongModelError(RequestError):
    """The worker serves other weights than the request began with."""


class CapacityError(RequestError):
    """The worker has no room for another session."""


class UnknownPrefixError(Exception):
    """A request starts past the end of the sequence that this worker knows. No failure: the caller sends the rest.

    Attributes:
        known_length: Tokens that the worker knows.
    """

    def __init__(self, known_length: int) -> None:
        super().__init__(f"only {known_length} tokens are known")
        self.known_length = known_length
