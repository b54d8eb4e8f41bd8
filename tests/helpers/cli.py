"""Run the command line inside the test process."""

from typer.testing import CliRunner, Result

from mptify.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def works(*arguments: object) -> Result:
    """The result of a command that must succeed."""
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result
