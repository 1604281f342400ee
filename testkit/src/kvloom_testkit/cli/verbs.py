"""`kvloom check` and `kvloom new`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvloom import ConfigError

_KINDS = "backend, serializer, connector, tokens, retriever, executor or observer"
_ENGINE = "Whole engine connectors"


def add(commands: typer.Typer) -> None:
    """Add the verbs of the kit."""

    @commands.command("check")
    def check(
        kind: Annotated[str, typer.Argument(help=f"{_KINDS}; or engine.")],
        type: Annotated[str, typer.Argument(help="The word in YAML; of an engine, vllm, sglang or transformers.")],
        set: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                help="A setting, KEY=VALUE as in YAML; {tmp} is a directory of each test's own. Engines: --extra.",
            ),
        ] = None,
        only: Annotated[list[str] | None, typer.Option("--only", help="Ids of requirements; default: all.")] = None,
        seconds: Annotated[
            float, typer.Option("--seconds", help="Time after which a requirement, or an engine's answer, is a hang.")
        ] = 120.0,
        repeat: Annotated[int, typer.Option("--repeat", help="Number of runs of each, to find rare failures.")] = 1,
        thorough: Annotated[
            bool,
            typer.Option(
                "--thorough",
                help="Test longer: more rounds of races, more blobs, more kills. Engines: --repeat.",
            ),
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        connector: Annotated[
            str | None,
            typer.Option("--connector", help="MODULE:CLASS, or a name that vLLM knows.", rich_help_panel=_ENGINE),
        ] = None,
        offloading_spec: Annotated[
            str | None,
            typer.Option(
                "--offloading-spec",
                help="MODULE:CLASS of a spec for vLLM's OffloadingConnector, instead of --connector.",
                rich_help_panel=_ENGINE,
            ),
        ] = None,
        secondary_tier: Annotated[
            str | None,
            typer.Option(
                "--secondary-tier",
                help="MODULE:CLASS, or vLLM's name, of a secondary tier of its offloading, instead of --connector.",
                rich_help_panel=_ENGINE,
            ),
        ] = None,
        storage: Annotated[
            str | None,
            typer.Option(
                "--storage",
                help="MODULE:CLASS, or SGLang's name, of a storage of its HiCache.",
                rich_help_panel=_ENGINE,
            ),
        ] = None,
        cached: Annotated[
            str | None,
            typer.Option(
                "--cached",
                help="MODULE:FUNCTION that puts a cache round a model of transformers.",
                rich_help_panel=_ENGINE,
            ),
        ] = None,
        cache: Annotated[
            str | None,
            typer.Option("--cache", help="MODULE:CLASS of a cache of transformers.", rich_help_panel=_ENGINE),
        ] = None,
        extra: Annotated[
            str | None,
            typer.Option(
                "--extra",
                help="Its extra config in JSON; {tmp} is a directory that the kit makes and damages.",
                rich_help_panel=_ENGINE,
            ),
        ] = None,
        chunk: Annotated[
            int | None,
            typer.Option("--chunk", help="Tokens of the smallest piece it stores.", rich_help_panel=_ENGINE),
        ] = None,
        block: Annotated[
            int | None, typer.Option("--block", help="Tokens of a block of the engine.", rich_help_panel=_ENGINE)
        ] = None,
        tolerance: Annotated[
            float | None,
            typer.Option("--tolerance", help="Largest difference of equal logprobs.", rich_help_panel=_ENGINE),
        ] = None,
        settle: Annotated[
            float | None,
            typer.Option(
                "--settle",
                help="Seconds until what was saved in the background has to be found.",
                rich_help_panel=_ENGINE,
            ),
        ] = None,
        short: Annotated[
            bool, typer.Option("--short", help="Fewer requests of each kind.", rich_help_panel=_ENGINE)
        ] = False,
        junit: Annotated[
            Path | None, typer.Option("--junit", help="Write JUnit XML to a file.", rich_help_panel=_ENGINE)
        ] = None,
    ) -> None:
        """Test an installed component against the requirements of its kind."""
        engine = {
            "--connector": connector, "--offloading-spec": offloading_spec, "--secondary-tier": secondary_tier,
            "--storage": storage, "--cached": cached, "--cache": cache, "--extra": extra,
            "--chunk": chunk, "--block": block, "--tolerance": tolerance, "--settle": settle,
            "--short": short or None, "--junit": junit,
        }  # fmt: skip
        if kind == "engine":
            from kvloom_testkit.engines import report as engines

            others = {"--set": set, "--thorough": thorough}
            status = engines.run_options(type, engine, others, only or [], seconds, as_json=as_json, repeat=repeat)
            raise typer.Exit(status)
        if given := [name for name, value in engine.items() if value is not None]:
            raise ConfigError(given[0], "this option is for `kvloom check engine`")
        from kvloom_testkit.cli import report

        status = report.run(
            kind, type, set or [], only or [], seconds, as_json=as_json, repeat=repeat, thorough=thorough
        )
        raise typer.Exit(status)

    @commands.command("new")
    def new(
        kind: Annotated[str, typer.Argument(help=_KINDS)],
        name: Annotated[str, typer.Argument(help="The word in YAML.")],
        into: Annotated[Path, typer.Option("--into", help="Parent directory of the package.")] = Path(),
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Write the package of a new plugin."""
        from kvloom_testkit.cli import scaffold

        place = scaffold.create(kind, name, into)
        if as_json:
            print(json.dumps({"package": str(place)}))
            return
        print(f"{place} is a package; go on with\n\n    cd {place}\n    pip install -e '.[test]'\n    pytest\n")
