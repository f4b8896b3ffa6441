"""Each command that tests/fresh_environment.py leaves out is documented, and has a reason."""

from __future__ import annotations

from tests.fresh_environment import LEFT_OUT, documented, left_out, put_in_place


def test_every_command_left_out_is_documented() -> None:
    commands = [step.command for step in documented()]
    assert len(commands) > 50
    stale = [start for start in LEFT_OUT if not any(command.startswith(start) for command in commands)]
    assert not stale and all(LEFT_OUT.values())
    kits = [command for command in commands if "workbench.testing" in command]
    assert len(kits) >= 4 and not any(left_out(command) for command in kits)


def test_a_command_has_the_file_that_stands_above_it() -> None:
    found = {step.command: step.mine for step in documented()}
    assert all(name in text for command, text in found.items() for name in ("Coldest", "Dilated") if name in command)


def test_runs_that_readme_names_are_those_that_were_made(tmp_path) -> None:
    for name in ("first_light-20260101-000000-aaaa", "first_light-20260101-000001-bbbb"):
        (tmp_path / name).mkdir()
    first, last = "runs/first_light-20260101-000000-aaaa", "runs/first_light-20260101-000001-bbbb"
    assert put_in_place("workbench inspect runs/first_light-...", tmp_path) == f"workbench inspect {first}"
    command = put_in_place("workbench compare runs/a runs/b --baseline runs/a:dense", tmp_path)
    assert command == f"workbench compare {first} {last} --baseline {first}"
