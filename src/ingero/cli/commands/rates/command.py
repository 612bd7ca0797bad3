"""``ingero rates``: the price list of GPU-hours that costs are computed with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ingero.cli.options import read_duration
from ingero.cli.render import plural

if TYPE_CHECKING:
    from ingero.cli.commands.rates.gpu_rates import PriceList

_DEFAULT = Path("gpu_rates.yaml")


@click.group("rates")
def command() -> None:
    r"""Show and update the price list of GPU-hours, gpu_rates.yaml.

    Ingero has no prices of its own: the list is yours, or one that you fetch. `rates show --fleet` prints it as Fleet's
    configuration wants it.

    \b
    Examples:
      ingero rates show
      ingero rates show --provider aws --gpu "NVIDIA H100 80GB HBM3"
      ingero rates update --url https://prices.example.com/gpu_rates.yaml
    """


@command.command("show")
@click.argument("file", type=click.Path(path_type=Path), default=_DEFAULT)
@click.option("--provider", default="", help="Only this provider; ec2 and aws are one.")
@click.option(
    "--gpu",
    default="",
    metavar="MODEL",
    help="What Fleet would charge for this GPU; needs --provider.",
)
@click.option(
    "--fleet", is_flag=True, help="Print it as processors.nccl.rates of Fleet's configuration."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(*, file: Path, provider: str, gpu: str, fleet: bool, as_json: bool) -> None:
    r"""Check a price list and show it.

    FILE is the list.  [default: gpu_rates.yaml]

    \b
    Examples:
      ingero rates show prices.yaml --json
      ingero rates show --fleet
    """
    from ingero.cli.commands.rates.gpu_rates import read_prices

    if gpu and not provider:
        raise click.UsageError("--gpu needs --provider")
    if fleet and (provider or as_json):
        raise click.UsageError("--fleet takes neither --provider nor --json")
    prices = read_prices(file)
    if fleet:
        _show_fleet(prices)
    elif gpu:
        _show_rate(prices, provider, gpu, as_json=as_json)
    else:
        _show_list(prices, provider, as_json=as_json)


@command.command("update")
@click.option("--url", default="", metavar="URL", help="Where the list is; https only. Required.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default=_DEFAULT,
    show_default=True,
    help="File to replace.",
)
@click.option(
    "--timeout",
    default="30s",
    show_default=True,
    callback=read_duration,
    metavar="TIME",
    help="Longest time for all of it.",
)
@click.option(
    "--ca-cert", default="", metavar="FILE", help="Authority of the server's certificate."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def update(*, url: str, output: Path, timeout: int, ca_cert: str, as_json: bool) -> None:
    r"""Fetch a price list, check it, and put it in the file's place.

    A list that is not complete and right changes nothing. At most ten redirects are followed, all of them https.

    \b
    Examples:
      ingero rates update --url https://prices.example.com/gpu_rates.yaml
      ingero rates update --url https://prices.internal/gpu.yaml --ca-cert ca.pem -o /etc/ingero/gpu_rates.yaml
    """
    from ingero.cli.commands.rates.gpu_rates import fetch_prices, replace_file

    if not url:
        raise click.UsageError(
            f"there is no price list of ours to fetch, and {output} is left as it is; give the address of yours with"
            " --url, or write the file by hand"
        )
    fetched = fetch_prices(url, ca_cert, timeout)
    replace_file(output, fetched.text)
    prices = fetched.prices
    if as_json:
        facts = _facts(prices) | {"source": fetched.url, "file": str(output)}
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(
        f"{plural(prices.n_models, 'price')} of {plural(len(prices.providers), 'provider')} in "
        f"{prices.currency_name}, from {fetched.url}, in {output}"
    )


def _facts(prices: PriceList) -> dict[str, Any]:
    return {
        "currency_name": prices.currency_name,
        "currency_symbol": prices.currency_symbol,
        "n_providers": len(prices.providers),
        "n_models": prices.n_models,
        "fallback_rate": prices.fallback_rate or None,
    }


def _show_list(prices: PriceList, provider: str, *, as_json: bool) -> None:
    from ingero.wire.names import PROVIDER_ALIASES

    wanted = PROVIDER_ALIASES.get(provider.lower(), provider.lower())
    chosen = {
        name: dict(models)
        for name, models in prices.providers.items()
        if not provider or PROVIDER_ALIASES.get(name.lower(), name.lower()) == wanted
    }
    if as_json:
        click.echo(json.dumps(_facts(prices) | {"providers": chosen}, indent=2))
        return
    width = max((len(model) for models in chosen.values() for model in models), default=0)
    for name, models in chosen.items():
        for model, rate in models.items():
            click.echo(f"{name:<12} {model:<{width}} {prices.currency_symbol}{rate:.2f} an hour")
    if not chosen:
        click.echo(f"no price of {provider}; there are {', '.join(prices.providers)}")
    rest = f"{prices.currency_symbol}{prices.fallback_rate:.2f} an hour"
    click.echo(f"anything else: {rest if prices.fallback_rate else 'unknown'}")


def _show_rate(prices: PriceList, provider: str, gpu: str, *, as_json: bool) -> None:
    rate = prices.find_rate(provider, gpu)
    if as_json:
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
