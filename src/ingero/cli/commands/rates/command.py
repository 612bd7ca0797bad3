"""``ingero rates``: the price list of GPU-hours that costs are computed with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ingero.cli.options import duration, json_switch, option, with_config
from ingero.cli.render import plural

if TYPE_CHECKING:
    from ingero.cli.commands.rates.gpu_rates import PriceList

_DEFAULT = Path("gpu_rates.yaml")


@click.group("rates")
def command() -> None:
    r"""Show and update the price list of GPU-hours, gpu_rates.yaml.

    The programs have no prices: the list is yours, one that you fetch, or deploy/gpu_rates.yaml to begin with. `rates
    show --fleet` prints it as Fleet's configuration wants it.

    \b
    Examples:
      ingero rates show
      ingero rates show --provider aws --gpu "NVIDIA H100 80GB HBM3"
      ingero rates update --url https://prices.example.com/gpu_rates.yaml
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowConfig:
    """What is shown of a price list."""

    provider: str = option("Only this provider; ec2 and aws are one.", default="")
    gpu: str = option(
        "What Fleet would charge for this GPU; needs --provider.", default="", metavar="MODEL"
    )
    fleet: bool = option(
        "Print it as processors.nccl.rates of Fleet's configuration.", default=False
    )
    as_json: bool = json_switch("Print JSON.")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """Where a price list comes from, and where it goes."""

    url: str = option("Where the list is; https only. Required.", default="", metavar="URL")
    output: Path = option(
        "File to replace.",
        "--output",
        "-o",
        default=_DEFAULT,
        type=click.Path(path_type=Path, dir_okay=False),
    )
    timeout: int = duration(
        "Longest time for all of it.", default="30s", at_least="1ms", metavar="TIME"
    )
    ca_cert: str = option("Authority of the server's certificate.", default="", metavar="FILE")
    as_json: bool = json_switch("Print JSON.")


@command.command("show")
@click.argument("file", type=click.Path(path_type=Path), default=_DEFAULT)
@with_config(ShowConfig)
def show(file: Path, config: ShowConfig) -> None:
    r"""Check a price list and show it.

    FILE is the list.  [default: gpu_rates.yaml]

    \b
    Examples:
      ingero rates show prices.yaml --json
      ingero rates show --fleet
    """
    from ingero.cli.commands.rates.gpu_rates import read_prices

    if config.gpu and not config.provider:
        raise click.UsageError("--gpu needs --provider")
    if config.fleet and (config.provider or config.as_json):
        raise click.UsageError("--fleet takes neither --provider nor --json")
    prices = read_prices(file)
    if config.fleet:
        _show_fleet(prices)
    elif config.gpu:
        _show_rate(prices, config)
    else:
        _show_list(prices, config)


@command.command("update")
@with_config(UpdateConfig)
def update(config: UpdateConfig) -> None:
    r"""Fetch a price list, check it, and put it in the file's place.

    A list that is not complete and right changes nothing. At most ten redirects are followed, all of them https.

    \b
    Examples:
      ingero rates update --url https://prices.example.com/gpu_rates.yaml
      ingero rates update --url https://prices.internal/gpu.yaml --ca-cert ca.pem -o /etc/ingero/gpu_rates.yaml
    """
    from ingero.cli.commands.rates.gpu_rates import fetch_prices, save_prices

    if not config.url:
        raise click.UsageError(
            f"there is no price list of ours to fetch, and {config.output} is left as it is; give the address of yours"
            " with --url, or write the file by hand"
        )
    fetched = fetch_prices(config.url, config.ca_cert, config.timeout)
    save_prices(config.output, fetched.text)
    prices = fetched.prices
    if config.as_json:
        facts = _facts(prices) | {"source": fetched.url, "file": str(config.output)}
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(
        f"{plural(prices.n_models, 'price')} of {plural(len(prices.providers), 'provider')} in "
        f"{prices.currency_name}, from {fetched.url}, in {config.output}"
    )


def _facts(prices: PriceList) -> dict[str, Any]:
    return {
        "currency_name": prices.currency_name,
        "currency_symbol": prices.currency_symbol,
        "n_providers": len(prices.providers),
        "n_models": prices.n_models,
        "fallback_rate": prices.fallback_rate or None,
    }


def _show_list(prices: PriceList, config: ShowConfig) -> None:
    from ingero.wire.names import PROVIDER_ALIASES

    wanted = PROVIDER_ALIASES.get(config.provider.lower(), config.provider.lower())
    chosen = {
        name: dict(models)
        for name, models in prices.providers.items()
        if not config.provider or PROVIDER_ALIASES.get(name.lower(), name.lower()) == wanted
    }
    if config.as_json:
        click.echo(json.dumps(_facts(prices) | {"providers": chosen}, indent=2))
        return
    width = max((len(model) for models in chosen.values() for model in models), default=0)
    for name, models in chosen.items():
        for model, rate in models.items():
            click.echo(f"{name:<12} {model:<{width}} {prices.currency_symbol}{rate:.2f} an hour")
    if not chosen:
        click.echo(f"no price of {config.provider}; there are {', '.join(prices.providers)}")
    rest = f"{prices.currency_symbol}{prices.fallback_rate:.2f} an hour"
    click.echo(f"anything else: {rest if prices.fallback_rate else 'unknown'}")


def _show_rate(prices: PriceList, config: ShowConfig) -> None:
    provider, gpu = config.provider, config.gpu
    rate = prices.find_rate(provider, gpu)
    if config.as_json:
        facts = {"provider": provider, "gpu": gpu, "rate": rate, "currency": prices.currency_name}
        click.echo(json.dumps(facts, indent=2))
        return
    price = "unknown" if rate is None else f"{prices.currency_symbol}{rate:.2f} an hour"
    click.echo(f"{gpu} at {provider}: {price}")


def _show_fleet(prices: PriceList) -> None:
    import yaml

    rates = prices.as_fleet().model_dump(mode="json", exclude_none=True)
    tree = {"processors": {"nccl": {"rates": rates}}}
    click.echo(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), nl=False)
