"""`kvloom --help`: every verb is listed, without working any of them out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.main import get_group
from typer.testing import CliRunner

from kvloom import ConfigError, PluginError, pip_install
from kvloom.cli import main
from kvloom.plugins import registry, verb_list


def test_what_is_listed_is_what_there_is() -> None:
    listed = get_group(main.app("")).commands
    commands = main.app()
    whole = get_group(commands).commands
    assert set(listed) == set(whole) == verb_list.names(commands) and set(main.VERBS) <= set(whole)
    for name in set(whole) - set(main.VERBS):
        assert listed[name].get_short_help_str() == whole[name].get_short_help_str()
    for line in main.VERBS.values():
        assert len(line) <= 66 and line.endswith("."), "a list would cut it"


def test_a_verb_of_another_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's own line installs three packages; the others' verbs are missing then."""
    builtin = [one for one in registry._installed() if one[0].name == "builtin"]
    monkeypatch.setattr(registry, "_installed", lambda: builtin)
    commands = main.app()
    assert "top" not in get_group(main.app("")).get_help(typer.Context(get_group(commands)))
    for name, dist in main.ELSEWHERE.items():
        for more in ([], ["--help"], ["x.yaml", "--unknown", "3"]):
            error = CliRunner().invoke(commands, [*name.split(), *more]).exception
            assert isinstance(error, ConfigError), (name, more)
            assert str(error) == f"kvloom {name}: comes with {dist}: {pip_install(dist)}"


def test_every_verb_of_our_packages_is_known() -> None:
    commands = get_group(main.app()).commands
    ours = {name for name in main.ELSEWHERE if " " not in name}
    assert ours == set(commands) - set(main.VERBS)
    in_groups = [name.split() for name in main.ELSEWHERE if " " in name]
    assert in_groups and all(not commands[above].commands[name].hidden for above, name in in_groups)


def test_a_group_that_is_there_takes_a_plugins_verbs() -> None:
    commands, config = typer.Typer(), typer.Typer(help="Look.")
    config.command("check")(lambda: None)
    commands.add_typer(config, name="config")
    more, others = typer.Typer(), typer.Typer(help="Another help.")
    others.command("mend")(lambda: None)
    more.add_typer(others, name="config")
    more.command("polish")(lambda: None)
    verb_list.merge(commands, more)
    group = get_group(commands).commands["config"]
    assert set(get_group(commands).commands) == {"config", "polish"}
    assert set(group.commands) == {"check", "mend"} and group.help == "Look."

    again = typer.Typer()
    again.command("dust")(lambda: None)
    again.add_typer(others, name="config")
    with pytest.raises(PluginError, match="the verb 'mend' is taken"):
        verb_list.merge(commands, again)
    assert set(get_group(commands).commands) == {"config", "polish"}, "nothing of it is added"


@pytest.fixture
def as_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is named `kvloom` in its texts, also where the tests run as a module of Python's."""
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)


@pytest.mark.usefixtures("as_script")
@pytest.mark.parametrize("words", [[], ["config"], ["config", "check"], ["plan"], ["top"]])
def test_h_is_help(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for option in ("-h", "--help"):
        monkeypatch.setattr("sys.argv", ["kvloom", *words, option])
        with pytest.raises(SystemExit) as left:
            main.main()
        assert not left.value.code
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].startswith(f"Usage: {' '.join(['kvloom', *words])} ")


def leaves(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Each verb that can be called, with its name behind those of its groups."""
    for name, verb in group.commands.items():
        whole = f"{above} {name}".strip()
        yield from leaves(verb, whole) if hasattr(verb, "commands") else [(whole, verb)]


def test_verbs_have_the_same_words_for_the_same_things() -> None:
    """`--json`; `--model MODEL`, what transformers loads; `--spec SPEC`, the shape of KV."""
    options = {
        name: {option: one.metavar for one in verb.params for option in one.opts}
        for name, verb in leaves(get_group(main.app()))
        if not verb.hidden
    }
    lacking = {name for name, there in options.items() if "--json" not in there}
    assert lacking == {"config schema", "trace record"}, "one prints nothing else; stdout of the other is its command's"
    assert {there["--model"] for there in options.values() if "--model" in there} == {"MODEL"}
    assert {there["--spec"] for there in options.values() if "--spec" in there} == {"SPEC"}
    models = {name for name, there in options.items() if "model" in there}
    assert models == {"eval"}, "a model is an option, unless it is what the verb is about"


@pytest.mark.usefixtures("as_script")
@pytest.mark.parametrize(("line", "found"), [("kvloom wh", {"why"}), ("kvloom config i", {"import"})])
def test_a_shell_completes_verbs(
    line: str, found: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kvloom"])
    monkeypatch.setenv("_KVLOOM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit) as left:
        main.main()
    assert not left.value.code and set(capsys.readouterr().out.split()) == found


def test_the_completion_of_a_shell_can_be_shown() -> None:
    shown = CliRunner().invoke(main.app(""), ["--help"]).output
    assert "--install-completion" in shown and "--show-completion" in shown


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

    listed = get_group(verb_list.outlined(commands)).commands
    assert {name: (verb.help, verb.hidden) for name, verb in listed.items()} == {
        "open-up": ("Open it.", False),
        "shut": (None, True),
        "goods": ("What it sells.", False),
        "ring": ("Ring.", False),
    }
    assert verb_list.names(commands) == set(listed)
    with pytest.raises(AssertionError, match=r"(?i)union"):
        get_group(commands)
