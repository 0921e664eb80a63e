"""The dashboard below ``/ui``: server-rendered pages that only look, never change.

No build step, nothing from elsewhere, no inline script or style: a strict content security policy
makes hostile text in captured content harmless even if escaping failed. Source: spec 08.
"""

from capture_server.ui.routes import install_dashboard

__all__ = ["install_dashboard"]
