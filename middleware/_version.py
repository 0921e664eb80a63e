"""The version of both packages, read by the build."""

__version__ = "0.1.0"
