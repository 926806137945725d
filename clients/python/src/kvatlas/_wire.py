"""Encoding and decoding of messages in JSON."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Callable, Hashable, Mapping
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .errors import InternalError

T = TypeVar("T")


def encode(request: object) -> bytes:
    """Returns the JSON of a request, without unset fields.

    Raises TypeError or ValueError for a value without a form in JSON.
    """
    return json.dumps(request, default=_plain, separators=(",", ":"), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: v for f in dataclasses.fields(value)
                if (v := getattr(value, f.name)) is not None and (v is not False or f.default is not False)}
    if hasattr(value, "tolist"):  # arrays and their numbers
        return value.tolist()
    if isinstance(value, (bytes, bytearray)):
        raise TypeError("bytes are neither tokens nor hashes; give a list of numbers")
    return list(value)


def decode(kind: type[T], body: Any) -> T:
    """Returns a reply as a dataclass of the kind. body is decoded from JSON. decode ignores unknown fields.

    Raises InternalError for a body without a required field, or with a field of another type.
    """
    try:
        decoder: Callable[[Any], T] = _decoder(cast(Hashable, kind))
        value = decoder(body)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InternalError(f"the reply is not a valid {kind.__name__}: {type(e).__name__}: {e}") from e
    return value


def _same(value: Any) -> Any:
    return value


@cache
def _decoder(kind: Hashable) -> Callable[[Any], Any]:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = _decoder(next(a for a in args if a is not type(None)))
        return lambda v: None if v is None else inner(v)
    if origin is tuple:
        each = _decoder(args[0])
        if each is _same:
            return lambda v: tuple(v or ())
        return lambda v: tuple([each(x) for x in v or ()])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        value = _decoder(args[1])
        return lambda v: types.MappingProxyType({k: value(x) for k, x in (v or {}).items()})
    if kind is datetime:
        return _time
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    return _same


def _dataclass(kind: Any) -> Callable[[Any], Any]:
    fields: list[tuple[str, str, Any, bool]] | None = None

    def build(body: Any) -> Any:
        nonlocal fields
        if fields is None:  # at the first use, because a dataclass may contain itself
            hints = get_type_hints(kind)
            fields = [(f.name, f.metadata.get("wire", f.name), _decoder(hints[f.name]),
                       f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING)
                      for f in dataclasses.fields(kind)]
        values = {}
        for name, wire, inner, required in fields:
            if wire in body:
                values[name] = inner(body[wire])
            elif required:
                raise KeyError(f"{wire} is missing")
        return kind(**values)

    return build


_fraction = re.compile(r"\.(\d{1,6})\d*")


def _time(text: str) -> datetime:
    # fromisoformat of Python 3.10 accepts neither Z nor nanoseconds.
    text = _fraction.sub(lambda m: "." + m[1].ljust(6, "0"), text.replace("Z", "+00:00"))
    return datetime.fromisoformat(text)
