"""Models that others serve: whether the endpoints of a config are there before it starts."""

from __future__ import annotations

import difflib
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gradus.config import EvalConfig, LaunchedConfig, RunConfig, resolve_sources
from gradus.errors import ConfigError, ProcessError
from gradus.log import get_logger

TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 4 << 20
_VERSIONED = re.compile(r"/v\d+$")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

log = get_logger(__name__)


@dataclass(frozen=True)
class ExternalModel:
    """A model behind an endpoint that gradus does not start."""

    where: str
    """The source and the key that name it; empty for the model that is evaluated."""
    base_url: str
    model: str
    api_key_var: str | None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that the config sets for the process that asks it."""


def external_models(config: LaunchedConfig) -> Iterator[ExternalModel]:
    """The evaluated model, the teachers of the train sources, and who else plays in any source."""
    if isinstance(config, EvalConfig) and config.base_url is not None:
        yield ExternalModel("", config.base_url, config.model.name, config.api_key_var)
    sources = resolve_sources(config)
    for trained in sources.train:
        reference = trained.complete.algo.reference
        if reference is not None and isinstance(config, RunConfig):
            yield ExternalModel(
                f"source {trained.complete.name!r}, algo.reference",
                reference.base_url,
                reference.model,
                reference.api_key_var,
                config.orchestrator.env_vars,
            )
    for source in sources.all:
        for role, agent in source.given.agents.items():
            if agent.base_url is not None and agent.model is not None:
                yield ExternalModel(
                    f"source {source.complete.name!r}, agents.{role}",
                    agent.base_url,
                    agent.model,
                    agent.api_key_var,
                    source.given.env_vars,
                )


def check_external_models(config: LaunchedConfig, environment: Mapping[str, str]) -> None:
    """Ask each endpoint that a config names for its models, before anything is started.

    ConfigError for a refused key or an unknown model, ProcessError for a server that does not
    answer; both say which source needs it.
    """
    for external in external_models(config):
        try:
            check_endpoint(
                external.base_url,
                external.model,
                api_key_var=external.api_key_var,
                environment={**environment, **external.variables},
            )
        except (ConfigError, ProcessError) as error:
            where = f"{external.where}: " if external.where else ""
            raise type(error)(f"{where}{error}") from None


def is_on_this_machine(url: str) -> bool:
    """Whether a URL names a loopback address, which no proxy of the shell reaches.

    >>> is_on_this_machine("http://localhost:8000/v1"), is_on_this_machine("https://here.net")
    (True, False)
    """
    return urllib.parse.urlsplit(url).hostname in _LOOPBACK


def check_endpoint(
    base_url: str, model: str, *, api_key_var: str | None, environment: Mapping[str, str]
) -> None:
    """Ask an OpenAI-compatible endpoint for its list of models; one without a list is believed."""
    key = None
    if api_key_var is not None:
        key = environment.get(api_key_var)
        if not key:
            raise ConfigError(f"api_key_var: the variable {api_key_var} is not set; export the key")
    base = base_url.rstrip("/")
    url = f"{base}/models" if _VERSIONED.search(base) else f"{base}/v1/models"
    served = _served_models(url, key, api_key_var)
    if served is None or model in served:
        return
    near = difflib.get_close_matches(model, served, n=1)
    shown = ", ".join(sorted(served)[:8])
    raise ConfigError(
        f"model.name: {base_url} does not serve {model!r}"
        + (f"; did you mean {near[0]!r}?" if near else f"; it serves {shown}")
    )


def _served_models(url: str, key: str | None, api_key_var: str | None) -> list[str] | None:
    """The ids; None when the endpoint has no list of models."""
    headers = {"Accept": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, headers=headers)
    try:
        proxies = urllib.request.ProxyHandler({} if is_on_this_machine(url) else None)
        opener = urllib.request.build_opener(proxies)
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            body = response.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            which = f"the key in {api_key_var}" if api_key_var else "a request without a key"
            raise ConfigError(
                f"base_url: {url} refuses {which} ({error.code}); set api_key_var to the variable "
                "that holds the right one"
            ) from None
        if error.code in (404, 405, 501):
            log.warning("%s has no list of models; the name is not checked", url)
            return None
        raise ProcessError(
            f"base_url: {url} answered {error.code}; is the endpoint healthy?"
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ProcessError(
            f"base_url: {url} cannot be reached ({reason}); start the endpoint or correct the "
            "address"
        ) from None
    try:
        return [str(card["id"]) for card in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        log.warning("the endpoint's list of models cannot be read; the name is not checked")
        return None
