"""Kubernetes' API server: how it is reached, and what its refusals mean.

Source: "Kubernetes API Concepts" (resource versions, dry run) of the Kubernetes documentation; seen with an API server
1.20.2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final

import httpx2
import msgspec
import yaml
from lightkube import Client, KubeConfig
from lightkube.core.exceptions import ConfigError as KubeConfigError
from lightkube.core.resource import GlobalResource

from ingero.errors import ConfigError, PermanentError, RetryableError
from ingero.remediation.kubernetes_config import KubernetesAccessConfig
from ingero.units import NS_PER_S

FIELD_MANAGER: Final = "ingero-remediator"
REASON: Final = "ingero.io/remediation"
"""Annotation: the action, its finding and why, as a scheduler's reason."""
MAX_MESSAGE_CHARS: Final = 500
CHUNK: Final = 500
"""Objects of one answer to a question for all."""
ATTEMPTS: Final = 5
"""Of one request whose object was changed by somebody else in between."""
_PASSING: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


class ConflictError(RetryableError):
    """The node is not what a request was built from."""


@contextmanager
def name_request(doing: str) -> Iterator[None]:
    """Name what the server was asked, and whether it may be asked again.

    Raises:
        PermanentError: It refused.
        RetryableError: It did not answer, or asks to be asked again.
    """
    try:
        yield
    except httpx2.HTTPStatusError as error:
        status = error.response.status_code
        message = f"Kubernetes does not {doing}: {error}"
        if status == HTTPStatus.CONFLICT:
            raise ConflictError(message) from error
        if status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise RetryableError(message) from error
        raise PermanentError(message) from error
    except httpx2.HTTPError as error:
        problem = str(error) or type(error).__name__
        raise RetryableError(f"Kubernetes' API server does not answer: {problem}") from error
    except (json.JSONDecodeError, msgspec.MsgspecError, KeyError) as error:
        # KeyError: lightkube wants a Content-Type in each answer.
        raise RetryableError(f"what answers is not Kubernetes' API server: {error}") from error
    except (KubeConfigError, OSError) as error:  # a token's file, a program that gives tokens
        raise RetryableError(f"no credentials for Kubernetes: {error}") from error


def is_missing(error: PermanentError) -> bool:
    """Whether the server has no such object or API, rather than no such right."""
    cause = error.__cause__
    response = getattr(cause, "response", None)
    return response is not None and response.status_code == HTTPStatus.NOT_FOUND


def connect(config: KubernetesAccessConfig, section: str) -> Client:
    """A client of the API server.

    Args:
        config: Where it is.
        section: Of the policy, for errors.

    Raises:
        ConfigError: There is no kubeconfig, it cannot be read, or it has no such context.
    """
    where = config.kubeconfig or "the service account of this pod, $KUBECONFIG or ~/.kube/config"
    try:
        file = config.kubeconfig
        found = KubeConfig.from_file(file) if file else KubeConfig.from_env()
        return Client(
            found.get(config.context or None), timeout=httpx2.Timeout(config.timeout / NS_PER_S)
        )
    except KeyError as error:
        raise ConfigError(f"{section}: {where} lacks {error}") from error
    except (
        AttributeError,
        KubeConfigError,
        OSError,
        TypeError,
        ValueError,
        yaml.YAMLError,
    ) as error:
        raise ConfigError(
            f"{section}: {where} cannot be used: {error}",
            hint=f"set {section}.kubeconfig to a file that `kubectl --kubeconfig FILE get nodes` works with",
        ) from error


def delete_unchanged(
    client: Client, kind: type[GlobalResource], name: str, uid: str, version: str
) -> None:
    """Delete an object if it still is the one that was read, and nobody has changed it since.

    Raises:
        ConflictError: It is not, or somebody has.
        PermanentError: The server refused.
        RetryableError: It did not answer.
    """
    inner = client._client  # noqa: SLF001 - lightkube deletes without a body, which preconditions need
    asked = inner.prepare_request("delete", kind, name=name)
    asked.data = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": uid, "resourceVersion": version},
    }
    with name_request("delete it"):
        inner.handle_response("delete", inner.send(inner.build_adapter_request(asked)), asked)
