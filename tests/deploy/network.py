"""What NetworkPolicies let through, worked out as a network plug-in does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

Document = dict[str, Any]


class Peer(NamedTuple):
    """One end of a connection: a pod, or an address outside of the cluster."""

    labels: Mapping[str, str] = {}
    namespace: Mapping[str, str] = {}
    """The labels of its namespace, its name among them."""
    address: str = ""


def allows(documents: list[Document], source: Peer, to: Peer, port: int, protocol: str = "TCP") -> bool:
    """Return whether a connection gets through: out of its source and into where it goes."""
    return _passes(documents, "Egress", source, to, port, protocol) and _passes(
        documents, "Ingress", to, source, port, protocol
    )


def _passes(documents: list[Document], way: str, pod: Peer, other: Peer, port: int, protocol: str) -> bool:
    """Return whether a pod's own policies let one way through; a pod without any lets everything through."""
    policies = [policy for policy in policies_of(documents, pod) if way in policy["policyTypes"]]
    peers = "to" if way == "Egress" else "from"
    rules = [rule for policy in policies for rule in policy.get(way.lower(), ())]
    return not policies or any(
        any(_is_peer(selector, other, pod) for selector in rule[peers])
        and any((entry["port"], entry.get("protocol", "TCP")) == (port, protocol) for entry in rule["ports"])
        for rule in rules
    )


def policies_of(documents: list[Document], pod: Peer) -> Iterator[Document]:
    """Yield the policies that select a pod."""
    for document in documents:
        if (
            document["kind"] == "NetworkPolicy"
            and document["metadata"]["namespace"] == pod.namespace.get("kubernetes.io/metadata.name")
            and _has(pod.labels, document["spec"]["podSelector"])
        ):
            yield document["spec"]


def _is_peer(selector: Document, other: Peer, pod: Peer) -> bool:
    if "ipBlock" in selector:
        block = selector["ipBlock"]
        if not other.address:
            return False
        address = ip_address(other.address)
        return address in ip_network(block["cidr"]) and not any(
            address in ip_network(cut) for cut in block.get("except", ())
        )
    if other.address:
        return False
    if "namespaceSelector" in selector:
        return _has(other.namespace, selector["namespaceSelector"]) and _has(
            other.labels, selector.get("podSelector", {})
        )
    return other.namespace == pod.namespace and _has(other.labels, selector["podSelector"])


def _has(labels: Mapping[str, str], selector: Document) -> bool:
    assert selector.keys() <= {"matchLabels"}, "this knows no expressions"
    return dict(selector.get("matchLabels", {})).items() <= labels.items()
