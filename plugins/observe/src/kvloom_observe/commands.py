"""`kvloom top` and `kvloom serve`. Their dependencies are imported inside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Engine = Annotated[
    str | None,
    typer.Argument(metavar="[ENGINE]", help="An instance_id, a socket, or a metrics URL (default: the only one here)."),
]


def add(commands: typer.Typer) -> None:
    commands.command("top")(top)
    commands.command("serve")(serve)


def top(
    engine: Engine = None,
    once: Annotated[bool, typer.Option("--once", help="Print the present state once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same, as JSON.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=86_400, help="Seconds between looks.")] = 1.0,
) -> None:
    """Watch an engine: its tiers, hit rate, misses and hottest prefixes. It needs `observers: [live]`, or a URL.

    q or Ctrl-C ends it.
    """
    import sys

    from rich.console import Console

    from kvloom import BackendError

    from .sources import find
    from .top.watch import frame, watch

    source = find(engine)
    try:
        told = source.read(False)
    except (OSError, ValueError) as error:
        raise BackendError(str(error)) from None
    console = Console(highlight=False)
    try:
        if as_json:
            print(json.dumps(told))
        elif once or not sys.stdout.isatty():
            frame(told, console)
        else:
            watch(source, told, console, every=every)
    except KeyboardInterrupt:
        raise typer.Exit from None
    except ValueError as error:
        raise BackendError(f"{source.name}: {error}") from None


def serve(
    engine: Engine = None,
    host: Annotated[str, typer.Option(help="Address to listen on. There is no authentication.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8642,
    config: Annotated[
        Path | None, typer.Option(metavar="KV.yaml", help="With --spec: also explain why a prompt was a miss.")
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(metavar="SPEC", help="The shape of the KV, as `kvloom why` takes it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print where it listens as JSON.")] = False,
) -> None:
    """Serve a page that shows an engine, with plots over time; on this machine only, unless --host is set."""
    from kvloom import BackendError, ConfigError, EngineConfig, check_config

    from .serve.server import Page
    from .sources import find

    if (config is None) is not (spec is None):
        raise ConfigError("--config, --spec", "give both, or neither")
    if config is not None and spec is not None:
        check_config(EngineConfig.from_file(config))  # report its errors now, not in a browser
        if not spec.is_file():
            raise ConfigError("--spec", f"{spec} is not there; write engine.spec.to_json() into it")
    source = find(engine)
    try:
        source.read(False)
    except (OSError, ValueError) as error:
        raise BackendError(str(error)) from None
    try:
        page = Page(source, host, port, config=config, spec=spec)
    except OSError as error:
        text = f"port {port} of {host}: {error.strerror or error}; choose another with --port or --host"
        raise BackendError(text) from None
    url = f"http://{f'[{host}]' if ':' in host else host}:{page.port}/"
    typer.echo(json.dumps({"url": url}) if as_json else f"{url}  (Ctrl-C ends it)")
    try:
        page.run()
    except KeyboardInterrupt:
        raise typer.Exit from None
    finally:
        page.close()
