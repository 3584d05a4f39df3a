"""deploy/kubernetes: manifests that the schemas of Kubernetes accept, with the settings of docker-compose.yml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command import ROOT
from tests.support.network import KEYS, make_keys, needs_tools, read_compose

FOLDER = ROOT / "deploy" / "kubernetes"
DOCS = FOLDER / "guide.md"
# Pods and the services of the compose file; the site of the manifests is site 1.
SERVER = {
    "superlink": "superlink",
    "register": "register",
    "superexec-serverapp": "superexec-serverapp",
}
SITE = {"supernode": "supernode-1", "superexec-clientapp": "superexec-clientapp-1"}
CLUSTER = {"SUPERLINK": "superlink.fedbn.svc:8000", "SITES": "2", "NODE_1": "data-path='/data'"}
CONFIG = {**CLUSTER, "PARTITION": "1", "NODE": CLUSTER["NODE_1"], "OUTGOING_PROXY": ""}
CONFIG["EXCHANGE"] = "superexec-serverapp:8001"


def resources(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def pods(name: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The name, the pod and the only container of each workload."""
    for resource in resources(name):
        if resource["kind"] in ("StatefulSet", "Job"):
            pod = resource["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            yield resource["metadata"]["name"], resource, container


def filled_in(text: str) -> str:
    """`$(NAME)` as Kubernetes replaces it by the container's environment."""
    return re.sub(r"\$\((\w+)\)", lambda match: CONFIG[match[1]], text)


@pytest.mark.parametrize("name", ["server.yaml", "site.yaml"])
@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_schemas_of_kubernetes_accept_every_resource(name: str, version: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for resource in resources(name):
        checker.validate(resource, version, strict=True)
    broken = resources(name)[1]
    broken["spec"]["template"]["spec"]["containers"][0]["comand"] = ["sh"]
    with pytest.raises(checker.ValidationError, match="comand"):
        checker.validate(broken, version, strict=True)


@pytest.mark.parametrize(("name", "services"), [("server.yaml", SERVER), ("site.yaml", SITE)])
def test_containers_are_those_of_the_compose_file(name: str, services: dict[str, str]) -> None:
    compose = read_compose(CLUSTER)["services"]
    found = {pod: container for pod, _, container in pods(name)}
    assert found.keys() == services.keys()
    for pod, service in services.items():
        container, expected = found[pod], compose[service]
        assert container["image"] == expected.get("image", f"fedbn-{pod}")
        words = [filled_in(word) for word in [*container["command"], *container["args"]]]
        other = [word.replace("supernode-1:", "supernode:") for word in [*expected["entrypoint"], *expected["command"]]]
        assert words == other
        assert {item["name"]: filled_in(item["value"]) for item in container["env"]} == expected["environment"]
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        for target, read_only in volumes_of(expected):
            assert mounts.pop(target) == read_only
        assert mounts.keys() <= {"/app", "/tmp"}, "only folders for temporary files are added"
        assert limit_of(expected) == container["resources"]["limits"]["memory"]
        assert expected["read_only"] == container["securityContext"]["readOnlyRootFilesystem"]


def volumes_of(service: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """The folders that a service mounts, each with whether it can only read it; of files, their folder."""
    for volume in service.get("volumes", []):
        if isinstance(volume, str):
            yield volume.split(":")[1], volume.endswith(":ro")
        else:
            yield volume["target"].removesuffix(f"/{Path(volume['source']).name}"), volume["read_only"]
    for folder in sorted({secret["target"].rpartition("/")[0] for secret in service.get("secrets", [])}):
        yield folder, True


def limit_of(service: dict[str, Any]) -> str:
    return str(service["mem_limit"]).replace("g", "Gi")


@pytest.mark.parametrize("name", ["server.yaml", "site.yaml"])
def test_pods_are_unprivileged(name: str) -> None:
    for pod, resource, container in pods(name):
        spec = resource["spec"]["template"]["spec"]
        user = spec["securityContext"]
        assert user["runAsNonRoot"], pod
        assert {user[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {49999}, pod
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}, pod
        assert not spec["automountServiceAccountToken"], pod
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, pod
        assert container["resources"]["limits"]["memory"], pod
        assert resource["spec"].get("replicas", 1) == 1, pod


@pytest.mark.parametrize("name", ["server.yaml", "site.yaml"])
def test_selectors_ports_and_volumes_exist(name: str) -> None:
    labels = {pod: resource["spec"]["template"]["metadata"]["labels"]["app"] for pod, resource, _ in pods(name)}
    assert labels == {pod: pod for pod in labels}
    ports = {port["name"] for _, _, container in pods(name) for port in container.get("ports", [])}
    claims = {item["metadata"]["name"] for item in resources(name) if item["kind"] == "PersistentVolumeClaim"}
    for _, resource, container in pods(name):
        spec = resource["spec"]["template"]["spec"]
        templates = {item["metadata"]["name"] for item in resource["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in spec["volumes"]} | templates
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        used = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in spec["volumes"]
            if "persistentVolumeClaim" in volume
        }
        assert used <= claims
    for resource in resources(name):
        if resource["kind"] == "Service":
            assert resource["spec"]["selector"]["app"] in labels
            assert {port["targetPort"] for port in resource["spec"]["ports"]} <= ports
        if resource["kind"] == "NetworkPolicy":
            assert resource["spec"]["podSelector"]["matchLabels"]["app"] in labels


def test_the_docs_create_each_secret_and_config_map_from_the_right_folder() -> None:
    """A site's command in the docs names site 1."""
    text = DOCS.read_text(encoding="utf-8").replace("\\\n", " ")
    created = re.findall(r"create (secret generic|configmap) ([\w-]+) +--from-file=(\S+)", text)
    found = {(kind.split()[0], name): source for kind, name, source in created}
    needed: dict[tuple[str, str], str] = {}
    compose, secrets = read_compose()["services"], read_compose()["secrets"]
    for file, services in (("server.yaml", SERVER), ("site.yaml", SITE)):
        for pod, resource, container in pods(file):
            service = compose[services[pod]]
            binds = [volume for volume in service.get("volumes", []) if "target" in volume]
            given = {bound["target"].removesuffix(f"/{Path(bound['source']).name}"): bound["source"] for bound in binds}
            for secret in service.get("secrets", []):
                folder = secrets[secret["source"]]["file"].rpartition("/")[0]
                given[secret["target"].rpartition("/")[0]] = folder
            places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            for volume in resource["spec"]["template"]["spec"]["volumes"]:
                place = places[volume["name"]]
                if "secret" in volume:
                    needed["secret", volume["secret"]["secretName"]] = given[place][2:]
                elif "configMap" in volume:
                    needed["configmap", volume["configMap"]["name"]] = given[place][2:]
    assert found == needed


@needs_tools
def test_only_secrets_have_private_keys(tmp_path: Path) -> None:
    assert make_keys(tmp_path / "keys", "--nodes", "2").returncode == 0
    text = DOCS.read_text(encoding="utf-8").replace("\\\n", " ")
    for kind, source in re.findall(rf"create (secret generic|configmap) [\w-]+ +--from-file={KEYS[2:]}/(\S+)", text):
        private = any(file.suffix == ".key" for file in (tmp_path / "keys" / source).iterdir())
        assert private == (kind == "secret generic"), source
