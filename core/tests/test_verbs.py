"""`kvloom --help`: every verb is listed, without working any of them out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.main import get_group
from typer.testing import CliRunner

from kvloom import ConfigError, pip_install
from kvloom.cli import main
from kvloom.plugins import command_outline, registry


def test_what_is_listed_is_what_there_is() -> None:
    listed = get_group(main.app("")).commands
    commands = main.app()
    whole = get_group(commands).commands
    assert set(listed) == set(whole) == command_outline.names(commands) and set(main.VERBS) <= set(whole)
    for name in set(whole) - set(main.VERBS):
        assert listed[name].get_short_help_str() == whole[name].get_short_help_str()
    for line in main.VERBS.values():
        assert len(line) <= 66 and line.endswith("."), "a list would cut it"


def test_a_verb_of_another_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the README's own line, which installs three packages."""
    builtin = [one for one in registry._installed() if one.name == "builtin"]
    monkeypatch.setattr(registry, "_installed", lambda: builtin)
    commands = main.app()
    assert "top" not in get_group(main.app("")).get_help(typer.Context(get_group(commands)))
    for name, dist in main.ELSEWHERE.items():
        for more in ([], ["--help"], ["x.yaml", "--unknown", "3"]):
            error = CliRunner().invoke(commands, [name, *more]).exception
            assert isinstance(error, ConfigError), (name, more)
            assert str(error) == f"kvloom {name}: comes with {dist}: {pip_install(dist)}"


def test_every_verb_of_our_packages_is_known() -> None:
    assert set(main.ELSEWHERE) == set(get_group(main.app()).commands) - set(main.VERBS)


def test_only_the_verb_that_is_called_is_worked_out() -> None:
    for name in ("plugins", "trace", "top"):
        commands = get_group(main.app(name)).commands
        assert set(commands) == {name}
    assert set(get_group(main.app("nothing")).commands) > {"plugins", "trace", "top"}, "to suggest what was meant"


def test_a_list_imports_no_verb() -> None:
    script = (
        "import sys; sys.argv = ['kvloom', '--help']\n"
        "from kvloom.cli.main import main\n"
        "try: main()\n"
        "finally: print('imported:', {'kvloom.cli.config', 'kvloom.inspection', 'kvloom.config'} & set(sys.modules))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.endswith("imported: set()\n") and "  why " in out


def test_an_outline_keeps_what_a_list_shows() -> None:
    commands = typer.Typer(name="shop", help="A shop.", add_completion=False)

    @commands.command()
    def open_up(at: str | int) -> None:
        """Open it."""

    @commands.command("shut", hidden=True)
    def close() -> None: ...

    inner = typer.Typer(help="What it sells.")
    inner.command("tea")(lambda: None)
    commands.add_typer(inner, name="goods")
    beside = typer.Typer()
    beside.command("ring", help="Ring.")(lambda: None)
    commands.add_typer(beside)

    listed = get_group(command_outline.outlined(commands)).commands
    assert {name: (verb.help, verb.hidden) for name, verb in listed.items()} == {
        "open-up": ("Open it.", False),
        "shut": (None, True),
        "goods": ("What it sells.", False),
        "ring": ("Ring.", False),
    }
    assert command_outline.names(commands) == set(listed)
    with pytest.raises(AssertionError, match=r"(?i)union"):
        get_group(commands)
