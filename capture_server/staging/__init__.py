"""External staging: tokens stay with the framework's workers, this system keeps a ledger.

``records`` and ``digest`` are the wire contract, ``capture`` and ``adapters`` the worker's side,
``external_capture`` the side of the middleware, ``ledger`` custody of the rows, ``rebuild`` and
``terminal`` the finalizer's side. Only ``control`` needs a web framework, and nothing is imported
here. Guide: ``docs/staging.md``.
"""
