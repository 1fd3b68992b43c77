"""The demo model as a finished application, for ``serve run`` and ``serve build tramontane.cluster.demo_app:app``."""

from tramontane.cluster.serve_app import build

app = build({})
