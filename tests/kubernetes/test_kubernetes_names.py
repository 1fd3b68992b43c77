"""Two models in one namespace: each has its own objects, keys and pods."""

from kube_application import DEMO, Application
from kube_report import Report

KINDS = "rayservices,services,configmaps,secrets,networkpolicies,poddisruptionbudgets"


def test_two_models_of_a_namespace_do_not_meet(demo: Application, report: Report) -> None:
    second = Application("second", key="key-of-the-second")
    documents = second.render(*DEMO)
    before = names_of(demo)
    second.create_key()
    second.apply(documents)
    try:
        ready_s = second.wait_until_ready()
        second.wait_for_answer()
        statuses = {
            (each.name, key): each.complete(key=key)[0]
            for each in (demo, second)
            for key in (demo.key, second.key)
        }
        pods = {each.name: len(each.pods("stage")) for each in (demo, second)}
    finally:
        deleted_s = second.delete(documents)
        second.kubectl("delete", "secret", "second-api-keys")
    report.add(
        "two models in one namespace",
        f"the second Ready after {ready_s:.0f} s, deleted in {deleted_s:.0f} s; of 4 requests with"
        f" one's key to either {sorted(statuses.values())}",
    )
    assert statuses == {
        (demo.name, demo.key): 200,
        (demo.name, second.key): 401,
        (second.name, demo.key): 401,
        (second.name, second.key): 200,
    }
    assert pods == {demo.name: 2, second.name: 2}
    assert names_of(demo) == before, "something is left of the second, or missing of the first"
    assert demo.complete()[0] == 200


def names_of(application: Application) -> set[str]:
    """The names of all objects of the namespace but pods, whose names are the operator's."""
    return set(application.kubectl("get", KINDS, "--output=name").split())
