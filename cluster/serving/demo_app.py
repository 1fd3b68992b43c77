"""The demo model as an application, for ``serve run`` and ``serve build
tramontane.cluster.serving.demo_app:app``.
"""

from tramontane.cluster.serving.app import build

app = build({})
