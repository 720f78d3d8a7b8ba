"""JSON bodies, read field by field: whatever is wrong is a 4xx that names the field."""

import json
import math
from typing import Any, NoReturn


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, retry: int = 0):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_s = status, message, param, code, retry

    def body(self) -> dict:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_s)} if self.retry_s else {}


def parse(raw: bytes) -> "Body":
    """The JSON object of a request body. Raises ApiError for anything else."""

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        values = json.loads(raw.decode("utf-8"), parse_constant=constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_kind(values)}")
    return Body(values)


class Body:
    """A JSON object. Each method takes one field out (null counts as absent); `done` refuses what is left."""

    def __init__(self, values: dict[str, Any], where: str = ""):
        self._values, self._where = dict(values), where
        self.size = 0  # bytes it was read from

    def take(self, name: str) -> Any:
        return self._values.pop(name, None)

    def bad(self, name: str, message: str) -> NoReturn:
        raise ApiError(400, f"{self._where}{name} {message}", self._where + name)

    def _typed(self, name: str, kinds: tuple[type, ...], wanted: str, default: Any) -> Any:
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in kinds:  # a bool is no number here
            self.bad(name, f"must be {wanted}, got {_kind(value)}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, (bool,), "true or false", default)

    def integer(self, name: str, low: int, high: int, default: int | None) -> int | None:
        value = self._typed(name, (int,), "an integer", default)
        if value is not None and not low <= value <= high:
            self.bad(name, f"must be {low} to {high}, got {_short(value)}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self._typed(name, (int, float), "a number", default)
        if not (low <= value <= high) or not math.isfinite(value):
            self.bad(name, f"must be {low:g} to {high:g}, got {_short(value)}")
        return float(value)

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self._typed(name, (str,), "a string", default)
        return value if value is None else self.characters(name, value)

    def texts(self, name: str) -> list[str]:
        """A string, or a list of them."""
        value = self._typed(name, (str, list), "a string or a list of strings", [])
        value = [value] if isinstance(value, str) else value
        if any(type(v) is not str for v in value):
            self.bad(name, "must be a string or a list of strings")
        return [self.characters(name, v) for v in value]

    def integers(self, name: str) -> list[int]:
        value = self._typed(name, (list,), "a list of integers", [])
        if any(type(v) is not int for v in value):
            self.bad(name, "must be a list of integers")
        return value

    def inside(self, name: str) -> "Body":
        """An object within this one."""
        return Body(self._typed(name, (dict,), "an object", {}), f"{self._where}{name}.")

    def only(self, name: str, *allowed: Any) -> None:
        """A field that is known, and does nothing: no value but ``allowed`` is taken."""
        value = self.take(name)
        if value is not None and not any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed
        ):
            told = " or ".join(json.dumps(a) for a in allowed)
            self.bad(name, f"is not supported: {f'only {told}' if told else 'leave it out'}")

    def ignore(self, *names: str) -> None:
        for name in names:
            self.take(name)

    def done(self) -> None:
        for name in self._values:
            raise ApiError(400, f"unknown field {self._where}{_short(name)}", self._where + name, "unknown_parameter")

    def characters(self, name: str, value: str) -> str:
        """``value``, which must be text: half a surrogate pair is not."""
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            self.bad(name, f"holds half a surrogate pair at character {error.start}")
        return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:40] + "..."
