"""Suggests the commands that send a letter again."""

from __future__ import annotations

import shlex

from tidemill.deadletters.letter import Letter


def suggest_commands(letter: Letter, config: str, *, again: bool, max_redrives: int) -> dict[str, str]:
    """Return the commands by the names of their actions.

    Args:
        letter: The letter.
        config: The configuration file in the commands; empty for none.
        again: Whether the letter was sent again already.
        max_redrives: How often a letter is sent again unless the command overrides it.
    """
    command = f"tidemill dlq redrive {f'{shlex.quote(config)} ' if config else ''}--id {letter.letter_id}"
    # A redrive continues after the letters that it has sent, so it reaches this one only from the beginning.
    command += " --restart" if again else ""
    commands = {}
    if letter.sources:
        allowed = f" --max-redrives {letter.redrives + 1}" if letter.redrives >= max_redrives else ""
        headers = " --drop-headers" if any(source.headers_error for source in letter.sources) else ""
        commands["process again"] = f"{command}{allowed}{headers}"
    if letter.sink_name and letter.original_payloads:
        commands["deliver again"] = f"{command} --to sink"
    return commands
