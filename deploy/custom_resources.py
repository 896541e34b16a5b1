"""Validate objects of kinds that Kubernetes itself does not have, each against its definition; for `deploy/check.py`.

Run by the Python of .venv-deploy, which has these definitions as pydantic models. Reads a JSON list of objects from
standard input and prints one line a fault; a field that a definition does not have is one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from cloudcoil.models.cert_manager.v1 import Certificate, Issuer
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PodMonitor, PrometheusRule
from pydantic import BaseModel, ValidationError

DEFINITIONS: dict[tuple[str, str], type[BaseModel]] = {
    ("cert-manager.io/v1", "Certificate"): Certificate,
    ("cert-manager.io/v1", "Issuer"): Issuer,
    ("keda.sh/v1alpha1", "ScaledObject"): ScaledObject,
    ("monitoring.coreos.com/v1", "PodMonitor"): PodMonitor,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PrometheusRule,
}


def faults(document: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with an object."""
    name = f"{document['kind']} {document['metadata']['name']}"
    definition = DEFINITIONS.get((document["apiVersion"], document["kind"]))
    if definition is None:
        yield f"{name}: there is no definition of {document['apiVersion']} {document['kind']}"
        return
    try:
        definition.model_validate(document, extra="forbid")
    except ValidationError as error:
        for fault in error.errors():
            yield f"{name}, {'.'.join(map(str, fault['loc']))}: {fault['msg']}"


if __name__ == "__main__":
    for document in json.load(sys.stdin):
        for fault in faults(document):
            print(fault)  # noqa: T201
