"""What callers are told, in the shape of OpenAI's errors."""

from __future__ import annotations

from typing import Any

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """`param`: the field of the request that is at fault. `retry_after_s`: when to ask again."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after_s = (
            status,
            message,
            param,
            code,
            retry_after_s,
        )

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def closing() -> ApiError:
    return ApiError(503, "the server is being stopped: ask again later", code="shutting_down", retry_after_s=5)
