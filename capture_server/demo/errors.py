"""The demo engine's refusals, in vLLM's error shape."""

from __future__ import annotations

from typing import Any


class EngineRequestError(Exception):
    """A request that the engine refuses: status and the fields of vLLM's error body."""

    def __init__(
        self,
        message: str,
        *,
        kind: str = "BadRequestError",
        param: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.param = param
        self.status = status

    @classmethod
    def for_parameter(cls, message: str, param: str, value: object) -> EngineRequestError:
        """A refused value; vLLM appends name and value to the sentence."""
        return cls(f"{message} (parameter={param}, value={value})", param=param)

    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.status,
            }
        }
