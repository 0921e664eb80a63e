"""A small real language model server in vLLM 0.32's wire format, for demos and tests."""

from capture_server.demo.engine import DemoEngine
from capture_server.demo.server import create_engine_app, running_engine

__all__ = ["DemoEngine", "create_engine_app", "running_engine"]
