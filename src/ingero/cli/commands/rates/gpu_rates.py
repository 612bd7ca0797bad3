"""The operator's price list of GPU-hours (`gpu_rates.yaml`): read, fetched and replaced.

It holds no prices of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urljoin, urlsplit

import httpx
from pydantic import Field

from ingero.config.document import Document, load_document, parse_document
from ingero.config.model import StrictModel, check_model
from ingero.config.tls import TlsClientConfig
from ingero.errors import BadDataError, ConfigError, RetryableError, StoreError
from ingero.fleet.processors.collectives.rates import Rate, Rates, RatesConfig
from ingero.serving.tls import build_client_context
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_S
from ingero.whole_files import replace_file

MAX_BYTES: Final = 1 << 20
_MAX_REDIRECTS: Final = 10
_MAX_TEXT: Final = 16


class PriceList(StrictModel):
    """Prices of a GPU-hour, as the file has them."""

    currency_name: str = Field(
        min_length=1, max_length=_MAX_TEXT, description="Such as USD; of every price."
    )
    currency_symbol: str = Field(min_length=1, max_length=_MAX_TEXT, description="Such as $.")
    providers: Mapping[str, Mapping[str, Rate]] = Field(
        min_length=1, description="Provider → GPU model as `nvidia-smi` names it → price."
    )
    fallback_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        description="Price where no entry fits; 0 leaves it unknown."
    )

    @property
    def n_models(self) -> int:
        """Prices in the list."""
        return sum(len(models) for models in self.providers.values())

    def as_fleet(self) -> RatesConfig:
        """The same for Fleet's ``processors.nccl.rates``, where an unknown price is left out."""
        return RatesConfig(
            currency=self.currency_name,
            providers=self.providers,
            fallback_rate=self.fallback_rate or None,
        )

    def find_rate(self, provider: str, gpu_model: str) -> float | None:
        """What Fleet would charge for a GPU-hour; None where that is unknown."""
        return Rates(self.as_fleet()).find_rate(provider, gpu_model)


def read_prices(path: Path) -> PriceList:
    """Read a price list.

    Raises:
        ConfigError: It cannot be read or is not one; every problem with its line.
    """
    return _check(load_document(path))


def parse_prices(text: str, source: str) -> PriceList:
    """A price list that came from elsewhere: nothing of this machine's environment is put into it.

    Raises:
        BadDataError: It is not one.
    """
    try:
        return _check(parse_document(text, source=source, environ={}))
    except ConfigError as error:
        raise BadDataError(f"{source} is no price list: {error.message}") from error


def _check(document: Document) -> PriceList:
    prices, problems = check_model(PriceList, document.tree, lines=document.lines)
    document.problems.extend(problems)
    document.raise_problems()
    if prices is None:
        raise ConfigError("not a price list", source=document.source)
    return prices


@dataclass(frozen=True, slots=True)
class Fetched:
    """A price list from the network.

    Attributes:
        prices: Its content.
        text: As it came.
        url: Where it came from, after redirects.
    """

    prices: PriceList
    text: str
    url: str


def fetch_prices(url: str, ca_file: str, timeout_ns: int, clock: Clock | None = None) -> Fetched:
    """Fetch a price list over HTTPS, redirects included; nothing else is followed.

    Args:
        url: Where it is.
        ca_file: Authority of the server; empty for the system's.
        timeout_ns: Longest time for all of it.
        clock: For the timeout.

    Raises:
        ConfigError: The address is not HTTPS.
        RetryableError: The server does not answer with a document in time.
        BadDataError: It is larger than 1 MiB, leads away from HTTPS or is no price list.
    """
    _refuse_plain(url, ConfigError)
    clock = clock or SystemClock()
    ends_ns = clock.mono_ns() + timeout_ns
    context = build_client_context(TlsClientConfig(ca_file=ca_file or None))
    asked = url
    with httpx.Client(verify=context, timeout=timeout_ns / NS_PER_S, trust_env=False) as client:
        for _ in range(_MAX_REDIRECTS + 1):
            body, onward = _ask(client, asked, ends_ns, clock)
            if not onward:
                return Fetched(parse_prices(body, asked), body, asked)
            asked = onward
            _refuse_plain(asked, BadDataError)
    raise BadDataError(f"{url}: more than {_MAX_REDIRECTS} redirects")


def _ask(client: httpx.Client, url: str, ends_ns: int, clock: Clock) -> tuple[str, str]:
    """What an address holds, or where it leads to."""
    try:
        with client.stream("GET", url) as answer:
            if answer.has_redirect_location:
                return "", urljoin(url, answer.headers["location"])
            return _read(answer, url, ends_ns, clock), ""
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RetryableError(f"{url}: {str(error) or type(error).__name__}") from error


def _refuse_plain(url: str, error: type[ConfigError | BadDataError]) -> None:
    try:
        is_https = urlsplit(url).scheme == "https"
    except ValueError:  # of brackets without an IPv6 address
        is_https = False
    if not is_https:
        raise error(f"{url!r} is not an https address", hint="prices are taken over HTTPS only")


def _read(answer: httpx.Response, url: str, ends_ns: int, clock: Clock) -> str:
    if answer.status_code != httpx.codes.OK:
        raise RetryableError(f"{url}: HTTP {answer.status_code}")
    body = bytearray()
    for chunk in answer.iter_bytes():
        body += chunk
        if len(body) > MAX_BYTES:
            raise BadDataError(f"{url}: larger than 1 MiB; this is no price list")
        if clock.mono_ns() > ends_ns:
            raise RetryableError(f"{url}: not complete in time", hint="raise --timeout")
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadDataError(f"{url}: not UTF-8 text ({error.reason})") from error


def save_prices(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old one or the new one, complete.

    Raises:
        StoreError: It cannot be written; the old one stays.
    """
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error
