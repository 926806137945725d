"""Error classes for the codes of the server. docs/errors.md has the meaning and the remedy of each code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "AlreadyRegisteredError", "BadTokensError", "BehindError", "BlockSizeMismatchError", "BusyError", "ConflictError",
    "ForbiddenError", "InternalError", "KvatlasError", "MalformedError", "MissingModelError", "NoWorkersError",
    "NotReadyError", "OverloadedError", "QuotaExceededError", "RequestTimeoutError", "TooLargeError",
    "UnauthorizedError", "UnavailableError", "UnknownModelError", "UnknownOperationError", "UnknownRequestError",
    "UnknownWorkerError", "WrongContentTypeError", "WrongMethodError", "error_of",
]


class KvatlasError(Exception):
    """KvatlasError is the error of a failed request, the base class of all errors, and the class of unknown codes.

    code is the code for programs, which does not change between releases. message is for people.
    """

    CODE: ClassVar[str] = ""

    def __init__(self, message: str, *, code: str = "", missing: tuple[int, ...] = (),
                 explanation: Mapping[str, Any] | None = None, queue: Mapping[str, Any] | None = None,
                 quota: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code or self.CODE
        self.message = message
        self.missing = missing
        """Partitions that could not be searched."""
        self.explanation = explanation
        """The rule that dropped each worker, if the request has explain; else None."""
        self.queue = queue
        """The reason that the request may not wait, or waits no longer; else None."""
        self.quota = quota
        """The exceeded quota of the tenant; else None. retry_after_ms is the time until a retry in milliseconds."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class MalformedError(KvatlasError):
    """The request is invalid. The message names the field. Correct the request."""

    CODE = "malformed"


class MissingModelError(KvatlasError):
    """The request has no model. Add a model."""

    CODE = "missing_model"


class BadTokensError(KvatlasError):
    """A token is not an unsigned 32-bit number. Correct the tokens."""

    CODE = "bad_tokens"


class UnauthorizedError(KvatlasError):
    """The HTTP port requires a bearer token. Give token to the client."""

    CODE = "unauthorized"


class ForbiddenError(KvatlasError):
    """The token or the NATS user lacks the role in the message. Use another token or user."""

    CODE = "forbidden"


class UnknownModelError(KvatlasError):
    """No worker has announced the model. Check the name."""

    CODE = "unknown_model"


class UnknownWorkerError(KvatlasError):
    """The worker is not registered. Check the name."""

    CODE = "unknown_worker"


class UnknownRequestError(KvatlasError):
    """The request has ended, has expired or was never booked. Do not retry."""

    CODE = "unknown_request"


class UnknownOperationError(KvatlasError):
    """The indexer has no such operation. Upgrade the indexer."""

    CODE = "unknown_operation"


class WrongMethodError(KvatlasError):
    """The path has another HTTP method. Use the method in the header Allow."""

    CODE = "wrong_method"


class RequestTimeoutError(KvatlasError):
    """The body did not arrive in time. Send the whole body at once."""

    CODE = "request_timeout"


class BlockSizeMismatchError(KvatlasError):
    """The model has another block size. Use the model's block size."""

    CODE = "block_size_mismatch"


class AlreadyRegisteredError(KvatlasError):
    """The worker is registered or has a shim. Remove the registration first."""

    CODE = "already_registered"


class ConflictError(KvatlasError):
    """The present state forbids the request. Remove the cause in the message first."""

    CODE = "conflict"


class TooLargeError(KvatlasError):
    """The request or the answer is beyond a limit. Use hashes, a smaller request, or HTTP in place of NATS."""

    CODE = "too_large"


class WrongContentTypeError(KvatlasError):
    """The content type is neither JSON nor MessagePack. Correct the header."""

    CODE = "wrong_content_type"


class BusyError(KvatlasError):
    """The node has too many requests, bookings or sessions. Retry later, or use another node."""

    CODE = "busy"


class OverloadedError(KvatlasError):
    """All eligible workers are overloaded. Retry later. queue has the reason against a wait."""

    CODE = "overloaded"


class QuotaExceededError(KvatlasError):
    """The tenant has used its quota. Retry after quota["retry_after_ms"]."""

    CODE = "quota_exceeded"


class InternalError(KvatlasError):
    """A bug of kvatlas, or a server that is not an indexer. Check the URL; else report it, with the log."""

    CODE = "internal"


class NotReadyError(KvatlasError):
    """The node restores its state or stops. Retry later, or use another node."""

    CODE = "not_ready"


class NoWorkersError(KvatlasError):
    """No worker is eligible. explanation has the reasons, if the request asked for explanations."""

    CODE = "no_workers"


class UnavailableError(KvatlasError):
    """No indexer answers, or NATS or its storage does not. Retry later."""

    CODE = "unavailable"


class BehindError(KvatlasError):
    """The deadline passed before the answer, or before min_seq. Retry, with a longer timeout."""

    CODE = "behind"


_classes = {c.CODE: c for c in KvatlasError.__subclasses__()}


def error_of(body: Any) -> KvatlasError | None:
    """Returns the error in the body of a reply, decoded from JSON; None: the body has no error."""
    said = body.get("error") if isinstance(body, dict) else None
    if not isinstance(said, dict) or not isinstance(code := said.get("code"), str):
        return None
    return _classes.get(code, KvatlasError)(
        str(said.get("message", "")), code=code, missing=tuple(said.get("missing") or ()),
        explanation=said.get("explanation"), queue=said.get("queue"), quota=said.get("quota"))
