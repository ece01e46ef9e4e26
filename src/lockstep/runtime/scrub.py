"""What may not reach a screen or a file: secrets and control bytes. One rule for log lines and workers' output."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from lockstep.runtime import env

# Whole escape sequences (OSC and its kin, then CSI, then short ones), then any control byte left but tab and newline.
CONTROL = re.compile(
    r"\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
PLAIN = bytes(set(range(128)) - set(range(32)) - {127}) + b"\t\n"  # bytes that need no second look


def scrubber(secrets: Sequence[str] = ()) -> Callable[[str], str]:
    """A function that takes secrets and control bytes out of a text. The environment is asked once, here."""
    hidden = _hidden(secrets)

    def scrub(text: str) -> str:
        if not text.isprintable():  # no control byte is; asked because the expression looks at every letter
            text = CONTROL.sub("", text)  # first: a secret must not hide behind an escape sequence
        for value in hidden:
            if value in text:
                text = text.replace(value, "***")
        return text

    return scrub


def bytes_scrubber(secrets: Sequence[str] = ()) -> Callable[[bytes], bytes]:
    """The same for whole lines as bytes: what is not UTF-8 is spelt out; plain text is passed on unread."""
    scrub = scrubber(secrets)
    hidden = [value.encode() for value in _hidden(secrets)]

    def scrub_bytes(data: bytes) -> bytes:
        if data.translate(None, PLAIN):
            return scrub(data.decode("utf-8", "backslashreplace")).encode("utf-8", "backslashreplace")
        for value in hidden:
            if value in data:
                data = data.replace(value, b"***")
        return data

    return scrub_bytes


def _hidden(secrets: Sequence[str]) -> list[str]:
    return sorted({*env.secrets(), *(value for value in secrets if value)}, key=len, reverse=True)
