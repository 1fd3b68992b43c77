"""k8s/README.md: its commands are those that ``make test-kubernetes`` runs in a cluster."""

import re
import shutil
from pathlib import Path

from k8s_documents import K8S, check_schema, overlay, ray_service, rendered
from readme_commands import README, commands_of, texts_of


def test_every_command_of_the_readme_is_one_that_the_tests_in_a_cluster_run() -> None:
    """``make test-kubernetes`` runs them; here a command that it does not have is found at once."""
    ran = texts_of(Path(__file__).parent / "kubernetes" / "test_kubernetes_commands.py")
    commands = set(commands_of(README.read_text()))
    assert len(commands) > 30
    assert not commands - ran


def test_commands_of_a_page_are_those_of_its_blocks_and_of_its_text() -> None:
    page = """
```
kubectl get pod \\
  -o name          # a person's comment
curl -d '{"a":
  1}'
```
    Text, `kubectl apply -k` in passing, and `kubectl apply -k one`.
```yaml
kubectl: none
```

```
kubectl get two
```
"""
    of_blocks = ["kubectl get pod -o name", "curl -d '{\"a\": 1}'", "kubectl get two"]
    found = [*of_blocks, "kubectl apply -k one"]
    assert commands_of(page) == found


def test_an_overlay_on_top_keeps_settings_of_pods(tmp_path: Path) -> None:
    """The README's example, on top of a shipped overlay in place of the reader's own."""
    shutil.copytree(K8S, tmp_path / "k8s")
    (example,) = re.findall(r"```yaml\n(# k8s/overlays/ours/.*?)```", README.read_text(), re.DOTALL)
    file = tmp_path / "k8s" / "overlays" / "ours" / "kustomization.yaml"
    file.parent.mkdir()
    file.write_text(example.replace("../mine", "../stages"))
    service = ray_service(rendered(file.parent))
    check_schema(service)
    changed = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]["template"]["spec"]
    assert changed.pop("nodeSelector") == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert changed.pop("imagePullSecrets") == [{"name": "registry"}]
    assert service == ray_service(overlay("stages"))
