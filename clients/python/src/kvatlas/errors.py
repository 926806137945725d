"""Errors by the server's codes, which docs/errors.md lists with what each means and what to do."""

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
    """A request that was not answered. A code that this version does not know is an error of this class."""

    CODE: ClassVar[str] = ""

    def __init__(self, message: str, *, code: str = "", missing: tuple[int, ...] = (),
                 explanation: Mapping[str, Any] | None = None, queue: Mapping[str, Any] | None = None,
                 quota: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code or self.CODE
        self.message = message
        self.missing = missing
        """Partitions that could not be looked at."""
        self.explanation = explanation
        """Which rule dropped which worker, if the request asked for explanations."""
        self.queue = queue
        """Why the request may not wait, or waits no more."""
        self.quota = quota
        """The exceeded quota of the tenant, with the time until a retry in retry_after_ms."""

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class MalformedError(KvatlasError):
    CODE = "malformed"


class MissingModelError(KvatlasError):
    CODE = "missing_model"


class BadTokensError(KvatlasError):
    CODE = "bad_tokens"


class UnauthorizedError(KvatlasError):
    CODE = "unauthorized"


class ForbiddenError(KvatlasError):
    CODE = "forbidden"


class UnknownModelError(KvatlasError):
    CODE = "unknown_model"


class UnknownWorkerError(KvatlasError):
    CODE = "unknown_worker"


class UnknownRequestError(KvatlasError):
    CODE = "unknown_request"


class UnknownOperationError(KvatlasError):
    CODE = "unknown_operation"


class WrongMethodError(KvatlasError):
    CODE = "wrong_method"


class RequestTimeoutError(KvatlasError):
    CODE = "request_timeout"


class BlockSizeMismatchError(KvatlasError):
    CODE = "block_size_mismatch"


class AlreadyRegisteredError(KvatlasError):
    CODE = "already_registered"


class ConflictError(KvatlasError):
    CODE = "conflict"


class TooLargeError(KvatlasError):
    CODE = "too_large"


class WrongContentTypeError(KvatlasError):
    CODE = "wrong_content_type"


class BusyError(KvatlasError):
    CODE = "busy"


class OverloadedError(KvatlasError):
    CODE = "overloaded"


class QuotaExceededError(KvatlasError):
    CODE = "quota_exceeded"


class InternalError(KvatlasError):
    CODE = "internal"


class NotReadyError(KvatlasError):
    CODE = "not_ready"


class NoWorkersError(KvatlasError):
    CODE = "no_workers"


class UnavailableError(KvatlasError):
    CODE = "unavailable"


class BehindError(KvatlasError):
    CODE = "behind"


_classes = {c.CODE: c for c in KvatlasError.__subclasses__()}


def error_of(body: Any) -> KvatlasError | None:
    """The error in the body of a reply, decoded from JSON; None if it has none."""
    said = body.get("error") if isinstance(body, dict) else None
    if not isinstance(said, dict) or not isinstance(code := said.get("code"), str):
        return None
    return _classes.get(code, KvatlasError)(
        str(said.get("message", "")), code=code, missing=tuple(said.get("missing") or ()),
        explanation=said.get("explanation"), queue=said.get("queue"), quota=said.get("quota"))
