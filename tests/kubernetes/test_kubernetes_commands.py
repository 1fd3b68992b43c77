"""Every command of k8s/README.md, run as a newcomer would: in a namespace of its own, with a
checkpoint that the job copies, on CPUs.
"""

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from conftest import ServedDemo
from kube_application import in_node_network
from kube_builds import download
from kube_commands import ReadmeShell
from kube_nodes import nodes_with_folders
from kube_paths import CHECKOUT, CLUSTER, node_address
from kube_report import Report
from test_kubernetes_problems import wait_for

NAMESPACE, PORT = "commands", 8099
# two stages on CPUs, of the demo's checkpoint under the name of the README's model
ON_CPUS = (
    ("--model ", "--model checkpoints/"),
    ("--stages 4 --gpu-memory 48GiB", "--cpu --stages 2 --gpu-memory 2GiB"),
    ("--stages 2 --gpu-memory 24GiB", "--cpu --stages 2 --gpu-memory 2GiB"),
)
MODELS = ("mixtral-8x7b", "mistral-nemo-12b")
DASHBOARD = "curl --silent --retry 9 --retry-all-errors localhost:8265"
# commands that this test does not run, and who does
ELSEWHERE = {
    "docker build -f k8s/Dockerfile --target cuda"
    " -t registry.example.com/tramontane:0.2.0-cuda .": "make test-image builds this file by"
    " Docker; the cluster's image is made of the lines that it has",
    "docker push registry.example.com/tramontane:0.2.0-cuda": "no test: the cluster has no"
    " registry, its nodes are given the image",
    'kubectl create -k "github.com/ray-project/kuberay/ray-operator/config/default'
    '?ref=v1.7.0"': "make kubernetes creates the operator from a copy of this folder",
}
DEFINITIONS = (
    ("sigs.k8s.io/gateway-api", "v1.4.1", "config/crd/standard", ("gateways", "routes")),
    (
        "github.com/prometheus-operator/prometheus-operator",
        "v0.85.0",
        "example/prometheus-operator-crd",
        ("podmonitors", "prometheusrules"),
    ),
)


def test_every_command_of_the_readme_does_what_it_says(
    served_demo: ServedDemo, report: Report, tmp_path: Path
) -> None:
    served_demo.remove()
    shell = ReadmeShell(tmp_path)
    apply_definitions(shell)
    with source_of_checkpoints(tmp_path):
        try:
            install(shell)
            first_request(shell)
            monitoring(shell)
            of_checkpoints(shell)
            scaling(shell)
            drain_and_replace(shell)
            remove(shell)
            demo_and_redis(shell)
            another_model(shell)
            helm(shell)
        finally:
            shell.own(f"kubectl delete namespace {NAMESPACE} monitoring --ignore-not-found")
            shell.own("kubectl delete persistentvolume --selector=of=commands --ignore-not-found")
    left = shell.not_run() - set(ELSEWHERE)
    num_run = len(shell.ran)
    report.add("commands of k8s/README.md", f"{num_run} run, {len(ELSEWHERE)} by other tests")
    assert not left


def apply_definitions(shell: ReadmeShell) -> None:
    """Define the kinds of the Gateway API and of the Prometheus operator."""
    for module, version, folder, words in DEFINITIONS:
        for file in sorted((Path(download(module, version)["Dir"]) / folder).glob("*.yaml")):
            if any(word in file.name for word in words):
                shell.own(f"kubectl apply --server-side --filename={file}")


@contextlib.contextmanager
def source_of_checkpoints(folder: Path) -> Iterator[None]:
    """Serve checkpoints over HTTP on a node, from which the job copies them."""
    for name in MODELS:
        shutil.copytree(CHECKOUT / "cluster" / "demo_model", folder / "checkpoints" / name)
    address = node_address(nodes_with_folders()[0])
    options = ["--bind", address, "--directory", str(folder), str(PORT)]
    with subprocess.Popen(
        [*in_node_network(), sys.executable, "-m", "http.server", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        try:
            yield
        finally:
            server.kill()


def prepare_model(shell: ReadmeShell, name: str, storage_class: str = "") -> None:
    """Create the source's credentials, here of an HTTP server, and what the README leaves to the
    user: the volume.
    """
    address = node_address(nodes_with_folders()[0])
    shell.run(
        "kubectl create secret generic mixtral-models-source"
        " --from-literal=RCLONE_CONFIG_MODELS_TYPE=s3"
        " --from-literal=RCLONE_CONFIG_MODELS_PROVIDER=AWS"
        " --from-literal=RCLONE_CONFIG_MODELS_REGION=eu-west-3"
        " --from-literal=RCLONE_CONFIG_MODELS_ACCESS_KEY_ID=$AWS_ACCESS_KEY_ID"
        " --from-literal=RCLONE_CONFIG_MODELS_SECRET_ACCESS_KEY=$AWS_SECRET_ACCESS_KEY",
        changes=[
            ("mixtral-models-source", f"{name}-models-source"),
            ("TYPE=s3", "TYPE=http"),
            ("REGION=eu-west-3", f"URL=http://{address}:{PORT}/"),
        ],
    )
    folder = CLUSTER / "models" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{name}-models-of-commands", "labels": {"of": "commands"}},
        "spec": {
            "capacity": {"storage": "200Gi"},
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage_class,
            "hostPath": {"path": str(folder)},
            "claimRef": {"namespace": NAMESPACE, "name": f"{name}-models"},
        },
    }
    shell.apply(yaml.safe_dump(volume))


def install(shell: ReadmeShell) -> None:
    """Installation by kustomize."""
    shell.run(
        "tramontane k8s --model mixtral-8x7b --stages 4 --gpu-memory 48GiB"
        " --image registry.example.com/tramontane:0.2.0-cuda -o k8s/overlays/mine",
        changes=ON_CPUS,
    )
    shell.run(
        "kubectl create namespace llm && kubectl config set-context --current --namespace llm",
        changes=[("llm", NAMESPACE)],
    )
    shell.run("openssl rand -hex 24 > k8s/secrets/keys.txt && kubectl apply -k k8s/secrets")
    prepare_model(shell, "tramontane")
    shell.run("kubectl apply -k k8s/overlays/mine")
    said = shell.run("kubectl apply -k k8s/gateway")
    assert re.search(r"httproute.*created", said)


def first_request(shell: ReadmeShell) -> None:
    """First request."""
    shell.run("kubectl wait rayservice/tramontane --for=condition=Ready --timeout=1h")
    answer = ask(shell)
    assert '"model":"mixtral-8x7b"' in answer.replace(": ", ":")
    assert '"finish_reason"' in answer


def ask(shell: ReadmeShell) -> str:
    """The answer to the README's request; curl gets it as often as the forwarding needs."""
    return shell.run(
        "kubectl port-forward service/tramontane-http 8080:80 &",
        "curl localhost:8080/v1/completions"
        ' -H "Authorization: Bearer $(cat k8s/secrets/keys.txt)"'
        " -H 'Content-Type: application/json'"
        ' -d \'{"model": "mixtral-8x7b", "prompt": "The wind next to the mistral is",'
        ' "max_tokens": 24}\'',
        changes=[
            (" &", " & trap 'kill %1' EXIT"),
            ("curl", "curl --silent --fail-with-body --retry 9 --retry-all-errors"),
        ],
    )


def monitoring(shell: ReadmeShell) -> None:
    """Monitoring: each command shows what its comment says."""
    found = shell.own("kubectl get pod -l app=tramontane,tramontane-role=ingress -o name").split()
    pod = found[0].removeprefix("pod/")
    assert "Ray runtime started" in shell.run("kubectl logs POD", changes=[("POD", pod)])
    assert "ray-worker" in shell.run("kubectl describe pod POD", changes=[("POD", pod)])
    shell.run("kubectl get events --field-selector type=Warning")
    assert "RUNNING" in shell.run("kubectl get rayservice tramontane -o yaml")
    shell.run("HEAD=$(kubectl get pod -l app=tramontane,tramontane-role=head -o name)")
    assert "RUNNING" in shell.run("kubectl exec $HEAD -c ray-head -- serve status")
    assert "Active" in shell.run("kubectl exec $HEAD -c ray-head -- ray status")
    page = shell.run(
        "kubectl port-forward $HEAD 8265",
        changes=[("8265", f"8265 > /dev/null & trap 'kill %1' EXIT\n{DASHBOARD}")],
    )
    assert "<title>Ray Dashboard</title>" in page
    shell.run("kubectl logs job/tramontane-download")
    assert "podmonitor" in shell.run("kubectl apply -k k8s/monitoring")
    shell.run("tramontane monitoring --out monitoring")
    shell.own("kubectl create namespace monitoring")
    shell.run(
        "kubectl -n monitoring create configmap tramontane-dashboards"
        " --from-file=monitoring/dashboards/tramontane.json"
        " --from-file=monitoring/dashboards/ray_core.json"
    )
    shell.run("kubectl -n monitoring label configmap tramontane-dashboards grafana_dashboard=1")


def of_checkpoints(shell: ReadmeShell) -> None:
    """Upgrades, another model: the job copies its folder while the old one is served."""
    shell.run("kubectl delete job tramontane-download")
    shell.run("kubectl apply -k k8s/overlays/mine -l tramontane-part=model")
    said = shell.run("kubectl wait --for=condition=complete job/tramontane-download --timeout=4h")
    assert "condition met" in said


def scaling(shell: ReadmeShell) -> None:
    """Scaling, and the disruption budget of autoscaled overlays."""
    shell.run(
        "CLUSTER=$(kubectl get rayservice tramontane"
        " -o jsonpath='{.status.activeServiceStatus.rayClusterName}')"
    )
    shell.run(
        "kubectl patch raycluster $CLUSTER --type json -p"
        ' \'[{"op": "replace", "path": "/spec/workerGroupSpecs/1/replicas", "value": 8},'
        ' {"op": "replace", "path": "/spec/workerGroupSpecs/1/minReplicas", "value": 8},'
        ' {"op": "replace", "path": "/spec/workerGroupSpecs/1/maxReplicas", "value": 8}]\'',
        changes=[('"value": 8', '"value": 3')],
    )
    stages = "kubectl get pod -l app=tramontane,tramontane-role=stage -o name"
    wait_for(lambda: shell.own(stages).count("pod/") == 3, 60)
    said = shell.run(
        'kubectl patch pdb tramontane-stages --type merge -p \'{"spec": {"minAvailable": 5}}\'',
        changes=[("5", "2")],
    )
    assert "patched" in said


def drain_and_replace(shell: ReadmeShell) -> None:
    """Upgrades of the pods, and the drain of the head's loss."""
    in_head = [("tramontane drain", "kubectl exec $HEAD -c ray-head -- tramontane drain")]
    shell.run("tramontane drain --address auto", changes=in_head)
    shell.run("tramontane drain --undo --address auto", changes=in_head)
    assert '"finish_reason"' in ask(shell)
    shell.run("kubectl exec $HEAD -c ray-head -- tramontane drain --address auto")
    shell.run("kubectl delete rayservice tramontane && kubectl apply -k k8s/overlays/mine")
    shell.run("kubectl wait rayservice/tramontane --for=condition=Ready --timeout=1h")
    assert '"finish_reason"' in ask(shell)


def wait_until_gone(shell: ReadmeShell, selector: str) -> None:
    """Wait until these pods are gone."""
    wait_for(lambda: "pod/" not in shell.own(f"kubectl get pod {selector} -o name"), 300)


def remove(shell: ReadmeShell) -> None:
    """The order in which an application with Redis is removed."""
    shell.run("kubectl delete rayservice tramontane")
    wait_for(lambda: "No resources" in shell.run("kubectl get raycluster"), 300)
    shell.own("kubectl delete -k k8s/overlays/mine --ignore-not-found")
    shell.run(
        "kubectl create secret generic tramontane-redis"
        " --from-literal=password=$(openssl rand -hex 24)"
    )


def demo_and_redis(shell: ReadmeShell) -> None:
    """The demo, as the README's note on the image has it."""
    shell.run("kubectl apply -k k8s/overlays/demo")
    shell.run("kubectl wait rayservice/tramontane --for=condition=Ready --timeout=1h")
    shell.own("kubectl delete -k k8s/overlays/demo")
    wait_until_gone(shell, "-l app=tramontane")


def another_model(shell: ReadmeShell) -> None:
    """Several models."""
    shell.run(
        "tramontane k8s --name nemo --model mistral-nemo-12b --stages 2 --gpu-memory 24GiB"
        " --image registry.example.com/tramontane:0.2.0-cuda -o nemo",
        changes=ON_CPUS,
    )
    shell.run("openssl rand -hex 24 > nemo/secrets/keys.txt && kubectl apply -k nemo/secrets")
    prepare_model(shell, "nemo")
    shell.run("kubectl apply -k nemo")
    shell.own("kubectl wait rayservice/nemo --for=condition=Ready --timeout=10m", 660)
    shell.own("kubectl delete -k nemo")
    wait_until_gone(shell, "-l app=nemo")


def helm(shell: ReadmeShell) -> None:
    """Installation by Helm."""
    shell.run(
        "tramontane k8s --model mixtral-8x7b --stages 4 --gpu-memory 48GiB --helm -o mixtral-chart",
        changes=ON_CPUS,
    )
    shell.run(
        "openssl rand -hex 24 > keys.txt"
        " && kubectl create secret generic mixtral-api-keys --from-file=keys=keys.txt"
    )
    prepare_model(shell, "mixtral", "shared")
    shell.run(
        "helm install mixtral ./mixtral-chart --set models.storageClassName=shared"
        " --set models.source=models:checkpoints"
    )
    shell.own("kubectl wait rayservice/mixtral --for=condition=Ready --timeout=10m", 660)
    shell.run("kubectl delete job mixtral-download")
    shell.own("helm upgrade mixtral ./mixtral-chart --reuse-values --set replicas=1")
    shell.run("helm rollback mixtral")
    shell.own("helm uninstall mixtral")
    wait_until_gone(shell, "-l app=mixtral")
