"""k8s/README.md: its commands are those that ``make test-kubernetes`` runs in a cluster."""

from pathlib import Path

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
"""
    found = ["kubectl get pod -o name", "curl -d '{\"a\": 1}'", "kubectl apply -k one"]
    assert commands_of(page) == found
