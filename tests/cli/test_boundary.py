"""Which failures of a command mean that nobody reads its output any more."""

import os
import socket

import click
import pydantic_core
import pytest

from ingero.cli.boundary import find_error, is_after_interrupt, is_closed_output
from ingero.cli.main import run_program
from ingero.errors import UnsupportedError


@pytest.fixture
def pipe():
    """Both ends of a pipe: to read, to write."""
    fds = list(os.pipe())
    yield fds
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def fail_to_send():
    """What a connection to a server that went away raises."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(BrokenPipeError) as raised:
        ours.send(b"x")
    return raised.value


def test_a_broken_connection_is_an_error_as_long_as_somebody_reads_the_output(pipe):
    error = fail_to_send()
    assert not is_closed_output(error, pipe[1])
    assert not is_closed_output(ExceptionGroup("tasks", [error]), pipe[1])
    assert "Broken pipe" in find_error(error).message


def test_an_output_without_a_reader_is_no_error(pipe):
    os.close(pipe[0])
    pipe[0] = -1
    with pytest.raises(BrokenPipeError) as raised:
        os.write(pipe[1], b"x")
    assert is_closed_output(raised.value, pipe[1])
    assert is_closed_output(ExceptionGroup("tasks", [raised.value]), pipe[1])
    assert not is_closed_output(OSError("another"), pipe[1])


def test_a_command_that_loses_a_connection_fails_and_says_so(capsys):
    @click.command()
    def command():
        raise fail_to_send()

    assert run_program(command, []) == 1
    assert "closed a connection (broken pipe)" in capsys.readouterr().err


class _Interrupted:
    """A value of a validator, while whose text is made Ctrl-C comes."""

    def __repr__(self):
        raise KeyboardInterrupt


def test_ctrl_c_while_pydantic_builds_a_validator_is_ctrl_c(capsys):
    @click.command()
    def command():
        pydantic_core.SchemaValidator({"type": "literal", "expected": [_Interrupted()]})

    assert run_program(command, []) == 130
    assert capsys.readouterr().err == ""


def test_an_error_that_was_raised_from_itself_ends_as_any_other():
    error = ValueError("x")
    error.__cause__ = error
    assert not is_after_interrupt(error)
    cleaning = OSError("y")
    cleaning.__context__ = error
    assert not is_after_interrupt(cleaning)
    error.__cause__ = KeyboardInterrupt()
    assert is_after_interrupt(cleaning)


def test_a_package_of_an_extra_that_is_not_there_is_named_with_the_extras():
    error = find_error(ModuleNotFoundError("No module named 'google.rpc'", name="google.rpc"))
    assert isinstance(error, UnsupportedError)
    assert "google.rpc" in error.message
    assert "ingero[fleet]" in error.hint
    assert find_error(ModuleNotFoundError("No module", name="ingero.fleet.gone")) is None
